"""The only device code of a prefill worker: one packed forward over chunks of several prompts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.sampling import sample
from prefill_service.features import FeatureStore
from prefill_service.state import PrefillRequest


class PrefillRunner:
    def __init__(self, model: LanguageModel, kv: BlockMemory, features: FeatureStore):
        self._model = model
        self._kv = kv
        self._features = features

    @torch.inference_mode()
    def run(self, batch: Sequence[tuple[PrefillRequest, int]]) -> list[int | None]:
        """Computes the KV of `num_scheduled_tokens` more tokens of each request; for a prompt that is complete with them,
        draws the first token. Blocks; synchronises the device."""
        logits = self._model.forward([self._chunk(request, count) for request, count in batch], self._kv)
        complete = [
            row
            for row, (r, count) in enumerate(batch)
            if r.num_computed_tokens + count == r.num_prompt_tokens
        ]
        first_tokens: list[int | None] = [None] * len(batch)
        if complete:
            drawn = sample(
                logits[complete],
                [batch[row][0].message.request.sampling for row in complete],
                [batch[row][0].num_prompt_tokens for row in complete],
            )
            for row, token_id in zip(complete, drawn, strict=True):
                first_tokens[row] = token_id
        self._kv.synchronize()  # a chunk that draws no token has not waited for the device yet
        return first_tokens

    def _chunk(self, request: PrefillRequest, count: int) -> SequenceChunk:
        start, end = request.num_computed_tokens, request.num_computed_tokens + count
        prompt = request.message.request.prompt
        slices = []
        for item_idx, span in enumerate(prompt.media):
            low, high = max(start, span.offset), min(end, span.end)
            if low < high:
                rows = self._features.rows(
                    (request.request_id, item_idx), low - span.offset, high - span.offset
                )
                slices.append(FeatureSlice(low - start, rows))
        return SequenceChunk(
            token_ids=prompt.token_ids[start:end],
            position_ids=request.positions.position_ids[..., start:end],
            num_computed_tokens=start,
            block_table=request.block_table,
            features=tuple(slices),
            bidirectional_spans=uncut_spans(self._model, request),
        )


def uncut_spans(model: LanguageModel, request: PrefillRequest) -> tuple[tuple[int, int], ...]:
    """Media spans that the model sees in both directions; empty for most families."""
    if not model.chunk_cut_spans:
        return ()
    return tuple((span.offset, span.end) for span in request.message.request.prompt.media)
