"""The only device code of a decode worker: one token for each request of a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.language import LanguageModel
from cluster.model.sampling import sample
from decode_service.state import DecodeRequest


class DecodeRunner:
    def __init__(self, model: LanguageModel, kv: BlockMemory):
        self._model = model
        self._kv = kv

    @torch.inference_mode()
    def run(self, batch: Sequence[DecodeRequest]) -> list[int]:
        """Computes the KV of every `last_token` and draws the next one. Blocks; synchronises the device."""
        logits = self._model.decode(
            [request.last_token for request in batch],
            [request.context_len for request in batch],
            [request.position_delta for request in batch],
            [request.block_table for request in batch],
            self._kv,
        )
        return sample(
            logits,
            [request.sampling for request in batch],
            [request.context_len + 1 for request in batch],
        )
