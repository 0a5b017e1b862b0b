"""Our attention kernels on a simulated GPU, from a plain softmax: each call is one launch, so that it can be
recorded. They read what Triton's kernels read: the step's own tensors and the blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.model import attention_cuda
from cluster.model.attention import LayerAttention, StepTensors
from cluster.model.cuda import choice, paged_attention
from cluster.model.cuda.paged_attention import Tiles
from cluster.model.kv_format import LayerCache
from tests.fakes.cuda_device import SimulatedCuda
from tests.gpu.cases import dense

DECODES = (((30, 1), (7, 1)), ((60, 1),))
CHUNKS = (((0, 20), (0, 17)), ((20, 29),))


class PlainAttention:
    """Counts its calls. Trials of a model's attention become small."""

    def __init__(self, device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch):
        self.num_attended = 0
        self._device = device
        monkeypatch.setattr(choice, "has_triton", lambda: True)
        monkeypatch.setattr(choice, "DECODES", DECODES)
        monkeypatch.setattr(choice, "CHUNKS", CHUNKS)
        monkeypatch.setattr(paged_attention, "plan", lambda *_: None)
        monkeypatch.setattr(paged_attention, "attend", self.attend)
        monkeypatch.setattr(attention_cuda, "write_rows", self.write_rows)

    def attend(
        self, query: Tensor, cache: LayerCache, layer: LayerAttention, step: StepTensors, plan: None,
        tiles: Tiles, num_processors: int,
    ) -> Tensor:  # fmt: skip
        self.num_attended += 1
        where = (step.seqs, step.indices, step.ends, step.tables, step.block_size)
        plain = replace(layer, sinks=None)
        return self._device.kernel(_attended, query, *_held(cache), plain, layer.sinks, *where)

    def write_rows(self, key: Tensor, value: Tensor, slots: Tensor, cache: LayerCache) -> None:
        self._device.kernel(_written, key, value, slots, *_held(cache))


def _held(cache: LayerCache) -> tuple[list[list[Tensor]], type]:
    stores: tuple[Any, Any] = (cache.key, cache.value)
    return [[getattr(store, name) for name in store.__slots__] for store in stores], type(cache.key)


def _attended(
    query: Tensor, held: list[list[Tensor]], kind: type, layer: LayerAttention, sinks: Tensor | None,
    seqs: Tensor, indices: Tensor, ends: Tensor, tables: Tensor, block_size: int,
) -> Tensor:  # fmt: skip
    key, value = (kind(*tensors) for tensors in held)
    out = query.new_zeros(*query.shape[:2], value.row_shape[1])
    for token, (seq, index, end) in enumerate(zip(*(x.tolist() for x in (seqs, indices, ends)), strict=True)):
        if seq < 0:
            continue
        positions = torch.arange(max(0, index - (layer.sliding_window or end + 1) + 1), end)
        slots = tables[seq].long()[positions // block_size] * block_size + positions % block_size
        rows = (store.rows(slots, query.dtype) for store in (key, value))
        out[token] = dense(replace(layer, sliding_window=None, sinks=sinks), query[token][None], *rows)[0]
    return out


def _written(key: Tensor, value: Tensor, slots: Tensor, held: list[list[Tensor]], kind: type) -> None:
    for rows, tensors in zip((key, value), held, strict=True):
        kind(*tensors).write(slots.long(), rows)
