"""Streams, events and graphs of `cuda_device`, and which of them each thread uses. An event is over when the
host has waited for it, for its stream or for the device: until then `query` says no.

torch gives cuBLAS a workspace for each thread and stream, and keeps it until a graph that was recorded on
that stream is destroyed. A graph uses those of its recording: one from outside of the recording may then be
gone (pytorch/pytorch#193402), and the replay says so."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _sanitizer


class Stream:
    def __init__(self, device: CurrentPlace, index: int, number: int):
        self._device, self.index, self.number = device, index, number
        self.events: list[Event] = []
        if number:
            device.handler._handle_stream_creation(number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        self._device.handler._handle_event_wait(event.number, self.number)

    def record_event(self, event: Event | None = None) -> Event:
        recorded: Any = event or torch.cuda.Event()  # of this module, while the device is simulated
        recorded.record(self)
        return recorded

    def synchronize(self) -> None:
        self._device.sync("the host waits for a stream")
        self._device.handler._handle_stream_synchronization(self.number)
        for event in self.events:
            event.is_over = True
        self.events.clear()
        self._device.arrive(self._device.sent_on(self))


class Event:
    def __init__(self, device: CurrentPlace, number: int):
        self._device, self.number = device, number
        self.is_over = True  # as CUDA's, until it is recorded
        self.sent: list[Sent] = []  # before it
        self.num_waits = 0
        device.handler._handle_event_creation(number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current_stream()
        self._device.handler._handle_event_record(self.number, stream.number)
        self.is_over, self.sent = False, self._device.sent_on(stream)
        stream.events.append(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, end: Event) -> float:
        """A millisecond. `end` is over, and so is what was recorded before it."""
        assert end.is_over and end.number > self.number
        return 1.0

    def synchronize(self) -> None:
        self._device.sync("the host waits for an event")
        self.num_waits += 1
        self._device.handler._handle_event_synchronization(self.number)
        self.is_over = True
        self._device.arrive(self.sent)


@dataclass(eq=False)
class Sent:
    """A copy from pinned memory, which the device may read as late as the host waits for the copy."""

    stream: int
    source: Tensor
    content: Tensor  # when it was enqueued


@dataclass(eq=False)
class Workspace:
    is_of_recording: bool  # of the recording's own pool, which lasts as long as the graphs in it
    is_freed: bool = False


class Graph:
    def __init__(self, device: CurrentPlace):
        self._device = device
        self.workspaces: list[Workspace] = []
        self.stream_number: int | None = None  # that it was recorded on
        self.launches: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []
        self.is_invalid = False  # as what was recorded is not permitted

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, outs: list[Tensor]) -> None:
        self.launches.append((func, args, kwargs, outs))

    def capture_begin(self, pool: Any = None, **_options: Any) -> None:
        self._device.capture = self
        self.stream_number = self._device.current_stream().number

    def __del__(self) -> None:
        if self.stream_number is not None:
            self._device.clear_workspaces(self.stream_number)

    def capture_end(self) -> None:
        was_recorded, self._device.capture = self._device.capture is self, None
        if self.is_invalid or not was_recorded:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        if any(each.is_freed for each in self.workspaces):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        for func, args, kwargs, outs in self.launches:
            again = func(*args, **kwargs)
            results = (
                [again]
                if isinstance(again, Tensor)
                else [each for each in again or () if isinstance(each, Tensor)]
            )
            for old, new in zip(outs, results, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class CurrentPlace:
    """The device and the streams that each thread uses, and the sanitizer that is told of them."""

    def __init__(self, num_devices: int) -> None:
        self.num_syncs = 0  # reads of a tensor by the host, and waits for a stream or an event
        self.sync_debug_mode = 0
        self.capture: Graph | None = None
        self.workspaces: dict[tuple[int, int], Workspace] = {}  # by thread and stream
        self.sent: list[Sent] = []
        self.handler = _sanitizer.EventHandler()
        self._local = threading.local()
        self._numbers = itertools.count(1)
        self.default = [Stream(self, index, 0) for index in range(num_devices)]
        self._capture_stream: Stream | None = None  # one for all of torch's recordings

    def next_number(self) -> int:
        return next(self._numbers)

    def send(self, source: Tensor) -> None:
        self.sent.append(Sent(self.current_stream().number, source, source.clone()))

    def sent_on(self, stream: Stream) -> list[Sent]:
        return [each for each in self.sent if each.stream == stream.number]

    def arrive(self, sent: list[Sent]) -> None:
        """The host has waited for these copies. Raises RuntimeError if it has written there before."""
        for each in [each for each in sent if each in self.sent]:
            self.sent.remove(each)
            found, expected = (own.reshape(-1).view(torch.uint8) for own in (each.source, each.content))
            if not torch.equal(found, expected):
                raise RuntimeError("the host has written to pinned memory before the device had copied it")

    def use_workspace(self) -> None:
        """A product is launched."""
        key = threading.get_ident(), self.current_stream().number
        used = self.workspaces.setdefault(key, Workspace(self.capture is not None))
        if self.capture is not None:
            self.capture.workspaces.append(used)

    def clear_workspaces(self, stream_number: int | None = None) -> None:
        """Those of a stream; None: all."""
        for key in [key for key in self.workspaces if stream_number in (None, key[1])]:
            cleared = self.workspaces.pop(key)
            cleared.is_freed = not cleared.is_of_recording

    def sync(self, why: str) -> None:
        if self.capture is not None:
            self.capture.is_invalid = True
            raise RuntimeError(f"CUDA error: {why} while a graph is recorded")
        if self.sync_debug_mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.num_syncs += 1

    def _set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = {"default": 0, "warn": 1, "error": 2}[mode] if isinstance(mode, str) else mode

    def current_device(self) -> int:
        return getattr(self._local, "device", 0)

    def current_stream(self, device: Any = None) -> Stream:
        index = self._place(torch.device("cuda") if device is None else torch.device(device))
        return getattr(self._local, "streams", {}).get(index, self.default[index])

    def set_stream(self, stream: Stream) -> None:
        self._local.streams = {**getattr(self._local, "streams", {}), stream.index: stream}

    def set_device(self, device: Any) -> None:
        self._local.device = device if isinstance(device, int) else self._place(torch.device(device))

    @contextmanager
    def _on_stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before = self.current_stream(torch.device("cuda", stream.index))
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    @contextmanager
    def _record(self, graph: Graph, pool: Any = None, **_options: Any) -> Iterator[None]:
        if self._capture_stream is None:
            self._capture_stream = Stream(self, self.current_device(), self.next_number())
        try:
            with self._on_stream(self._capture_stream):
                graph.capture_begin()
                yield
        finally:
            self.capture = None

    def _exchange(self, index: int) -> int:
        before = self.current_device()
        if index >= 0:
            self._local.device = index
        return before

    def _place(self, device: torch.device) -> int:
        return self.current_device() if device.index is None else device.index

    def _synchronize(self, device: Any = None) -> None:
        self.sync("the host waits for the device")
        self.handler.syncs.sync_all_streams()
        self.arrive(list(self.sent))
