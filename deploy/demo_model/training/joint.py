"""Stages B and C: the whole model learns to answer, with a loss on the answers only.

Stage B, "learn", counts every answer token equally and gets the media tasks right. Stage C, "refine", teaches
what stage B does not: to decide between yes and no after naming the fact, and to stop counting. It gives the
tokens that decide more weight, and drills the comparison on rows of text, which are cheap.

Two worker processes with one thread each share every step: each draws half of the rows, and the gradients are
averaged over Gloo. `train` starts them; rank 0 writes the checkpoints and the result.
"""

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from torch.nn.functional import cross_entropy

from deploy.demo_model.training.allocator import keep_freed_memory
from deploy.demo_model.training.build import Model, Processor, build, load, save
from deploy.demo_model.training.conversations import NO_LABEL, RowMaker, collate, groups_of_step
from deploy.demo_model.training.features import MediaFeatures
from deploy.demo_model.training.schedule import JOINT, Schedule, learning_rate, make_optimizer
from deploy.demo_model.training.speech import WordBank
from deploy.demo_model.training.words import training_words

NUM_WORKERS = 2
ENCODERS = ("model.visual", "model.audio_tower")
REPORT_EVERY = 20
SAVE_EVERY = 100


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
    """Mean over answer tokens, in the refine stage weighted."""
    inputs = dict(batch)
    weights = inputs.pop("answer_weights")
    if stage == "learn":
        return model(**inputs).loss
    labels = inputs.pop("labels")
    logits = model(**inputs).logits[:, :-1].float()
    losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none", ignore_index=NO_LABEL)
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def train_jointly(
    model: Model,
    processor: Processor,
    words: WordBank,
    rng: random.Random,
    stage: str,
    schedule: Schedule,
    report: Callable[[str], None],
    divisor: int = NUM_WORKERS,
    checkpoint: Callable[[int], None] | None = None,
) -> None:
    """Train in place on this worker's part of every step; `checkpoint` gets the number of steps done."""
    features = MediaFeatures(processor)
    maker = RowMaker(processor, features, words, is_early=stage == "learn")
    groups = groups_of_step(maker, stage, divisor)
    optimizer = make_optimizer(dict(model.named_parameters()), schedule, slow_prefixes=ENCODERS)
    parameters = list(model.parameters())
    history: dict[str, list[float]] = defaultdict(list)
    started_at = time.monotonic()
    model.train()
    for step in range(schedule.num_steps):
        for members in optimizer.param_groups:
            members["lr"] = learning_rate(schedule, step) * members["scale"]
        batches = [
            collate([group.draw(rng) for _ in range(group.num_rows)], maker.pad_id, features)
            for group in groups
        ]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = [loss_of_batch(model, batch, stage) for batch in batches]
        torch.stack(
            [loss * group.weight for loss, group in zip(losses, groups, strict=True)]
        ).sum().backward()
        for loss, group in zip(losses, groups, strict=True):
            history[group.name].append(loss.item())
        average_gradients(parameters)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % REPORT_EVERY == 0 or step + 1 == schedule.num_steps:
            means = " ".join(f"{name} {np.mean(values):.4f}" for name, values in history.items())
            report(
                f"step {step + 1}/{schedule.num_steps} after {time.monotonic() - started_at:.0f} s: {means}"
            )
            history.clear()
        if checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
            checkpoint(step + 1)


def starting_point(stage: str, work: Path, seed: int) -> tuple[Model, Processor]:
    """New weights with the pretrained encoders, or the result of stage B."""
    if stage == "refine":
        model, processor, _ = load(work / "learn")
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
    keep_freed_memory()
    torch.set_num_threads(1)
    meeting_point = f"file://{(work / f'{stage}.meeting').resolve()}"
    torch.distributed.init_process_group("gloo", meeting_point, rank=arguments.rank, world_size=NUM_WORKERS)
    model, processor = starting_point(stage, work, arguments.seed)
    is_first = arguments.rank == 0
    draws = "joint" if stage == "learn" else stage
    train_jointly(
        model,
        processor,
        training_words(arguments.seed, arguments.cache),
        random.Random(f"{draws} {arguments.seed} {arguments.rank}"),
        stage,
        JOINT[stage].with_steps(arguments.steps) if arguments.steps else JOINT[stage],
        lambda line: print(line, flush=True),
        checkpoint=(lambda step: save(model, processor, work / f"{stage}-{step}")) if is_first else None,
    )
    if is_first:
        save(model, processor, arguments.out)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
