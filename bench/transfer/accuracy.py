"""How coded KV changes a model's answers: the demo model's evaluation set, with a hand-over between two
halves of the model.

Encoder half, prefill into one block memory, hand-over of the prompt's blocks to a second memory, greedy
decoding from the second. The hand-over uses the sender and receiver of the services (whole groups of 64
tokens coded, the rest as it is). fp32 on the CPU, one process.

The other codecs are compared with the hand-over over `raw`:

    right          whole answers equal to the right one, as `deploy.demo_model.training.evaluate` judges
    lost, won      answers that are right over raw and wrong over this codec, and the other way round
    positions      tokens of the raw answer that are predicted over transferred KV
    same_top       those whose likeliest token is the raw answer's, with the raw answer as input
    same_answers   whole greedy answers equal to the raw ones
    divergence     nats, Kullback-Leibler, mean over positions

"short" prompts are the evaluation set as it is. Prefill draws the first token, which no codec can change, so
it is no position.

"long" prompts are harsher than serving. A conversation about text stands before the question and its media,
drawn so that hardly a token is left over after the last whole group. Decode also runs the prompt's last
token again, so that the first token, too, depends on transferred KV. The model was not trained on media
after such turns: over raw, too, it is right less often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import AutoTokenizer

from bench.records import Record
from bench.trusted_media import media_processor, prepare
from cluster.clock import SystemClock
from cluster.kvcache.memory import BlockMemory
from cluster.model.encoder import EncoderModel
from cluster.model.language import FeatureSlice, LanguageModel, PromptPositions, SequenceChunk
from cluster.text.chat import ChatMedia, ChatMessage, ChatText, LaidOutMedia
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import MediaProbe, Modality
from cluster.types.request import Prompt
from deploy.demo_model.training import data
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.evaluate import MAX_NEW_TOKENS, Sample, draw_samples
from deploy.demo_model.training.speech import WordBank
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.codecs.quantisation import GROUP_TOKENS, CodecName
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import Completed
from kv_transfer.lease.transfer_engine import TransferEngine

Carrier = Literal["raw"] | CodecName
Prompts = Literal["short", "long"]
BATCH = 32
MAX_TOKENS = 512  # of a prompt and its answer
# Fills the second memory before anything arrives, so that reading a block that did not travel changes
# answers.
RUBBISH = 1e4
EARLIER_TURNS = 3
NUM_DRAWS = 64  # of earlier turns; the draw that leaves the fewest tokens over is used
TTL_S = 60.0


@dataclass(frozen=True)
class EvaluationPrompt:
    """A prompt that prefill can run, and its right answer."""

    prompt: Prompt
    positions: PromptPositions
    features: tuple[FeatureSlice, ...]
    answer: str

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)


@dataclass
class PlacedPrompt:
    """A prompt with its blocks in both memories."""

    asked: EvaluationPrompt
    source: list[int]  # blocks, of the prompt and the answer
    target: list[int]
    first_token: int = -1  # drawn by prefill
    start: int = 0  # tokens whose KV is used as it arrived; decode computes the rest

    def given(self, answer: Sequence[int]) -> list[int]:
        """Tokens that decode runs if the answer is known: all from `start` on but the last."""
        return [*self.asked.prompt.token_ids, *answer][self.start : -1]

    def predicted(self, answer: Sequence[int]) -> list[int]:
        """The tokens that follow each token of `given`."""
        return [*self.asked.prompt.token_ids, *answer][self.start + 1 :]

    def is_over(self, line: Sequence[int], end_ids: Sequence[int]) -> bool:
        """`line`: the prompt and the generated tokens."""
        num_generated = len(line) - self.asked.num_tokens
        return num_generated == MAX_NEW_TOKENS or (num_generated > 0 and line[-1] in end_ids)


@dataclass(frozen=True)
class BatchOutcome:
    """The outcome of one batch and one codec."""

    answers: list[list[int]]  # greedy, with the end token
    is_right: list[bool]
    logprobs: Tensor  # [positions, vocabulary] float64, with the raw answers as input


@dataclass
class CodecScore:
    samples: int = 0
    right: int = 0
    lost: int = 0
    won: int = 0
    positions: int = 0
    same_top: int = 0
    same_answers: int = 0
    divergence: float = 0.0  # nats, summed over positions
    prompt_tokens: int = 0
    coded_tokens: int = 0
    coded_prompts: int = 0  # with at least one coded group
    raw_bytes: int = 0  # transferred without coding
    coded_bytes: int = 0


# The model


class ModelHalves:
    """The two halves of a model folder, and the text and media processing before them."""

    def __init__(self, folder: Path):
        self.media = media = media_processor(folder)
        self.text = TextProcessor.load(folder, media.transformers_processor)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.encoder = EncoderModel.load(folder, dtype=torch.float32)
        self.language = LanguageModel.load(folder, dtype=torch.float32)

    def ask(self, sample: Sample, prompts: Prompts, rng: random.Random) -> EvaluationPrompt:
        decoded = decoded_media(sample)
        draws = [()] if prompts == "short" else [_earlier_turns(rng) for _ in range(NUM_DRAWS)]
        laid_out = [
            LaidOutMedia(self.media.layout(_probe(*item)), (str(number),))
            for number, item in enumerate(decoded)
        ]
        prompt = min(
            (self.text.chat_prompt(conversation(sample, earlier), laid_out) for earlier in draws),
            key=lambda prompt: len(prompt.token_ids) % GROUP_TOKENS,
        )
        features = []
        for placed in prompt.media:
            modality, array = decoded[int(placed.media_hash)]
            (rows,) = self.encoder.encode(modality, [prepare(self.media, modality, array)])
            for token, row, count in placed.pieces(0, len(prompt.token_ids)):
                features.append(FeatureSlice(token, rows[row : row + count]))
        return EvaluationPrompt(prompt, self.language.positions(prompt), tuple(features), sample.turn.answer)

    def said(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True).strip()


def _earlier_turns(rng: random.Random) -> list[Turn]:
    return [data.text_question(rng) for _ in range(EARLIER_TURNS)]


def decoded_media(sample: Sample) -> list[tuple[Modality, np.ndarray]]:
    """The media in the order of the message."""
    return [
        *((Modality.IMAGE, np.array(image)) for image in sample.images),
        *((Modality.VIDEO, frames) for frames in sample.videos),
        *((Modality.AUDIO, sound) for sound in sample.sounds),
    ]


def _probe(modality: Modality, array: np.ndarray) -> MediaProbe:
    shape = array.shape
    match modality:
        case Modality.IMAGE:
            return MediaProbe(modality, width=shape[1], height=shape[0])
        case Modality.VIDEO:
            return MediaProbe(modality, width=shape[2], height=shape[1], num_frames=shape[0])
        case Modality.AUDIO:
            return MediaProbe(modality, num_samples=shape[0])


def conversation(sample: Sample, earlier: Sequence[Turn]) -> list[ChatMessage]:
    """Earlier turns with their right answers, then the media and the question."""
    media = tuple(ChatMedia(modality) for modality, _ in decoded_media(sample))
    messages = []
    for turn in earlier:
        messages += [ChatMessage("user", turn.question), ChatMessage("assistant", turn.answer)]
    return [*messages, ChatMessage("user", (*media, ChatText(sample.turn.question)))]


# The hand-over


class HandOver:
    """Two transfer engines in one process: one over the memory that prefill writes, one over the memory that
    decode reads.
    """

    def __init__(self, carrier: Carrier, source: BlockMemory, target: BlockMemory):
        """The memories must be empty: making a wire measures the codec in them."""
        network, self._events = InProcessNetwork(), []
        num_tokens = source.num_blocks * source.layout.segments[0].rows
        wires = [None if carrier == "raw" else Wire(kv, carrier, num_tokens) for kv in (source, target)]
        self._writer = TransferEngine(
            network.agent("prefill"), SystemClock(), lambda _: None, outgoing=source, outgoing_wire=wires[0]
        )
        self._owner = TransferEngine(
            network.agent("decode"),
            SystemClock(),
            self._events.append,
            incoming=target,
            incoming_wire=wires[1],
        )

    def carry(self, source: Sequence[int], target: Sequence[int], num_tokens: int, score: CodecScore) -> None:
        """Transfers the blocks of one prompt. Raises RuntimeError if they do not arrive."""
        before, number = self._writer.sent, len(self._events)
        grant = self._owner.grant(f"lease-{number}", target, [0] * len(target), TTL_S, [num_tokens])
        outgoing = self._writer.open(grant.received(SystemClock().now()))
        outgoing.write(source, range(len(source)))
        outgoing.finish(b"")
        while self._owner.num_open or self._writer.num_open:
            self._writer.step()
            self._owner.step()
        if not isinstance(self._events[-1], Completed):
            raise RuntimeError(f"a hand-over ended as {self._events[-1]}")
        sent = self._writer.sent
        coded_groups = sent.coded_groups - before.coded_groups
        score.prompt_tokens += num_tokens
        score.coded_tokens += coded_groups * GROUP_TOKENS
        score.coded_prompts += coded_groups > 0
        score.raw_bytes += sent.raw_bytes - before.raw_bytes
        score.coded_bytes += sent.coded_bytes - before.coded_bytes


# Measurement


class Comparison:
    """Both memories, and a hand-over between them for each codec; the first is always `raw`."""

    def __init__(self, halves: ModelHalves, carriers: Sequence[Carrier]):
        language = halves.language
        num_blocks = BATCH * MAX_TOKENS // language.block_size
        self._halves, self._language = halves, language
        self._source, self._target = (BlockMemory(language.kv_layout, num_blocks) for _ in range(2))
        every: list[Carrier] = ["raw", *(carrier for carrier in carriers if carrier != "raw")]
        self._hand_overs: dict[Carrier, HandOver] = {
            carrier: HandOver(carrier, self._source, self._target) for carrier in every
        }

    @torch.inference_mode()
    def compare(self, asked: Sequence[EvaluationPrompt], prompts: Prompts) -> dict[Carrier, CodecScore]:
        scores: dict[Carrier, CodecScore] = {carrier: CodecScore() for carrier in self._hand_overs}
        for first in range(0, len(asked), BATCH):
            placed = self._prefill(asked[first : first + BATCH], prompts)
            raw: BatchOutcome | None = None
            for carrier, score in scores.items():
                self._carry(carrier, placed, score)
                answers = self._answers(placed)
                is_right = [
                    self._halves.said(answer) == each.asked.answer
                    for each, answer in zip(placed, answers, strict=True)
                ]
                logprobs = self._logprobs(placed, answers if raw is None else raw.answers)
                outcome = BatchOutcome(answers, is_right, logprobs)
                raw = raw or outcome
                _count(score, placed, outcome, raw)
        return scores

    def _prefill(self, asked: Sequence[EvaluationPrompt], prompts: Prompts) -> list[PlacedPrompt]:
        placed, next_block = [], 0
        for one in asked:
            num_tokens = one.num_tokens + MAX_NEW_TOKENS
            if num_tokens > MAX_TOKENS:
                raise ValueError(f"a prompt of {one.num_tokens} tokens; there is room for {MAX_TOKENS}")
            end = next_block + -(-num_tokens // self._language.block_size)
            source = list(range(next_block, end))
            target = [self._target.num_blocks - 1 - block for block in source]
            start = one.num_tokens if prompts == "short" else one.num_tokens - 1
            placed.append(PlacedPrompt(one, source, target, start=start))
            next_block = end
        chunks = [
            SequenceChunk(
                each.asked.prompt.token_ids, each.asked.positions.position_ids, 0, each.source, each.asked.features
            )
            for each in placed
        ]  # fmt: skip
        logits = self._language.forward(chunks, self._source)
        for each, token in zip(placed, logits.argmax(-1).tolist(), strict=True):
            each.first_token = token
        return placed

    def _carry(self, carrier: Carrier, placed: Sequence[PlacedPrompt], score: CodecScore) -> None:
        for segment in self._target.segments:
            segment.fill_(RUBBISH)
        for each in placed:
            num_tokens = each.asked.num_tokens
            count = -(-num_tokens // self._language.block_size)
            self._hand_overs[carrier].carry(each.source[:count], each.target[:count], num_tokens, score)

    def _logprobs(self, placed: Sequence[PlacedPrompt], answers: Sequence[Sequence[int]]) -> Tensor:
        """The predictions of decode after each token that it runs, given these answers."""
        chunks = []
        for each, answer in zip(placed, answers, strict=True):
            given = each.given(answer)
            position_ids = torch.arange(each.start, each.start + len(given)) + each.asked.positions.delta
            if given:
                chunks.append(
                    SequenceChunk(given, position_ids, each.start, each.target, num_logits=len(given))
                )
        return self._language.forward(chunks, self._target).double().log_softmax(-1)

    def _answers(self, placed: Sequence[PlacedPrompt]) -> list[list[int]]:
        """Greedy, with the end token."""
        lines = [[*each.asked.prompt.token_ids, each.first_token][: each.start + 1] for each in placed]
        while running := [
            (each, line)
            for each, line in zip(placed, lines, strict=True)
            if not each.is_over(line, self._language.eos_token_ids)
        ]:
            logits = self._language.decode(
                [line[-1] for _, line in running],
                [len(line) - 1 for _, line in running],
                [each.asked.positions.delta for each, _ in running],
                [each.target for each, _ in running],
                self._target,
            )
            for (_, line), token in zip(running, logits.argmax(-1).tolist(), strict=True):
                line.append(token)
        return [line[each.asked.num_tokens :] for each, line in zip(placed, lines, strict=True)]


def _count(
    score: CodecScore, placed: Sequence[PlacedPrompt], outcome: BatchOutcome, raw: BatchOutcome
) -> None:
    pairs = zip(placed, raw.answers, strict=True)
    expected = torch.tensor([token for each, answer in pairs for token in each.predicted(answer)])
    score.samples += len(placed)
    score.right += sum(outcome.is_right)
    changes = [now - before for before, now in zip(raw.is_right, outcome.is_right, strict=True)]
    score.lost += changes.count(-1)
    score.won += changes.count(1)
    score.positions += len(expected)
    score.same_top += int((outcome.logprobs.argmax(-1) == expected).sum())
    score.same_answers += sum(a == b for a, b in zip(outcome.answers, raw.answers, strict=True))
    score.divergence += float((raw.logprobs.exp() * (raw.logprobs - outcome.logprobs)).sum())


def measure(
    halves: ModelHalves,
    words: WordBank,
    seed: int,
    num_samples: int,
    carriers: Sequence[Carrier],
    prompts: Sequence[Prompts],
    tasks: Sequence[str],
) -> Iterator[Record]:
    """A record for each kind of prompts, task and codec."""
    comparison = Comparison(halves, carriers)
    for kind in prompts:
        for task in tasks:
            rng = random.Random(f"earlier turns {seed} {task}")
            samples = draw_samples(task, seed, words, num_samples)
            asked = [halves.ask(sample, kind, rng) for sample in samples]
            for carrier, score in comparison.compare(asked, kind).items():
                counts = asdict(score) | {"divergence": score.divergence / max(1, score.positions)}
                yield {
                    "type": "accuracy", "prompts": kind, "task": task, "codec": carrier, "seed": seed, **counts
                }  # fmt: skip
