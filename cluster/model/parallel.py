"""One model over several processes of one host, one GPU each: tensor parallelism and, for experts, expert
parallelism. `sharding` says what each of them holds.

* Rank 0 is the worker process with engine, queues and sockets. It sends every model call to the other ranks,
  which only repeat the calls (`follow`), because the model's layers meet in collectives inside each call.
* All ranks have the whole logits; only rank 0 samples.
* Block ids mean the same positions on all ranks. Each rank's `BlockMemory` holds its own share of the KV
  heads, or all heads if the family's plan does not split attention. KV travels from rank i of one pool to
  rank i of the other: kv_transfer/lease/group.py.
* If one rank is lost, the collectives of the others fail, so the whole group ends.
* Calls travel over pipes, on which a rank may wait for days (of block tables, what they have gained).
  Embeddings travel over the model's own group (NCCL, or Gloo on the CPU). NCCL is untried on hardware.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from cluster.config.environment import tell_local_rank
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.lost_device import DeviceLostError
from cluster.model.language import FeatureSlice, SequenceChunk
from cluster.model.logprobs import PromptScores
from cluster.model.rank_tables import TableReceiver, TableSender, WireTable
from cluster.model.states import StateSpan
from cluster.model.step_model import OnLayer, StepModel
from cluster.types.transfer import Mark

COLLECTIVE_TIMEOUT = timedelta(minutes=10)  # ranks may read their shares of the weights at different speeds


@dataclass(frozen=True)
class ParallelGroup:
    """This process's place in its group."""

    rank: int
    size: int
    device: torch.device


def join_group(rank: int, size: int, meeting: Path, device_type: str) -> ParallelGroup:
    """Blocks until all `size` processes have joined. Makes torch's default group and sets the environment
    variable in which transformers reads the rank. Call it once per process, before the model is loaded.
    meeting: a file that does not exist yet, the same for all ranks. Raises ConfigError if there are fewer
    GPUs."""
    device = torch.device(device_type)
    if device_type == "cuda":
        if torch.cuda.device_count() < size:
            raise ConfigError(
                f"tensor_parallel_size {size} needs as many GPUs; this replica sees "
                f"{torch.cuda.device_count()} "
                "(num_gpus in its ray_actor_options)",
                param="tensor_parallel_size",
            )
        device = torch.device(device_type, rank)
        torch.cuda.set_device(device)
    tell_local_rank(rank)
    store = dist.FileStore(str(meeting), size)  # a TCPStore would listen on every interface
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    return ParallelGroup(rank, size, device)


def smallest_of(group: ParallelGroup, number: int) -> int:
    """The least of the numbers that the ranks pass. All of them call it at once."""
    numbers = torch.tensor(number, device=group.device)
    dist.all_reduce(numbers, dist.ReduceOp.MIN)
    return int(numbers)


def leave_group() -> None:
    """Leaves the group; the process may then join another one."""
    if dist.is_initialized():
        dist.destroy_process_group()


class ForwardProgress:
    """How far a rank's forwards are. Rank 0 makes a mark (`now`), and the other ranks report when they have
    reached it (`has`). The thread that runs the model records progress; any thread may ask."""

    def __init__(self) -> None:
        self._number = 0  # of the forward that runs or ran last
        self._done = 0  # number of the last forward whose bytes are all in memory
        self._layers: list[Callable[[], bool] | None] = []

    def begin(self) -> None:
        # before the number changes: otherwise a layer of the last forward could count for this one
        self._layers = []
        self._number += 1

    def layer(self, ready: Callable[[], bool] | None) -> None:
        """Records that the next layer's KV is written as soon as `ready` returns True; None: it is written
        now."""
        self._layers.append(ready)

    def end(self) -> None:
        """Records that the device has finished this forward."""
        self._done = self._number

    @property
    def now(self) -> Mark:
        return self._number, len(self._layers)

    def has(self, mark: Mark) -> bool:
        number, num_layers = mark
        if self._done >= number:
            return True
        layers = self._layers
        # without layers: of a forward that does not report them
        if self._number != number or not 0 < num_layers <= len(layers):
            return False
        ready = layers[num_layers - 1]
        return ready is None or ready()


@dataclass(eq=False)
class LeadingModel:
    """Rank 0's model: it sends every call to the other ranks, then makes the call itself. One thread. If a
    call raises here, the other ranks are still inside it, so every error becomes a DeviceLostError."""

    _model: StepModel
    _others: Sequence[Connection]
    _progress: ForwardProgress
    _dtype: torch.dtype  # embeddings travel in it …
    _device: torch.device  # … between the ranks' devices
    _tables: TableSender = field(default_factory=TableSender)

    @property
    def recorded_tokens(self) -> int:
        """All ranks have recorded the same steps, and take the same one for a call."""
        return self._model.recorded_tokens

    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: OnLayer | None = None
    ) -> Tensor:
        """Without `on_layer` no rank reports its layers, so that steps may be recorded which do not."""

        def on_written(layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
            self._progress.layer(None)
            assert on_layer is not None
            on_layer(layer_idx, ready)

        with _in_step():
            self._tell_chunks(chunks, reports=on_layer is not None)
            self._progress.begin()
            return self._model.forward(chunks, kv, None if on_layer is None else on_written)

    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> Tensor:
        """Tokens on the device go to the other ranks' devices: nothing waits for them."""
        numbers = () if isinstance(token_ids, Tensor) else token_ids
        with _in_step():
            tables = self._tables.to_wire(block_tables)
            self._tell(_Decode(numbers, context_lens, deltas, tables, adapters, states))
            if isinstance(token_ids, Tensor):
                token_ids = token_ids.contiguous()
                dist.broadcast(token_ids, src=0)
            return self._model.decode(token_ids, context_lens, deltas, block_tables, kv, adapters, states)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        with _in_step():
            self._tell(_CopyCall(sources, targets))
            self._model.copy_blocks(sources, targets, kv)

    def close(self) -> None:
        """No call follows. Frees recorded steps: NCCL does not end a group while a graph contains its
        collectives."""
        del self._model

    def _tell_chunks(self, chunks: Sequence[SequenceChunk], *, reports: bool) -> None:
        tables = self._tables.to_wire([chunk.block_table for chunk in chunks])
        self._tell(_Forward(list(map(_to_wire, chunks, tables)), reports))
        rows = [piece.rows.to(self._device, self._dtype) for chunk in chunks for piece in chunk.features]
        if rows:
            dist.broadcast(torch.cat(rows), src=0)

    def _tell(self, call: _RankCall) -> None:
        """Raises OSError if a rank is gone."""
        data = _encoder.encode(call)
        for other in self._others:
            other.send_bytes(data)


@contextmanager
def _in_step() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DeviceLostError("the ranks of this worker are no longer at the same call") from error


def follow(
    model: StepModel,
    kv: BlockMemory,
    group: ParallelGroup,
    calls: Connection,
    progress: ForwardProgress,
    dtype: torch.dtype,
    feature_width: int,
) -> None:
    """Repeats rank 0's calls until rank 0 closes the pipe. Blocks. If another rank is lost, raises the error
    of the collective."""
    tables = TableReceiver()
    while True:
        try:
            call = _decoder.decode(calls.recv_bytes())
        except EOFError:
            return
        match call:
            case _Decode(token_ids, context_lens, deltas, wire_tables, adapters, states):
                if not token_ids:
                    token_ids = torch.empty(len(context_lens), dtype=torch.int64, device=group.device)
                    dist.broadcast(token_ids, src=0)
                own = tables.of_wire(wire_tables)
                model.decode(token_ids, context_lens, deltas, own, kv, adapters, states)
            case _CopyCall(sources, targets):
                model.copy_blocks(sources, targets, kv)
            case _Forward(wires, reports):
                own = tables.of_wire([wire.block_table for wire in wires])
                chunks = _with_features(wires, own, dtype, group.device, feature_width)
                progress.begin()
                model.forward(chunks, kv, _reporting(progress, kv) if reports else None)
                kv.synchronize()
                progress.end()


def _reporting(progress: ForwardProgress, kv: BlockMemory) -> OnLayer:
    return lambda _layer_idx, ready=None, /: progress.layer(ready or kv.mark())


# Messages on the pipe


class _WireChunk(msgspec.Struct, array_like=True):
    """A `SequenceChunk` without its feature rows. The rows of all chunks follow as one tensor."""

    token_ids: Sequence[int]
    position_ids: int | bytes  # the first of a run, or int64, or float64
    position_axes: int  # 0: position_ids are one-dimensional
    has_broken_positions: bool  # they are float64
    num_computed_tokens: int
    block_table: WireTable
    features: list[tuple[int, int]]  # (start, rows)
    bidirectional_spans: list[tuple[int, int]]
    num_logits: int
    adapter: int
    scored: Sequence[int]  # rows of `SequenceChunk.scores`: what they give is read at rank 0 only
    states: Sequence[StateSpan]


class _Forward(msgspec.Struct, array_like=True, tag=True):
    chunks: list[_WireChunk]
    reports: bool  # its layers


class _Decode(msgspec.Struct, array_like=True, tag=True):
    token_ids: Sequence[int]  # none: they follow as a tensor
    context_lens: Sequence[int]
    deltas: Sequence[int]
    block_tables: Sequence[WireTable]
    adapters: Sequence[int]
    states: Sequence[StateSpan]


class _CopyCall(msgspec.Struct, array_like=True, tag=True):
    sources: Sequence[int]
    targets: Sequence[int]


_RankCall = _Forward | _Decode | _CopyCall
_encoder = msgspec.msgpack.Encoder(enc_hook=list)  # blocks of states are an `array`
_decoder = msgspec.msgpack.Decoder(_RankCall)


def _to_wire(chunk: SequenceChunk, table: WireTable) -> _WireChunk:
    position_ids, axes, are_broken = chunk.position_ids, 0, False
    if isinstance(position_ids, Tensor):
        axes = len(position_ids) if position_ids.ndim == 2 else 0
        are_broken = position_ids.is_floating_point()
        dtype = torch.float64 if are_broken else torch.int64
        position_ids = position_ids.to("cpu", dtype).contiguous().numpy().tobytes()
    return _WireChunk(
        list(chunk.token_ids),
        position_ids,
        axes,
        are_broken,
        chunk.num_computed_tokens,
        table,
        [(piece.start, len(piece.rows)) for piece in chunk.features],
        list(chunk.bidirectional_spans),
        chunk.num_logits,
        chunk.adapter,
        () if chunk.scores is None else chunk.scores.rows,
        chunk.states,
    )


def _with_features(
    wires: Sequence[_WireChunk], tables: Sequence[list[int]], dtype: torch.dtype, device: torch.device,
    feature_width: int,
) -> list[SequenceChunk]:  # fmt: skip
    total = sum(count for wire in wires for _, count in wire.features)
    rows = torch.empty(total, feature_width, dtype=dtype, device=device)
    if total:
        dist.broadcast(rows, src=0)
    chunks, start = [], 0
    for wire, table in zip(wires, tables, strict=True):
        features = []
        for place, count in wire.features:
            features.append(FeatureSlice(place, rows[start : start + count]))
            start += count
        chunks.append(_from_wire(wire, table, tuple(features)))
    return chunks


def _from_wire(wire: _WireChunk, block_table: list[int], features: tuple[FeatureSlice, ...]) -> SequenceChunk:
    position_ids: int | Tensor
    if isinstance(wire.position_ids, int):
        position_ids = wire.position_ids
    else:
        dtype = torch.float64 if wire.has_broken_positions else torch.int64
        position_ids = torch.frombuffer(bytearray(wire.position_ids), dtype=dtype)
        position_ids = position_ids.float() if wire.has_broken_positions else position_ids
        if wire.position_axes:
            position_ids = position_ids.view(wire.position_axes, -1)
    return SequenceChunk(
        wire.token_ids,
        position_ids,
        wire.num_computed_tokens,
        block_table,
        features,
        tuple(wire.bidirectional_spans),
        wire.num_logits,
        PromptScores(wire.scored, [0] * len(wire.scored), 0) if wire.scored else None,
        wire.adapter,
        tuple(wire.states),
    )
