"""The only device code of a prefill worker: one packed forward over chunks of several prompts, and the first
tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.guidance import forbid, guide
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from cluster.model.step_model import StepModel
from cluster.types.request import Prompt
from prefill_service.features import FeatureStore
from prefill_service.state import PrefillRequest, PromptSequence
from prefill_service.transfer import Ready


class PrefillRunner:
    def __init__(self, model: LanguageModel, steps: StepModel, kv: BlockMemory, features: FeatureStore):
        """`steps` computes the model's steps: the model itself, unless it runs on several ranks."""
        self._model = model
        self._steps = steps
        self._kv = kv
        self._features = features

    @torch.inference_mode()
    def run(
        self,
        batch: Sequence[tuple[PrefillRequest, PromptSequence, int]],
        on_layer: Callable[[int, Ready], None],
    ) -> list[Tensor | None]:
        """Computes the KV of the given number of further tokens of each sequence. `on_layer(i, ready)` is
        called after layer i. On the CPU its KV is written then; on a GPU it is enqueued, and is written once
        `ready()` is true. Returns, for each sequence that is complete, the [1, vocab_size] float32 logits of
        its last token; None for the others. Blocks; synchronises the device."""
        chunks = [self._chunk(request, sequence, count) for request, sequence, count in batch]
        logits = iter(self._steps.forward(chunks, self._kv, lambda i: on_layer(i, self._kv.mark())).split(1))
        self._kv.synchronize()
        return [next(logits) if chunk.num_logits else None for chunk in chunks]

    @torch.inference_mode()
    def warm_up(self, num_tokens: int, block_table: Sequence[int]) -> None:
        """One step over a prompt that belongs to no request."""
        self._steps.forward(
            [SequenceChunk([0] * num_tokens, torch.arange(num_tokens), 0, block_table)], self._kv
        )
        self._kv.synchronize()

    @torch.inference_mode()
    def first_tokens(self, requests: Sequence[PrefillRequest]) -> list[tuple[int, ...]]:
        """For each request, all of whose prompts are computed: one token for each choice. Synchronises the
        device."""
        rows, params, positions = [], [], []
        for request in requests:
            logits = _final_logits(request)
            for sampling in request.request.sampling:
                rows.append(logits)
                params.append(sampling)
                positions.append(request.main.num_tokens)
        drawn = iter(sample(torch.cat(rows), params, positions))
        return [tuple(next(drawn) for _ in request.request.sampling) for request in requests]

    def _chunk(self, request: PrefillRequest, sequence: PromptSequence, count: int) -> SequenceChunk:
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
        prompt = sequence.prompt
        slices = []
        for item_idx, item in enumerate(prompt.media):
            for token, row, count in item.pieces(start, end):
                for rows in self._features.rows((request.request_id, item_idx), row, row + count):
                    slices.append(FeatureSlice(token - start, rows))
                    token += len(rows)
        return SequenceChunk(
            token_ids=prompt.token_ids[start:end],
            position_ids=sequence.positions.position_ids[..., start:end],
            num_computed_tokens=start,
            block_table=sequence.block_table,
            features=tuple(slices),
            num_logits=int(end == sequence.num_tokens),
            bidirectional_spans=uncut_spans(self._model, prompt),
        )


def _final_logits(request: PrefillRequest) -> Tensor:
    """[1, vocab_size], ready to draw from."""
    last = [sequence.last_logits for sequence in request.sequences]
    logits, *negative = [logits for logits in last if logits is not None]
    guidance, stop = request.request.guidance, request.request.stop
    if guidance is not None:
        logits = guide(logits, negative[0], guidance.scale)
    return forbid(logits, [stop.stop_token_ids if stop.min_tokens > 0 else ()])


def uncut_spans(model: LanguageModel, prompt: Prompt) -> tuple[tuple[int, int], ...]:
    """Placeholder ranges in which the model attends in both directions, sorted. Empty for most families."""
    if not model.chunk_cut_spans:
        return ()
    ranges = sorted(one for item in prompt.media for one in item.ranges)
    return tuple((offset, offset + length) for offset, length in ranges)
