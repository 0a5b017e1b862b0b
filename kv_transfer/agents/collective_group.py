"""The process group of two that carries a link's bytes. Rank 0 writes, rank 1 owns the memory.

The group is made over the link's own TCP connection (`PairStore`): it needs no store, port or name, and no
two pairs share one.

Gloo reports the end of a send or receive only to a thread that waits for it, and a wait that times out ends
the connection of the pair. Hence each link has a thread, and `Channel.sever` ends a wait by letting another
wait time out.

NCCL (untried on hardware): the same calls on device tensors. Its watchdog, which would end the process when a
peer dies, is set not to.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

from cluster.config.environment import keep_process_without_peer
from kv_transfer.agents.agent import PeerLostError, TransferError
from kv_transfer.agents.collective_frames import Backend, FrameSocket, StoreItem, refused
from kv_transfer.agents.regions import pieces

PIECE_BYTES = 8 << 20  # one message of the group, and the size of the staging buffer
PIECE_TIMEOUT_S = 3.0  # for one piece; below the margin by which an owner waits longer than its writer
SEVER_TIMEOUT_S = 0.001
NCCL_POLL_S = 0.0002
NCCL_TIMEOUT = timedelta(minutes=10)  # of NCCL's watchdog: the deadlines here come first
_DATA_TAG, _SEVER_TAG = 0, 1


class PairStore(dist.Store):
    """The store of a group of two, over their connection: what one side sets, the other gets.

    For the thread that makes the group. After `detach` it does not touch the connection: NCCL's own threads
    look in later.
    """

    def __init__(self, frames: FrameSocket, timeout_s: float):
        super().__init__()
        self._frames = frames
        self._timeout_s = timeout_s
        self._values: dict[str, bytes] = {}
        self._is_attached = True

    def detach(self) -> None:
        self._is_attached = False

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value.encode() if isinstance(value, str) else bytes(value)
        if self._is_attached:
            self._frames.write(StoreItem(key, self._values[key]), self._timeout_s)

    def get(self, key: str) -> bytes:
        while key not in self._values:
            if not self._is_attached:
                raise PeerLostError(f"the group is made; the store has no {key}")
            frame = self._frames.read(self._timeout_s)
            if not isinstance(frame, StoreItem):
                raise refused(frame)
            self._values[frame.key] = frame.value
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class Channel:
    """A process group of two and a staging buffer. All methods but `sever` belong to the link's thread."""

    def __init__(
        self, store: PairStore, rank: int, backend: Backend, device: torch.device, host: str, timeout_s: float
    ):
        """Blocks until the peer has made its half. `device`: where this side's registered memory lies."""
        self._rank = rank
        self._backend = backend
        self._is_severed = False
        self._memory_device = device
        self._device = device if backend == "nccl" else torch.device("cpu")
        self._staging = torch.empty(0, dtype=torch.uint8, device=self._device)
        with _mapped():
            self._group = _make_group(store, rank, backend, host, timeout_s)
            self._greet(timeout_s)
        store.detach()

    def send(self, runs: Sequence[torch.Tensor]) -> None:
        """Returns when the runs have left. Raises TransferError if they could not; then the link is over."""
        for piece in pieces(runs, PIECE_BYTES):
            message = self._message(piece)
            if message is not piece[0]:
                torch._foreach_copy_(_split(message, piece), piece)
                self._synchronize()
            with _mapped():
                self._wait(self._group.send([message], 1 - self._rank, _DATA_TAG), PIECE_TIMEOUT_S)

    def receive(self, runs: Sequence[torch.Tensor]) -> None:
        """Fills the runs; a single run without a copy. If it raises TransferError, any part may have been
        written."""
        for piece in pieces(runs, PIECE_BYTES):
            message = self._message(piece)
            with _mapped():
                self._wait(self._group.recv([message], 1 - self._rank, _DATA_TAG), PIECE_TIMEOUT_S)
            if message is not piece[0]:
                torch._foreach_copy_(piece, _split(message, piece))
                self._synchronize()

    def sever(self) -> None:
        """End the group, from any thread: a wait in it raises, and no byte lands any more."""
        if self._is_severed:
            return
        self._is_severed = True
        with suppress(RuntimeError):  # the timeout is intended
            if self._backend == "nccl":
                self._group.abort()
                return
            unanswered = self._group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, _SEVER_TAG)
            unanswered.wait(timedelta(seconds=SEVER_TIMEOUT_S))

    def _greet(self, timeout_s: float) -> None:
        """One byte through the group, which makes now what it would make on first use."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        peer = 1 - self._rank
        transfer = self._group.send if self._rank == 0 else self._group.recv
        self._wait(transfer([byte], peer, _DATA_TAG), timeout_s)

    def _message(self, piece: list[torch.Tensor]) -> torch.Tensor:
        """The tensor that goes through the group for a piece: its only run, or the staging buffer."""
        if len(piece) == 1 and piece[0].device == self._device:
            return piece[0]
        num_bytes = sum(map(len, piece))
        if len(self._staging) < num_bytes:
            self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:num_bytes]

    def _wait(self, work: dist.Work, timeout_s: float) -> None:
        if self._backend == "gloo":
            work.wait(timedelta(seconds=timeout_s))
            return
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            if self._is_severed or time.monotonic() > deadline:
                raise TransferError("the group was ended, or the peer did not answer in time")
            time.sleep(NCCL_POLL_S)
        work.wait()
        self._synchronize()

    def _synchronize(self) -> None:
        """Waits for the copies of this thread; then every stream sees them."""
        if self._memory_device.type == "cuda":
            torch.cuda.current_stream(self._memory_device).synchronize()


def _make_group(store: PairStore, rank: int, backend: Backend, host: str, timeout_s: float) -> Any:
    if backend == "nccl":
        keep_process_without_peer()
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    # torch's stub has neither this class nor this way to make a group
    options = cast(Any, dist.ProcessGroupGloo)._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _split(message: torch.Tensor, piece: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(message.split([len(run) for run in piece]))


@contextmanager
def _mapped() -> Iterator[None]:
    """Turns torch's exceptions into ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"the process group broke: {error}") from error
