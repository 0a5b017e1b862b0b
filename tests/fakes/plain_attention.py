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
        where = (step.seqs, step.indices, step.ends, step.rows, step.tables, step.block_size)
        plain = replace(layer, sinks=None)
        return self._device.kernel(_attended, query, *_held(cache), plain, layer.sinks, *where)

    def write_rows(self, key: Tensor, value: Tensor, slots: Tensor, cache: LayerCache) -> None:
        self._device.kernel(_written, key, value, slots, *_held(cache))


def _held(cache: LayerCache) -> tuple[list[list[Tensor]], type]:
    stores: tuple[Any, Any] = (cache.key, cache.value)
    return [[getattr(store, name) for name in store.__slots__] for store in stores], type(cache.key)


def _attended(
    query: Tensor, held: list[list[Tensor]], kind: type, layer: LayerAttention, sinks: Tensor | None,
    seqs: Tensor, indices: Tensor, ends: Tensor, rows: Tensor, tables: Tensor, block_size: int,
) -> Tensor:  # fmt: skip
    key, value = (kind(*tensors) for tensors in held)
    positions = torch.arange(int(ends.max()))
    own_rows = rows[seqs.clamp(min=0).long()].long()
    blocks = tables[own_rows][:, (positions // block_size).clamp(max=tables.shape[1] - 1)].long()
    slots = (blocks * block_size + positions % block_size).flatten()
    group = query.shape[1] // key.row_shape[0]
    keys, values = (
        store.rows(slots, query.dtype).unflatten(0, (len(seqs), -1)).float().repeat_interleave(group, 2)
        for store in (key, value)
    )
    scores = torch.einsum("thd,tlhd->thl", query.float(), keys) * layer.scaling
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    first = indices + 1 - (layer.sliding_window or len(positions) + 1)
    sees = (positions >= first[:, None]) & (positions < ends[:, None])
    scores = scores.masked_fill(~sees[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float()[None, :, None].expand(len(seqs), -1, 1)], -1)
    weights = scores.softmax(-1)[..., : len(positions)]
    out = torch.einsum("thl,tlhd->thd", weights, values).to(query.dtype)
    return out.masked_fill((seqs < 0)[:, None, None], 0)


def _written(key: Tensor, value: Tensor, slots: Tensor, held: list[list[Tensor]], kind: type) -> None:
    for rows, tensors in zip((key, value), held, strict=True):
        kind(*tensors).write(slots.long(), rows)
