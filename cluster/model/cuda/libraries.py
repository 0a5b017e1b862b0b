"""Attention kernels of other projects behind one interface, for long chunks of prompts. Each may be missing;
`installed` names those that can be imported. Letters as in `cluster.model.attention`.

| library | reads pages of | GPUs | installed by |
| --- | --- | --- | --- |
| flash-attn 4 (`flash_attn.cute`) | any size, Hopper and Blackwell | from Ampere on | the extra `gpu` |
| flash-attn 3 (`flash_attn_interface`) | any size | Hopper | a build of one's own |
| flash-attn 2 (`flash_attn`) | multiples of 256 rows | from Ampere on | a build |
| torch's `varlen_attn` | – | from Ampere on | torch |

Untried on a GPU, but for torch's. Calls are checked against the libraries' signatures
(tests/unit/cuda/test_libraries.py), and against plain softmax when a worker starts (`choice`).
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from cluster.model.attention import LayerAttention

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLengths:
    """Sizes of one packed step, on the device and on the host."""

    query_starts: Tensor  # [B + 1] int32: exclusive prefix sums
    context_starts: Tensor  # [B + 1] int32
    contexts: Tensor  # [B] int32
    tables: Tensor  # [B, max_blocks] int32
    max_query: int
    max_context: int


class FlashLibrary(Protocol):
    """Both calls are causal, take query [T, Hq, D] and return [T, Hq, D]."""

    @property
    def page_multiple(self) -> int | None:
        """Pages whose number of rows is a multiple of this can be read; None: no pages."""
        ...

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        """key and value [num_blocks, block_size, Hk, D]."""
        ...

    def rows(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        """key and value [sum of contexts, Hk, D], sequence after sequence."""
        ...


class Flash2:
    """`module` is flash_attn."""

    page_multiple = 256

    def __init__(self, module: Any):
        self._varlen = module.flash_attn_varlen_func

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        return self.rows(query, key, value, lengths, layer, block_table=lengths.tables)

    def rows(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention,
        **pages: Tensor,
    ) -> Tensor:  # fmt: skip
        return self._varlen(
            query, key, value, lengths.query_starts, lengths.context_starts, lengths.max_query,
            lengths.max_context, **_common(layer), **pages,
        )  # fmt: skip


class Flash3(Flash2):
    """`module` is flash_attn_interface."""

    page_multiple = 1

    def __init__(self, module: Any):
        super().__init__(module)
        self._with_kvcache = module.flash_attn_with_kvcache

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        return self._with_kvcache(
            query, key, value, cache_seqlens=lengths.contexts, page_table=lengths.tables,
            cu_seqlens_q=lengths.query_starts, max_seqlen_q=lengths.max_query, **_common(layer),
        )  # fmt: skip


class Flash4:
    """`module` is flash_attn.cute, whose calls return the logarithms of sums, too."""

    page_multiple = 1

    def __init__(self, module: Any):
        self._varlen = module.flash_attn_varlen_func

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        out, _ = self._varlen(
            query, key, value, cu_seqlens_q=lengths.query_starts, max_seqlen_q=lengths.max_query,
            max_seqlen_k=lengths.max_context, seqused_k=lengths.contexts, page_table=lengths.tables,
            **_cute(layer),
        )  # fmt: skip
        return out

    def rows(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        out, _ = self._varlen(
            query, key, value, cu_seqlens_q=lengths.query_starts, cu_seqlens_k=lengths.context_starts,
            max_seqlen_q=lengths.max_query, max_seqlen_k=lengths.max_context, **_cute(layer),
        )  # fmt: skip
        return out


class TorchVarlen:
    """`module` is torch.nn.attention.varlen. Its pages need flash-attn 3 or 4, which then serves by itself.

    `enable_gqa` lets the function accept fewer KV heads than query heads. torch 2.11 does not know the
    keyword: its function checks no heads and gives them to the same kernel, which reads shared KV heads."""

    page_multiple = None

    def __init__(self, module: Any):
        self._varlen = module.varlen_attn
        knows_gqa = "enable_gqa" in inspect.signature(module.varlen_attn).parameters
        self._shared_heads = {"enable_gqa": True} if knows_gqa else {}

    def paged(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        raise NotImplementedError("torch's own kernel reads no pages")

    def rows(
        self, query: Tensor, key: Tensor, value: Tensor, lengths: StepLengths, layer: LayerAttention
    ) -> Tensor:
        return self._varlen(
            query, key, value, lengths.query_starts, lengths.context_starts, lengths.max_query,
            lengths.max_context, scale=layer.scaling, window_size=(_left(layer), 0), **self._shared_heads,
        )  # fmt: skip


LIBRARIES = (
    ("flash_attn_interface", Flash3),
    ("flash_attn.cute", Flash4),
    ("flash_attn", Flash2),
    ("torch.nn.attention.varlen", TorchVarlen),
)


def installed() -> Iterator[tuple[str, FlashLibrary]]:
    """Module name and library. With flash-attn 4 alone, `flash_attn` is a package without functions."""
    for name, library in LIBRARIES:
        try:
            yield name, library(importlib.import_module(name))
        except (ImportError, AttributeError) as error:
            logger.info("attention: no %s (%s)", name, error)


def _common(layer: LayerAttention) -> dict[str, Any]:
    """Keywords of all calls in generations 2 and 3."""
    window = (-1, -1) if layer.sliding_window is None else (_left(layer), 0)
    return {"softmax_scale": layer.scaling, "causal": True, "window_size": window}


def _cute(layer: LayerAttention) -> dict[str, Any]:
    window = (None, None) if layer.sliding_window is None else (_left(layer), 0)
    return {**_common(layer), "window_size": window}


def _left(layer: LayerAttention) -> int:
    """Keys before the query's own that it sees; -1: all."""
    return -1 if layer.sliding_window is None else layer.sliding_window - 1
