"""The attention function that every text backbone calls. It writes new K and V into block memory, then
attends over it.

It is registered in transformers' AttentionInterface under `ATTENTION_NAME`. The step's metadata passes
through the HF layers as the keyword `paged`. transformers builds no mask for an unknown name, so each backend
makes its masks. Runs on the engine's thread. Owns no memory.

Letters: T new tokens of all sequences, B sequences, Hq query heads, Hk KV heads, D key width, Dv value width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from transformers import AttentionInterface

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import LayerCache, layer_cache

ATTENTION_NAME = "epdg_paged"
Span = tuple[int, int]  # absolute positions, half-open


@dataclass(frozen=True)
class StepTensors:
    """One packed step as kernels on a GPU take it, int32. The new tokens of a sequence are neighbours, in
    order. Each tensor begins at a multiple of 16 bytes: Triton compiles other code for one that does not."""

    seqs: Tensor  # [T]: row of each new token's sequence; -1: padding
    indices: Tensor  # [T]: its index among the sequence's positions
    ends: Tensor  # [T]: it sees positions below this; index + 1, or the end of its media span
    starts: Tensor  # [B + 1]: first token of each sequence; the last: number of tokens that are no padding
    contexts: Tensor  # [B]: KV length, including new tokens
    rows: Tensor  # [B]: of each sequence in `tables`
    tables: Tensor  # [R, M]: block ids; entries behind the context are any ids. Rows are contiguous
    block_size: int
    is_decode: bool  # no sequence has more than one new token; known without reading the device


class UnknownSizes(Sequence[Any]):
    """Stands for sizes that only a replay knows: to read them while a step is recorded is an error."""

    def __getitem__(self, index: Any) -> Any:
        raise RuntimeError(f"element {index} of a recorded step's sizes was read on the host")

    def __len__(self) -> int:
        raise RuntimeError("a recorded step's sizes were read on the host")


@dataclass
class PagedBatch:
    """One packed forward, as attention sees it. Lives for one step. Backends keep masks and gathered indices
    in `memo`."""

    kv: BlockMemory
    block_size: int  # token positions per block
    slots: Tensor  # [T] int64: block id * block_size + row, where each new token's K and V go
    query_lens: Sequence[int]  # new tokens per sequence
    context_lens: Sequence[int]  # KV length per sequence, including new tokens
    block_tables: Tensor  # [B, max_blocks] int64, rows padded with block 0
    context_lens_tensor: Tensor  # [B] int64
    bidirectional_spans: Sequence[Sequence[Span]]  # per sequence; positions inside one span see each other
    on_layer: Callable[[int], None] | None = None  # called when a layer's K and V are written
    # layers without KV of their own, and the layer over whose KV each attends
    kv_owners: Mapping[int, int] = field(default_factory=dict)
    windowed_spans: bool = False  # layers without a window see the spans as they see text
    # A recorded step comes with these; its sizes and tables above are unknown. None: kernels that need them
    # make them from the sizes.
    device: StepTensors | None = None
    memo: dict[tuple, Any] = field(default_factory=dict)

    def spans(self, window: int | None) -> Sequence[Sequence[Span]]:
        """`bidirectional_spans` as a layer with this window sees them."""
        hidden = self.windowed_spans and window is None
        return [()] * len(self.query_lens) if hidden else self.bidirectional_spans

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        if self.device is not None:
            return self.device.is_decode
        return len(self.query_lens) == self.slots.shape[0]


@dataclass(frozen=True)
class LayerAttention:
    """What one layer needs besides plain scaled dot products."""

    scaling: float
    sliding_window: int | None = None  # a query sees itself and the `sliding_window - 1` positions before it
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: Tensor | None = None  # [Hq]: one more logit per head in the softmax, with no value (GPT-OSS)


@dataclass(frozen=True)
class AttentionShape:
    """What a backend is chosen by."""

    layout: MemoryLayout  # of the KV of one layer, or of several that are like the first
    block_size: int
    num_heads: int  # of queries
    layer: LayerAttention


class AttentionBackend(Protocol):
    """What a layer calls."""

    def write(self, batch: PagedBatch, cache: LayerCache, key: Tensor, value: Tensor) -> None:
        """key [T, Hk, D] and value [T, Hk, Dv] to `batch.slots`."""
        ...

    def attend(
        self, batch: PagedBatch, layer: LayerAttention, query: Tensor, new_key: Tensor, new_value: Tensor,
        cache: LayerCache,
    ) -> Tensor:  # fmt: skip
        """query [T, Hq, D], new_key [T, Hk, D], new_value [T, Hk, Dv]. The latter two are already in the
        cache; a backend uses them only if the cache returns exactly what was written. Returns [T, Hq, Dv]."""
        ...


class ModelAttention(AttentionBackend, Protocol):
    """The attention of all layers of a model."""

    def can_capture(self, cache: LayerCache) -> bool:
        """Whether a step over such a cache, of answers or with prompts, launches only kernels whose shapes
        follow from the sizes of its tensors, so that a CUDA graph can record it. A step of a mix that reads
        `UnknownSizes` after all fails by name."""
        ...

    def score_bytes(self, num_heads: int, width: int, num_tokens: int, max_context: int) -> int:
        """The most memory that scores of `num_tokens` tokens of prompts, or partial results over shares of
        their keys, take at once. width: of the widest row of K or V."""
        ...


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    paged: tuple[PagedBatch, AttentionBackend] | None = None,
    **_kwargs: object,
) -> tuple[Tensor, None]:
    """transformers' attention signature. query [1, Hq, T, D], key [1, Hk, T, D], value [1, Hk, T, Dv];
    returns [1, T, Hq, Dv]. Keywords that change results are refused when the model is loaded (`probe`)."""
    if paged is None:
        raise RuntimeError(
            "the attention of this model works only inside LanguageModel, which passes the block memory"
        )
    batch, backend = paged
    layer_idx = cast(int, module.layer_idx)
    owner = batch.kv_owners.get(layer_idx)
    cache = layer_cache(batch.kv, layer_idx if owner is None else owner)
    new_key, new_value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    if owner is None:
        backend.write(batch, cache, new_key, new_value)
        if batch.on_layer is not None:
            batch.on_layer(layer_idx)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = LayerAttention(scale, sliding_window or None, softcap, s_aux)
    out = backend.attend(batch, layer, query[0].transpose(0, 1), new_key, new_value, cache)
    return out[None], None


AttentionInterface.register(ATTENTION_NAME, paged_attention)
