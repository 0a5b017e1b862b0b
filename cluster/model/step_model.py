"""The calls that compute steps of a language model. Objects that wrap a model offer the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.language import SequenceChunk
from cluster.model.states import StateSpan


class OnLayer(Protocol):
    def __call__(self, layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
        """Layer `layer_idx`'s KV of this forward is written: on the CPU now; on a GPU once `ready()` is true,
        or with what this thread has enqueued so far."""
        ...


class StepModel(Protocol):
    """The model that a runner calls: a `LanguageModel`, or a `LeadingModel` or `GraphedModel` that wraps
    one. Logits are valid until the next call. A block table that is the object of an earlier call may have
    grown since, but for what is in front of a window (`cluster.model.cuda.table_rows`)."""

    @property
    def recorded_tokens(self) -> int:
        """Tokens of the largest step with prompts that is replayed rather than launched kernel by kernel; 0:
        there is none."""
        ...

    def forward(
        self,
        chunks: Sequence[SequenceChunk],
        kv: BlockMemory,
        on_layer: OnLayer | None = None,
    ) -> Tensor: ...

    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> Tensor: ...

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        """Block targets[i] becomes a copy of block sources[i]."""
        ...
