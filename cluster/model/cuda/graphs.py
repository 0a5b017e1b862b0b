"""CUDA graphs of steps: one for each size of a short list, recorded when a worker starts and replayed
afterwards.

    answers   one token for each of B sequences, from their token ids on
    mixed     T tokens of prompt chunks, answers and drafts, from their embeddings on: the lookup, and the
              rows of media, are enqueued before the replay

A replay repeats the recorded launches at the recorded addresses. Therefore:

* a step's inputs always use the same buffers (`StepBuffers`),
* a step is padded to a recorded size with tokens that write into a scratch block, and a scratch state,
* the logits are always in the same tensor, which all sizes share,
* of a model with room for LoRA adapters a size is recorded twice: for steps in which tokens have some,
  whichever, and for those without, as of a model without room,
* attention must not read the sizes of a step on the host (`ModelAttention.can_capture`), nor may mixers with
  states: transformers' own code takes steps of answers only (`state_step`).

The ranks of a worker record the same sizes in the same order, or none of them does; a call then takes the
same size on all of them. So their graphs, which contain collectives, begin in one order, as NCCL wants it.
Not tried over NCCL.

All graphs share one pool of memory, so only one of them may run at a time. Mixed steps above
`MIXED_TOKENS` are not recorded: the engine cuts prompts so that few steps are larger
(`StepModel.recorded_tokens`). What cannot be recorded runs unrecorded, with equal results; the log says why.

Where prompts' KV is sent while it is computed, a mixed step also tells the host when each layer's K and V are
written (`LayerMarks`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.collectives import Collectives
from cluster.model.cuda.capture import Capture, Replay, capture_cuda
from cluster.model.cuda.layer_marks import LayerMarks
from cluster.model.cuda.paged_attention import MAX_SHARES, RECORDED_PLACES, num_places
from cluster.model.cuda.step_inputs import StepBuffers, StepSizes, answers_of
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.states import StateSpan
from cluster.model.step_model import OnLayer, StepModel

logger = logging.getLogger(__name__)

# A step of more than 256 tokens is padded by a quarter at most, and by 7 % on average: from there on
# its time grows with its tokens.
MIXED_TOKENS = (16, 32, 64, *range(128, 769, 64), *range(896, 2049, 128))
NUM_PROMPTS = 16  # in a mixed step, beside as many answers as a step of answers holds
MAX_PROMPTS = 128  # in a step without answers
# What the driver keeps of one graph outside torch's memory: some kilobytes for each of a few hundred
# launches. An assumption; other workers on the device make it hard to measure.
GRAPH_BYTES = 8 << 20


@dataclass(frozen=True)
class RecordedSizes:
    """What is recorded. Each list ascends."""

    answers: Sequence[StepSizes]
    mixed: Sequence[StepSizes]  # empty: only steps of answers
    has_marks: bool = False  # mixed steps report their layers

    @classmethod
    def up_to(cls, max_batch: int, max_prompt_tokens: int, max_drafts: int = 0) -> RecordedSizes:
        """max_batch: sequences of answers in a step, each with up to `max_drafts` drafts. max_prompt_tokens:
        beside them; 0 without drafts: mixed steps are not recorded. A step of T tokens has at most T
        sequences, and as many tokens whose logits are wanted."""
        max_answer_tokens = max_batch * (1 + max_drafts)
        max_tokens = max_prompt_tokens + max_answer_tokens if max_prompt_tokens or max_drafts else 0
        smaller = [size for size in MIXED_TOKENS if size < max_tokens]
        mixed = MIXED_TOKENS[: len(smaller) + 1] if max_tokens else ()
        return cls(
            [answers_of(size) for size in batch_sizes(max_batch)],
            [
                StepSizes(
                    size, min(size, max_batch + NUM_PROMPTS), min(size, max_answer_tokens + NUM_PROMPTS)
                )
                for size in mixed
            ],
        )

    @classmethod
    def of_prompts(cls, max_tokens: int) -> RecordedSizes:
        """Sizes for a worker without answers, whose prompts' KV is sent while it is computed."""
        smaller = [size for size in MIXED_TOKENS if size < max_tokens]
        mixed = MIXED_TOKENS[: len(smaller) + 1]
        rows = [min(size, MAX_PROMPTS) for size in mixed]
        return cls([], [StepSizes(size, num, num) for size, num in zip(mixed, rows, strict=True)], True)

    @property
    def largest(self) -> StepSizes:
        """Which no step exceeds."""
        every = [*self.answers, *self.mixed]
        return StepSizes(
            max(sizes.num_tokens for sizes in every),
            max(sizes.num_rows for sizes in every),
            max(sizes.num_wanted for sizes in every),
        )


class GraphedModel:
    """A `LanguageModel` whose steps over `kv` are replayed if they have a recorded size. One thread.

    The last blocks of `kv` are scratch (`num_scratch_blocks`): they must not belong to the pool that requests
    draw from.
    """

    def __init__(
        self, model: LanguageModel, kv: BlockMemory, sizes: RecordedSizes, capture: Capture,
        collectives: Collectives | None = None,
    ):  # fmt: skip
        """collectives: of a rank."""
        max_blocks = -(-model.max_model_len // model.block_size)
        largest, device = sizes.largest, kv.buffer.device
        most_tokens = max((mixed.num_tokens for mixed in sizes.mixed), default=0)
        self._model = model
        self._kv = kv
        self._sizes = sizes
        self._capture = capture
        self._collectives = collectives
        scratch = range(kv.num_blocks - num_scratch_blocks(model), kv.num_blocks)
        self._buffers = StepBuffers(
            largest, max_blocks, model.position_axes, model.block_size, scratch[-1], device, scratch[:-1]
        )
        self._embeds = torch.zeros(most_tokens, model.hidden_size, dtype=model.dtype, device=device)
        self._logits = torch.zeros(largest.num_wanted, model.vocab_size, device=device)
        self._replays: dict[tuple[StepSizes, bool], Replay] = {}  # with adapters or without
        self._marks = LayerMarks(device, model.num_layers) if sizes.has_marks else None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Records every size, largest first, so that the smaller ones fit into its memory. Writes into the
        scratch block only. Mixed steps that cannot be recorded are left to the model. Raises RuntimeError
        if steps of answers cannot be recorded."""
        try:
            for sizes in reversed(self._sizes.mixed):
                self._record(sizes)
        except RuntimeError as error:
            logger.warning("steps with prompts are not recorded: %s", error)
            self._sizes = replace(self._sizes, mixed=())
            self._replays.clear()
        for sizes in reversed(self._sizes.answers):
            self._record(sizes)

    @property
    def records_mixed(self) -> bool:
        return bool(self._sizes.mixed)

    @property
    def recorded_tokens(self) -> int:
        return self._sizes.mixed[-1].num_tokens if self._sizes.mixed else 0

    @torch.inference_mode()
    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: OnLayer | None = None
    ) -> Tensor:
        """The logits are valid until the next call. Replays if nothing asks for more than is recorded."""
        sizes = self._sizes_of(chunks) if on_layer is None or self._marks is not None else None
        if sizes is None:
            return self._model.forward(chunks, kv, on_layer)
        self._check(kv)
        if self._marks is not None:
            self._marks.begin()
        token_ids = self._model.inputs.known_ids([token for chunk in chunks for token in chunk.token_ids])
        inputs = self._buffers.fill_chunks(sizes, token_ids, chunks)
        self._model.place_embeds(inputs.token_ids, chunks, self._embeds[: sizes.num_tokens])
        logits = self._replays[sizes, any(chunk.adapter for chunk in chunks)]()
        if self._marks is not None and on_layer is not None:
            self._marks.report(on_layer)
        return logits[: sum(chunk.num_logits for chunk in chunks)]

    @torch.inference_mode()
    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> Tensor:
        """The logits are valid until the next call. A request with more choices than a step of answers has
        sequences runs alone, and unrecorded; so does a step of more than 512 long contexts."""
        self._check(kv)
        count = len(token_ids)
        sizes = next((sizes for sizes in self._sizes.answers if sizes.num_rows >= count), None)
        if sizes is None or not _have_places(context_lens):
            return self._model.decode(token_ids, context_lens, deltas, block_tables, kv, adapters, states)
        is_on_device = isinstance(token_ids, Tensor)
        known = 0 if is_on_device else self._model.inputs.known_ids(token_ids)
        inputs = self._buffers.fill_answers(
            sizes, known, context_lens, deltas, block_tables, adapters, states
        )
        if is_on_device:
            inputs.token_ids[:count].copy_(self._model.inputs.known_on_device(token_ids))
        return self._replays[sizes, any(adapters)]()[:count]

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        self._model.copy_blocks(sources, targets, kv)

    def _sizes_of(self, chunks: Sequence[SequenceChunk]) -> StepSizes | None:
        """The smallest that hold such a step. None: it is not recorded."""
        if not all(map(self._is_recorded, chunks)):
            return None
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        num_wanted = sum(chunk.num_logits for chunk in chunks)
        num_spans = sum(max(1, len(chunk.states)) for chunk in chunks)
        counts = [len(chunk.token_ids) for chunk in chunks]
        contexts = [chunk.num_computed_tokens + len(chunk.token_ids) for chunk in chunks]
        if num_places(counts, contexts) > RECORDED_PLACES:
            return None
        fitting = (
            sizes
            for sizes in self._sizes.mixed
            if sizes.num_tokens >= num_tokens
            and sizes.num_rows >= len(chunks)
            and sizes.num_wanted >= num_wanted
            and sizes.num_spans >= num_spans
        )
        return next(fitting, None)

    def _is_recorded(self, chunk: SequenceChunk) -> bool:
        """Whether the chunk's tokens are of the recorded kind: no scores, no rows for deep-stack layers,
        whole positions of as many axes as those of text."""
        positions = chunk.position_ids
        if isinstance(positions, Tensor):
            axes = 1 if positions.ndim == 1 else len(positions)
            if positions.is_floating_point() or axes not in (1, self._model.position_axes):
                return False
        is_deep = self._model.feature_width != self._model.hidden_size
        return chunk.scores is None and not (chunk.features and is_deep)

    def _record(self, sizes: StepSizes) -> None:
        for is_adapted in (False, True)[: num_forms(self._model)]:
            self._replays[sizes, is_adapted] = self._recorded(sizes, is_adapted)

    def _recorded(self, sizes: StepSizes, is_adapted: bool) -> Replay:
        inputs = self._buffers.fill_answers(sizes, (), (), (), ())  # padding only
        if not is_adapted:
            inputs = replace(inputs, adapters=None)
        embeds = None if sizes.is_decode else self._embeds[: sizes.num_tokens]
        out = self._logits[: sizes.num_wanted]
        on_layer = None if sizes.is_decode or self._marks is None else self._marks.record

        def work() -> Tensor:
            return out.copy_(self._model.step(inputs, self._kv, embeds, on_layer))

        if self._collectives is None:
            return self._capture(work)
        replay, error = None, None
        try:
            replay = self._capture(work)
        except Exception as raised:  # of a compiler, too: the other ranks wait for the decision
            error = raised
        self._collectives.settle(error)
        return cast(Replay, replay)

    def _check(self, kv: BlockMemory) -> None:
        assert kv is self._kv, "graphs hold the addresses of one memory"


@dataclass(frozen=True)
class Recording:
    """What can be recorded of a model, known before its KV is sized."""

    sizes: RecordedSizes
    num_bytes: int  # that all graphs and their buffers take
    num_blocks: int  # of KV, that padding takes: the last ones

    def over(self, model: LanguageModel, kv: BlockMemory) -> StepModel:
        """The model with recorded steps over `kv`. Takes seconds."""
        return _recorded(model, kv, self.sizes) or model


def recording_of(model: LanguageModel, sizes: RecordedSizes) -> Recording | None:
    """Records the largest step of each kind, over a KV of scratch blocks, and frees it again: the others
    share its memory. None: steps cannot be recorded; the log says why. Call it before other threads use the
    device."""
    if model.device.type != "cuda":
        return None
    num_blocks = num_scratch_blocks(model)
    kv = BlockMemory(model.kv_layout, num_blocks, model.device)
    can_capture = model.can_capture(kv)
    if model.collectives is not None:
        can_capture = model.collectives.all_agree(can_capture)
    if not can_capture:
        logger.info("steps are not recorded: their attention needs the host")
        return None
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(model.device)
    graphed = _recorded(model, kv, replace(sizes, answers=sizes.answers[-1:], mixed=sizes.mixed[-1:]))
    shared = torch.cuda.memory_reserved(model.device) - before
    if graphed is None:
        return None
    if not graphed.records_mixed:
        if not sizes.answers:
            return None
        sizes = replace(sizes, mixed=())
    del graphed
    torch.cuda.empty_cache()
    num_graphs = num_forms(model) * (len(sizes.answers) + len(sizes.mixed))
    return Recording(sizes, shared + num_graphs * GRAPH_BYTES, num_blocks)


def _have_places(context_lens: Sequence[int]) -> bool:
    """Whether the partial results of one new token each have room in a recorded step."""
    count = len(context_lens)
    if count * MAX_SHARES <= RECORDED_PLACES:
        return True
    return num_places([1] * count, [length + 1 for length in context_lens]) <= RECORDED_PLACES


def num_forms(model: LanguageModel) -> int:
    """How often a size is recorded."""
    return 2 if model.num_adapter_slots else 1


def num_scratch_blocks(model: LanguageModel) -> int:
    """One for the K and V of padding tokens, after those of a state."""
    return 1 + model.state_blocks


def _recorded(model: LanguageModel, kv: BlockMemory, sizes: RecordedSizes) -> GraphedModel | None:
    """None: not even steps of answers can be recorded; the log says why."""
    capture = capture_cuda(collectives=model.collectives)
    graphed = GraphedModel(model, kv, sizes, capture, model.collectives)
    try:
        graphed.warm_up()
    except RuntimeError as error:
        logger.warning("steps cannot be recorded: %s", error)
        return None
    finally:
        torch.cuda.empty_cache()  # what the runs before each recording have left
    return graphed


def batch_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, then steps of 8 up to 32, of 16 up to 64 and of 32 after that; the last is max_batch. Padding
    small batches costs little, because most of such a step is reading the weights, which all rows share."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, max_batch, 32)]
    return [size for size in sizes if size < max_batch] + [max_batch]
