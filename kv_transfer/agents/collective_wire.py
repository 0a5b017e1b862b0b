"""What runs between two collective agents: frames on a TCP connection, bytes on a process group of two.

The connection (`FrameSocket`) carries everything that is small and says who lives: end-of-file is the peer's death.
The process group is made over that very connection (`PairStore`), so it needs no store, port or name of its own, and
no two pairs ever share one. Rank 0 writes, rank 1 owns the memory.

    frame        4 bytes little-endian length, then msgpack
    dialler      Hello
    owner        Ready, to who knows the token
    both         StoreItem, as many as the group wants while it is made
    owner        Ready, once the first byte came through the group
    writer       Post, followed by its bytes through the group | Notice
    owner        Acknowledgement per Post | Refusal, and the connection ends

Gloo tells that a send or receive is over only to a thread that waits for it, and a wait that runs out of time ends the
connection of the pair. Hence each link has a thread, and `Channel.sever` ends a wait by letting another one run out.

NCCL (untried on hardware): the same calls on device tensors. Its watchdog must not end the process when a peer dies:
run workers with TORCH_NCCL_ASYNC_ERROR_HANDLING=0.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist

from kv_transfer.agents.agent import PeerLostError, TransferError
from kv_transfer.agents.regions import pieces

Backend = Literal["gloo", "nccl"]

MAX_FRAME_BYTES = 16 << 20  # a million descriptors
MAX_GREETING_BYTES = 4096  # what a stranger may send
PIECE_BYTES = 8 << 20  # one message of the group, and the size of the staging buffer
PIECE_TIMEOUT_S = 3.0  # for one piece; below the margin by which an owner outwaits its writer
SEVER_TIMEOUT_S = 0.001
NCCL_POLL_S = 0.0002
NCCL_TIMEOUT = timedelta(minutes=10)  # of NCCL's watchdog: the deadlines here come first
_LENGTH = struct.Struct("<I")
_DATA_TAG, _SEVER_TAG = 0, 1
# A host that vanishes sends no end-of-file: probe an idle link after 2 s, give it up after 3 more seconds.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
_UNACKNOWLEDGED_MS = 5000


class _Frame(msgspec.Struct, frozen=True, array_like=True, tag=True):
    pass


class Hello(_Frame, frozen=True):
    token: bytes  # of the owner's metadata
    name: str  # the writer's
    backend: Backend


class StoreItem(_Frame, frozen=True):
    key: str
    value: bytes


class Ready(_Frame, frozen=True):
    pass


class Post(_Frame, frozen=True):
    number: int  # counts the link's posts
    rows: bytes  # [n, 2] uint64 little-endian: address and bytes in the owner's memory
    notification: bytes


class Notice(_Frame, frozen=True):
    payload: bytes


class Acknowledgement(_Frame, frozen=True):
    number: int


class Refusal(_Frame, frozen=True):
    reason: str


Frame = Hello | StoreItem | Ready | Post | Notice | Acknowledgement | Refusal
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


class FrameSocket:
    """One thread may read while another writes. Every method raises PeerLostError once the connection is over."""

    def __init__(self, connection: socket.socket, max_frame_bytes: int = MAX_GREETING_BYTES):
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
        self.max_frame_bytes = max_frame_bytes
        self._socket = connection
        self._received = bytearray()

    def read(self, timeout_s: float | None) -> Frame:
        """The next frame; waits for it. TransferError when none came in time or it makes no sense."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (frame := self._next_frame()) is None:
            if not self._fill():
                self._await(select.POLLIN, deadline)
        return frame

    def read_available(self) -> Iterator[Frame]:
        """The frames that are here; waits for none. Raises, after the last, when the connection is over."""
        while True:
            while (frame := self._next_frame()) is not None:
                yield frame
            if not self._fill():
                return

    def write(self, frame: Frame, timeout_s: float) -> None:
        """Returns when the kernel has the frame."""
        body = _encoder.encode(frame)
        rest = memoryview(_LENGTH.pack(len(body)) + body)
        deadline = time.monotonic() + timeout_s
        while rest:
            try:
                rest = rest[self._socket.send(rest) :]
            except BlockingIOError:
                self._await(select.POLLOUT, deadline)
            except OSError as error:
                raise PeerLostError(f"the connection broke: {error}") from error

    def shut(self) -> None:
        """End the connection; a thread that waits in it wakes with PeerLostError. May be repeated."""
        with suppress(OSError):  # it is over already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _next_frame(self) -> Frame | None:
        if len(self._received) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self._received)
        if num_bytes > self.max_frame_bytes:
            raise TransferError(f"a frame of {num_bytes} bytes is more than anybody sends")
        end = _LENGTH.size + num_bytes
        if len(self._received) < end:
            return None
        body = bytes(self._received[_LENGTH.size : end])
        del self._received[:end]
        try:
            return _decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise TransferError(f"a frame cannot be read: {error}") from error

    def _fill(self) -> bool:
        """Take what the kernel has; False when that is nothing."""
        try:
            received = self._socket.recv(1 << 18)
        except BlockingIOError:
            return False
        except OSError as error:
            raise PeerLostError(f"the connection broke: {error}") from error
        if not received:
            raise PeerLostError("the peer closed the connection")
        self._received += received
        return True

    def _await(self, event: int, deadline: float | None) -> None:
        poll = select.poll()
        try:
            poll.register(self._socket, event)
        except (OSError, ValueError) as error:
            raise PeerLostError("the connection is closed") from error
        timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not poll.poll(None if timeout_s is None else timeout_s * 1000):
            raise TransferError("the peer did not answer in time")


class PairStore(dist.Store):
    """The store of a group of two, over their connection: what one sets the other gets.

    For the thread that makes the group. Once `detach`ed it leaves the connection alone: NCCL's own threads look in later.
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
                raise PeerLostError(f"the group is made; {key} will not come any more")
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


def refused(frame: Frame) -> PeerLostError:
    """The error for a frame that ends the link: the peer's own words, or that it sent nonsense."""
    if isinstance(frame, Refusal):
        return PeerLostError(f"the peer dropped the connection: {frame.reason}")
    return PeerLostError(f"the peer sent an unexpected {type(frame).__name__}")


class Channel:
    """A process group of two and one staging buffer. All but `sever` belongs to the link's thread."""

    def __init__(
        self, store: PairStore, rank: int, backend: Backend, device: torch.device, host: str, timeout_s: float
    ):
        """Blocks until the peer has made its half. `device` is where this side's registered memory lies."""
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
        """Returns when the runs have left. Raises TransferError when they have not; the link is over then."""
        for piece in pieces(runs, PIECE_BYTES):
            message = self._message(piece)
            if message is not piece[0]:
                torch._foreach_copy_(_split(message, piece), piece)
                self._synchronize()
            with _mapped():
                self._wait(self._group.send([message], 1 - self._rank, _DATA_TAG), PIECE_TIMEOUT_S)

    def receive(self, runs: Sequence[torch.Tensor]) -> None:
        """Fills the runs, a lone one without a copy. Raises TransferError: any part may be there."""
        for piece in pieces(runs, PIECE_BYTES):
            message = self._message(piece)
            with _mapped():
                self._wait(self._group.recv([message], 1 - self._rank, _DATA_TAG), PIECE_TIMEOUT_S)
            if message is not piece[0]:
                torch._foreach_copy_(piece, _split(message, piece))
                self._synchronize()

    def sever(self) -> None:
        """End the group from any thread: what waits in it raises, and no byte lands any more."""
        if self._is_severed:
            return
        self._is_severed = True
        with suppress(RuntimeError):  # running out of time is what is wanted
            if self._backend == "nccl":
                self._group.abort()
                return
            unanswered = self._group.recv([torch.empty(1, dtype=torch.uint8)], 1 - self._rank, _SEVER_TAG)
            unanswered.wait(timedelta(seconds=SEVER_TIMEOUT_S))

    def _greet(self, timeout_s: float) -> None:
        """One byte through the group: whatever it makes on first use is made now."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        peer = 1 - self._rank
        transfer = self._group.send if self._rank == 0 else self._group.recv
        self._wait(transfer([byte], peer, _DATA_TAG), timeout_s)

    def _message(self, piece: list[torch.Tensor]) -> torch.Tensor:
        """What goes through the group for a piece: its only run, or the staging buffer."""
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
                raise TransferError("the group was ended, or the peer did not take part in time")
            time.sleep(NCCL_POLL_S)
        work.wait()
        self._synchronize()

    def _synchronize(self) -> None:
        """Copies between this thread's tensors are over, for every stream."""
        if self._memory_device.type == "cuda":
            torch.cuda.current_stream(self._memory_device).synchronize()


def _make_group(store: PairStore, rank: int, backend: Backend, host: str, timeout_s: float) -> Any:
    if backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = NCCL_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, 2, options)
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _split(message: torch.Tensor, piece: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(message.split([len(run) for run in piece]))


@contextmanager
def _mapped() -> Iterator[None]:
    """Torch's exceptions as ours."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(f"the process group broke: {error}") from error
