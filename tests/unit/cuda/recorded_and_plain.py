"""A model whose steps are recorded on a simulated GPU, beside the same model that runs them unrecorded."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.graphs import GraphedModel, RecordedSizes, capture_cuda, num_scratch_blocks
from cluster.model.cuda.step_inputs import StepSizes, answers_of
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.states import StateSpan

SIZES = RecordedSizes([answers_of(4)], [StepSizes(8, 8, 8), StepSizes(32, 8, 12)])
PROMPTS = [list(range(5, 25)), list(range(50, 53)), list(range(60, 71))]
TABLES = [list(range(6 * i, 6 * i + 6)) for i in range(4)]
NUM_BLOCKS = 24  # for requests


class Compared:
    """The model recorded and unrecorded, over KV of their own."""

    def __init__(self, model: LanguageModel, sizes: RecordedSizes = SIZES, num_blocks: int = NUM_BLOCKS):
        """num_blocks: of KV for requests."""
        self.model = model
        self._num_scratch = num_scratch_blocks(model)
        total = num_blocks + self._num_scratch
        self.kvs = [BlockMemory(model.kv_layout, total, "cuda") for _ in range(2)]
        capture, self.replays = capture_cuda(), []
        self.graphed = GraphedModel(
            model, self.kvs[0], sizes, lambda work: self.replays.append(capture(work)) or self.replays[-1]
        )
        self.graphed.warm_up()
        self.num_forwards = 0

    def forward(self, chunks: Sequence[SequenceChunk]) -> Tensor:
        """Replayed; equal to the other."""
        with mock.patch.object(self.model, "forward", wraps=self.model.forward) as unrecorded:
            found = self.graphed.forward(chunks, self.kvs[0]).cpu().clone()
        self.num_forwards += unrecorded.call_count
        expected = self.model.forward(chunks, self.kvs[1]).cpu()
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return found

    def decode(
        self, token_ids: list[int], context_lens: list[int], deltas: list[int], tables: list[list[int]],
        adapters: Sequence[int] = (), states: Sequence[StateSpan] = (),
    ) -> Tensor:  # fmt: skip
        """Replayed; equal to the other."""
        ours, plain = self.kvs[:2]
        found = (
            self.graphed.decode(token_ids, context_lens, deltas, tables, ours, adapters, states).cpu().clone()
        )
        expected = self.model.decode(token_ids, context_lens, deltas, tables, plain, adapters, states).cpu()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        return found

    def check_kv(self) -> None:
        """All but the scratch blocks."""
        end = -self._num_scratch
        for recorded, plain in zip(*(kv.segments for kv in self.kvs), strict=True):
            torch.testing.assert_close(
                recorded[:end].cpu().float(), plain[:end].cpu().float(), rtol=1e-3, atol=1e-3
            )
