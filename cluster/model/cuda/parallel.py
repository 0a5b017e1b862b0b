"""Tensor parallelism: one model over several processes, one GPU each, by transformers' own sharding plans.

Rank 0 is the worker process with engine, queues and sockets. It tells every model call to the other ranks, which do
nothing but repeat it (`follow`), because transformers' layers meet in collectives inside each call. The logits are whole on
every rank; only rank 0 samples. Block ids mean the same positions on all ranks; each rank's `BlockMemory` holds its own share
of the KV heads, so layouts, and with them KV transfers, are per rank: rank i of one pool sends to rank i of the other.

A group lives and dies as one: a rank that is lost makes the others' collectives fail, and the worker with them.
Calls travel over a Gloo group on the CPU, encoder features over the model's own group (NCCL, or Gloo on the CPU).

Tried on the CPU over Gloo with two processes; NCCL is untried. Without `on_layer` for followers and without their
transfer agents, this serves prefill and decode in one process group, not yet between two pools.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from cluster.config.environment import tell_local_rank
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.step_model import StepModel
from cluster.model.language import FeatureSlice, SequenceChunk


@dataclass(frozen=True)
class TensorParallelGroup:
    """This process's place in its group."""

    rank: int
    size: int
    device: torch.device
    calls: dist.ProcessGroup  # Gloo: what to run
    tensors: dist.ProcessGroup  # the device's own: what the model's layers use too


def join_group(rank: int, size: int, address: str, device_type: str) -> TensorParallelGroup:
    """Blocks until all `size` processes have joined. address: 'tcp://host:port' or 'file:///path', equal on all ranks. Call
    before the model is loaded, once per process: it makes torch's default group, and tells transformers the rank in
    the environment variable that it reads."""
    tell_local_rank(rank)
    is_cuda = device_type == "cuda"
    device = torch.device(device_type, rank) if is_cuda else torch.device(device_type)
    if is_cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if is_cuda else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=size)
    tensors = dist.group.WORLD
    assert tensors is not None
    return TensorParallelGroup(rank, size, device, dist.new_group(backend="gloo"), tensors)


def check_heads(text_config: PreTrainedConfig, size: int) -> None:
    """Raises ConfigError when the heads cannot be dealt out evenly."""
    heads = text_config.num_attention_heads
    kv_heads = getattr(text_config, "num_key_value_heads", None) or heads
    if heads % size or kv_heads % size:
        raise ConfigError(
            f"{heads} attention heads with {kv_heads} KV heads cannot be shared evenly by {size} GPUs"
        )


def shard(model: PreTrainedModel, group: TensorParallelGroup) -> PreTrainedModel:
    """Cuts the weights of a model in memory to this rank's share, in place, and puts transformers' collectives around its
    layers. All ranks call it with equal weights. Raises ConfigError when the model has no plan or the heads do not
    divide. (`from_pretrained(distributed_config=...)` reads only the share, but wants accelerate installed.)"""
    check_heads(model.config.get_text_config(), group.size)
    if not model.tp_plan:
        raise ConfigError(
            f"model type '{model.config.model_type}' has no tensor-parallel plan in transformers"
        )
    config = DistributedConfig(tp_size=group.size)
    _, _, mesh = model.prepare_distribute_model(config)
    head, embedding = cast(nn.Linear, model.get_output_embeddings()), model.get_input_embeddings()
    if head.weight is embedding.weight:  # the plan names both, and a shared parameter has one name only
        head.weight = nn.Parameter(embedding.weight.detach())
    model.maybe_distribute_model(model.requires_grad_(False), config, mesh)
    return model


class LeadingModel:
    """Rank 0's model: every call is told to the followers, then made. One thread."""

    def __init__(self, model: StepModel, group: TensorParallelGroup, dtype: torch.dtype):
        """dtype: the model's, in which features travel."""
        self._model = model
        self._group = group
        self._dtype = dtype

    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: Callable[[int], None] | None = None
    ) -> Tensor:
        _tell_chunks(_Call.FORWARD, chunks, self._group, self._dtype)
        return self._model.forward(chunks, kv, on_layer)

    def verify(self, chunks: Sequence[SequenceChunk], kv: BlockMemory) -> Tensor:
        _tell_chunks(_Call.VERIFY, chunks, self._group, self._dtype)
        return self._model.verify(chunks, kv)

    def decode(
        self,
        token_ids: Sequence[int],
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
    ) -> Tensor:
        rows = _decode_rows(token_ids, context_lens, deltas, block_tables)
        _tell(_Call.DECODE, rows.tobytes(), len(rows), self._group)
        return self._model.decode(token_ids, context_lens, deltas, block_tables, kv)

    def stop(self) -> None:
        """Lets the followers return. No call may come after it."""
        _tell(_Call.STOP, b"", 0, self._group)


def follow(
    model: StepModel, kv: BlockMemory, group: TensorParallelGroup, dtype: torch.dtype, feature_width: int
) -> None:
    """Repeats rank 0's calls until it stops. Blocks; raises what the collectives raise when another rank is lost."""
    while True:
        call, payload, count = _hear(group)
        match call:
            case _Call.STOP:
                return
            case _Call.DECODE:
                token_ids, contexts, deltas, tables = _from_rows(payload, count)
                model.decode(token_ids, contexts, deltas, tables, kv)
            case _Call.FORWARD:
                model.forward(_hear_chunks(payload, group, dtype, feature_width), kv)
            case _Call.VERIFY:
                model.verify(_hear_chunks(payload, group, dtype, feature_width), kv)


class _Call(IntEnum):
    STOP = 0
    DECODE = 1
    FORWARD = 2
    VERIFY = 3


def _tell(call: _Call, payload: bytes, count: int, group: TensorParallelGroup) -> None:
    """count: rows, where the payload is a matrix."""
    dist.broadcast(torch.tensor([call, len(payload), count]), src=0, group=group.calls)
    if payload:
        dist.broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8), src=0, group=group.calls)


def _hear(group: TensorParallelGroup) -> tuple[_Call, bytes, int]:
    head = torch.zeros(3, dtype=torch.int64)
    dist.broadcast(head, src=0, group=group.calls)
    call, num_bytes, count = head.tolist()
    payload = torch.empty(num_bytes, dtype=torch.uint8)
    if num_bytes:
        dist.broadcast(payload, src=0, group=group.calls)
    return _Call(call), payload.numpy().tobytes(), count


# ---------------------------------------------------------------------------------------------------------- decode


def _decode_rows(
    token_ids: Sequence[int],
    context_lens: Sequence[int],
    deltas: Sequence[int],
    block_tables: Sequence[Sequence[int]],
) -> np.ndarray:
    """[B, 3 + longest table] int32: token, context, delta, table. Shorter tables end in zeros, which no step reads."""
    rows = np.zeros((len(token_ids), 3 + max(map(len, block_tables))), dtype=np.int32)
    rows[:, 0], rows[:, 1], rows[:, 2] = token_ids, context_lens, deltas
    for row, table in zip(rows, block_tables, strict=True):
        row[3 : 3 + len(table)] = table
    return rows


def _from_rows(payload: bytes, count: int) -> tuple[list[int], list[int], list[int], list[list[int]]]:
    rows = np.frombuffer(payload, dtype=np.int32).reshape(count, -1)
    return rows[:, 0].tolist(), rows[:, 1].tolist(), rows[:, 2].tolist(), rows[:, 3:].tolist()


# ---------------------------------------------------------------------------------------------------------- chunks


class _WireChunk(msgspec.Struct, array_like=True):
    """A `SequenceChunk` without its feature rows, which follow as one tensor for all chunks."""

    token_ids: list[int]
    position_ids: bytes  # int64
    position_axes: int  # 0: position_ids is one-dimensional
    num_computed_tokens: int
    block_table: list[int]
    features: list[tuple[int, int]]  # (start, rows)
    bidirectional_spans: list[tuple[int, int]]


_decoder = msgspec.msgpack.Decoder(list[_WireChunk])


def _tell_chunks(
    call: _Call, chunks: Sequence[SequenceChunk], group: TensorParallelGroup, dtype: torch.dtype
) -> None:
    _tell(call, msgspec.msgpack.encode([_to_wire(chunk) for chunk in chunks]), len(chunks), group)
    rows = [piece.rows.to(group.device, dtype) for chunk in chunks for piece in chunk.features]
    if rows:
        dist.broadcast(torch.cat(rows), src=0, group=group.tensors)


def _to_wire(chunk: SequenceChunk) -> _WireChunk:
    positions = chunk.position_ids.to("cpu", torch.int64).contiguous()
    return _WireChunk(
        list(chunk.token_ids),
        positions.numpy().tobytes(),
        0 if positions.ndim == 1 else len(positions),
        chunk.num_computed_tokens,
        list(chunk.block_table),
        [(piece.start, len(piece.rows)) for piece in chunk.features],
        list(chunk.bidirectional_spans),
    )


def _hear_chunks(
    payload: bytes, group: TensorParallelGroup, dtype: torch.dtype, feature_width: int
) -> list[SequenceChunk]:
    wires = _decoder.decode(payload)
    total = sum(count for wire in wires for _, count in wire.features)
    rows = torch.empty(total, feature_width, dtype=dtype, device=group.device)
    if total:
        dist.broadcast(rows, src=0, group=group.tensors)
    chunks, start = [], 0
    for wire in wires:
        features = []
        for place, count in wire.features:
            features.append(FeatureSlice(place, rows[start : start + count]))
            start += count
        chunks.append(_from_wire(wire, tuple(features)))
    return chunks


def _from_wire(wire: _WireChunk, features: tuple[FeatureSlice, ...]) -> SequenceChunk:
    positions = torch.frombuffer(bytearray(wire.position_ids), dtype=torch.int64)
    if wire.position_axes:
        positions = positions.view(wire.position_axes, -1)
    return SequenceChunk(
        wire.token_ids,
        positions,
        wire.num_computed_tokens,
        wire.block_table,
        features,
        tuple(wire.bidirectional_spans),
    )
