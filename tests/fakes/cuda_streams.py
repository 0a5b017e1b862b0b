"""Streams, events and graphs of `cuda_device`. An event is over when the host has waited for it, for its
stream or for the device: until then `query` says no."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.fakes.cuda_device import SimulatedCuda


class Stream:
    def __init__(self, device: SimulatedCuda, index: int, number: int):
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


class Event:
    def __init__(self, device: SimulatedCuda, number: int):
        self._device, self.number = device, number
        self.is_over = True  # as CUDA's, until it is recorded
        self.num_waits = 0
        device.handler._handle_event_creation(number)

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self._device.current_stream()
        self._device.handler._handle_event_record(self.number, stream.number)
        self.is_over = False
        stream.events.append(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._device.current_stream()).wait_event(self)

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self._device.sync("the host waits for an event")
        self.num_waits += 1
        self._device.handler._handle_event_synchronization(self.number)
        self.is_over = True


class Graph:
    def __init__(self, device: SimulatedCuda):
        self._device = device
        self.launches: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def add(self, func: Callable[..., Any], args: Any, kwargs: Any, outs: list[Tensor]) -> None:
        self.launches.append((func, args, kwargs, outs))

    def replay(self) -> None:
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
