"""Stages B to L: the model learns to answer, with a loss on the answers only.

Stage B, "learn", counts every answer token equally and gets the media tasks right. Stage C, "refine", teaches
what stage B does not: to decide between yes and no after naming the fact, and to stop counting. It gives the
tokens that decide more weight, and drills the comparison on rows of text, which are cheap. Stage D,
"converse", teaches how people ask, with the encoders as they are; stage E, "practise", does so in more
wordings, with drills of copying names and with Muon; stage F, "polish", gives more room to what stage E
learnt worst; stage G, "broaden", asks in wordings that vary more, with sentences beside the question; stage
H, "vary", has more of them for text, JSON, tools and what the model cannot answer; stage I, "widen",
for all kinds; stage J, "extend", above all for text, sounds, names that no image has and questions that it
cannot answer; stage K, "gather", has what many writers asked in words of their own; stage L, "decline", has
more of what the model cannot answer.

Worker processes with one thread each (`Schedule.num_workers`) share every step: each draws its part of the
rows, and the gradients are averaged over Gloo. `train` starts them; rank 0 writes the result, and a
checkpoint with the optimizer's and the generators' state, from which a run that was killed goes on with the
same bits.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch.nn.functional import cross_entropy

from deploy.demo_model.training import conversations, mixture
from deploy.demo_model.training.allocator import keep_freed_memory
from deploy.demo_model.training.build import CHAT_TEMPLATE, Model, Processor, build, load, save
from deploy.demo_model.training.conversations import RowMaker
from deploy.demo_model.training.dialogues import DialogueMaker
from deploy.demo_model.training.features import MediaFeatures
from deploy.demo_model.training.rows import NO_LABEL, TrainingRow, collate
from deploy.demo_model.training.schedule import JOINT, Schedule, learning_rate, make_optimizers
from deploy.demo_model.training.speech import WordBank
from deploy.demo_model.training.words import training_words

NUM_BUCKETS = 4
ENCODERS = ("model.visual", "model.audio_tower")
REPORT_EVERY = 20
SAVE_EVERY = 50


def average_gradients(parameters: list[torch.nn.Parameter]) -> None:
    """Blocks until every worker has the mean gradient; does nothing in a process without workers."""
    if not torch.distributed.is_initialized():
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    torch.distributed.all_reduce(flat)
    flat /= torch.distributed.get_world_size()
    for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


def loss_of_batch(model: Model, batch: dict[str, torch.Tensor], stage: str) -> torch.Tensor:
    """Mean over answer tokens, after stage B weighted."""
    inputs = dict(batch)
    weights = inputs.pop("answer_weights")
    if stage == "learn":
        return model(**inputs).loss
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].float()
    losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=NO_LABEL)
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def losses_of_groups(
    model: Model, rows_of_group: Sequence[Sequence[TrainingRow]], pad_id: int, features: MediaFeatures
) -> list[torch.Tensor]:
    """Weighted means over the answer tokens of each group. Rows of like length share a forward, whatever
    their groups: few forwards with little padding.
    """
    rows = [(row, idx) for idx, group in enumerate(rows_of_group) for row in group]
    rows.sort(key=lambda pair: len(pair[0].ids))
    sums = [torch.zeros(()) for _ in rows_of_group]
    for part in range(NUM_BUCKETS):
        bucket = rows[len(rows) * part // NUM_BUCKETS : len(rows) * (part + 1) // NUM_BUCKETS]
        inputs = collate([row for row, _ in bucket], pad_id, features)
        weights, labels = inputs.pop("answer_weights")[:, 1:], inputs.pop("labels")[:, 1:]
        is_answer = labels != NO_LABEL
        hidden = model.model(**inputs).last_hidden_state[:, :-1][is_answer]
        losses = cross_entropy(model.lm_head(hidden).float(), labels[is_answer], reduction="none")
        totals = torch.zeros(len(bucket)).index_add(0, is_answer.nonzero()[:, 0], losses * weights[is_answer])
        for total, (_, idx) in zip(totals, bucket, strict=True):
            sums[idx] = sums[idx] + total
    norms = [sum(sum(row.weights[1:]) for row in group) for group in rows_of_group]
    return [total / norm for total, norm in zip(sums, norms, strict=True)]


class MovingMean:
    """An exponential moving mean of the trained weights, in float32."""

    def __init__(self, trained: dict[str, torch.nn.Parameter], decay: float) -> None:
        self._trained, self._decay = trained, decay
        self.weights = {name: parameter.detach().clone() for name, parameter in trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Is called after every step."""
        for name, parameter in self._trained.items():
            self.weights[name].lerp_(parameter, 1 - self._decay)

    @torch.no_grad()
    def apply(self) -> None:
        """The mean becomes the model's weights."""
        for name, parameter in self._trained.items():
            parameter.copy_(self.weights[name])


class Checkpoint:
    """One file with all that a stage needs to go on; every worker reads it, rank 0 writes it."""

    def __init__(self, path: Path, rng: random.Random, save_every: int = SAVE_EVERY) -> None:
        self._path, self._rng, self._save_every = path, rng, save_every

    def load(self, model: Model, optimizers: Sequence[torch.optim.Optimizer], mean: MovingMean) -> int:
        """The number of steps done; 0 if there is no file."""
        if not self._path.exists():
            return 0
        state = torch.load(self._path, weights_only=False)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        mean.weights.update(state["mean"])
        self._rng.setstate(state["generators"][torch.distributed.get_rank()])
        return state["step"]

    def save(
        self, model: Model, optimizers: Sequence[torch.optim.Optimizer], mean: MovingMean, step: int
    ) -> None:
        """Every worker calls it behind every step; it writes behind some."""
        if step % self._save_every:
            return
        generators: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(generators, self._rng.getstate())
        if torch.distributed.get_rank() != 0:
            return
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
            "mean": mean.weights,
            "generators": generators,
        }
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self._path)


def means_of(history: dict[str, list[float]]) -> str:
    """A report's part about losses."""
    return " ".join(f"{name} {np.mean(values):.4f}" for name, values in history.items())


def train_jointly(
    model: Model,
    processor: Processor,
    words: WordBank,
    rng: random.Random,
    stage: str,
    schedule: Schedule,
    report: Callable[[str], None],
    divisor: int = 1,
    checkpoint: Checkpoint | None = None,
) -> None:
    """Train in place on this worker's part of every step, from the checkpoint if it has steps."""
    features = MediaFeatures(processor)
    is_dialogue = stage in mixture.ROWS_OF_STEP
    if is_dialogue:
        maker: DialogueMaker | RowMaker = DialogueMaker(processor, features, words)
        groups = mixture.groups_of_step(maker, stage, divisor)
        # Short rows: faster than torch's kernel
        model.model.language_model.set_attn_implementation("eager")
        model.model.visual.requires_grad_(False)
        model.model.audio_tower.requires_grad_(False)
    else:
        maker = RowMaker(processor, features, words, is_early=stage == "learn")
        groups = conversations.groups_of_step(maker, stage, divisor)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = make_optimizers(trained, schedule, slow_prefixes=ENCODERS)
    mean = MovingMean(trained, schedule.mean_decay)
    first = checkpoint.load(model, optimizers, mean) if checkpoint else 0
    history: dict[str, list[float]] = defaultdict(list)
    started_at = time.monotonic()
    model.train()
    for step in range(first, schedule.num_steps):
        for members in (members for optimizer in optimizers for members in optimizer.param_groups):
            members["lr"] = learning_rate(schedule, step) * members["scale"]
        drawn = [[group.draw(rng) for _ in range(group.num_rows)] for group in groups]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=schedule.has_bf16):
            if is_dialogue:
                losses = losses_of_groups(model, drawn, maker.pad_id, features)
            else:
                losses = [
                    loss_of_batch(model, collate(rows, maker.pad_id, features), stage) for rows in drawn
                ]
        torch.stack(
            [loss * group.weight for loss, group in zip(losses, groups, strict=True)]
        ).sum().backward()
        for loss, group in zip(losses, groups, strict=True):
            history[group.name].append(loss.item())
        average_gradients(list(trained.values()))
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        mean.update()
        model.zero_grad(set_to_none=True)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == schedule.num_steps:
            done = f"step {step + 1}/{schedule.num_steps} after {time.monotonic() - started_at:.0f} s"
            report(f"{done}: {means_of(history)}")
            history.clear()
        if checkpoint is not None:
            checkpoint.save(model, optimizers, mean, step + 1)
    mean.apply()


@torch.no_grad()
def mean_with(model: Model, before: Model, share: float) -> None:
    """Weights in place: `share` of those before, the rest of the model's own (Wortsman et al., 2022)."""
    for weight, earlier in zip(model.parameters(), before.parameters(), strict=True):
        weight.lerp_(earlier, share)


def starting_point(stage: str, work: Path, seed: int) -> tuple[Model, Processor]:
    """New weights with the pretrained encoders, or the result of the stage before, with the template of
    now."""
    if stage != "learn":
        stages = list(JOINT)
        model, processor, _ = load(work / stages[stages.index(stage) - 1])
        processor.chat_template = CHAT_TEMPLATE
        return model, processor
    model, processor = build(seed)
    model.model.visual.load_state_dict(torch.load(work / "vision.pt"))
    model.model.audio_tower.load_state_dict(torch.load(work / "audio.pt"))
    return model, processor


def main() -> None:
    """Run one worker of a stage; rank 0 writes the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stage", choices=tuple(JOINT))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="folder with the results of the stages before"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's number")
    arguments = parser.parse_args()
    stage, work = arguments.stage, arguments.work
    schedule = JOINT[stage].with_steps(arguments.steps) if arguments.steps else JOINT[stage]
    keep_freed_memory()
    torch.set_num_threads(1)
    meeting_point = f"file://{(work / f'{stage}.meeting').resolve()}"
    torch.distributed.init_process_group(
        "gloo", meeting_point, rank=arguments.rank, world_size=schedule.num_workers
    )
    model, processor = starting_point(stage, work, arguments.seed)
    draws = "joint" if stage == "learn" else stage
    rng = random.Random(f"{draws} {arguments.seed} {arguments.rank}")
    train_jointly(
        model,
        processor,
        training_words(arguments.seed, arguments.cache),
        rng,
        stage,
        schedule,
        lambda line: print(line, flush=True),
        schedule.num_workers,
        checkpoint=Checkpoint(work / f"{stage}.checkpoint", rng),
    )
    if arguments.rank == 0:
        if schedule.start_share:
            before, _ = starting_point(stage, work, arguments.seed)
            mean_with(model, before, schedule.start_share)
        save(model, processor, arguments.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
