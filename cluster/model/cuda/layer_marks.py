"""When a recorded step has written the K and V of each layer."""

from __future__ import annotations

from functools import partial

import torch

from cluster.model.step_model import OnLayer


class LayerMarks:
    """Events that a recorded step records: one behind each layer's K and V."""

    def __init__(self, device: torch.device):
        self._device = device
        self._events: dict[int, torch.cuda.Event] = {}  # by layer, in their order
        self._replay = 0

    def record(self, layer_idx: int) -> None:
        """Makes the event a part of what is recorded now."""
        event = self._events.get(layer_idx)
        if event is None:
            event = self._events[layer_idx] = torch.cuda.Event(external=True)
        event.record(torch.cuda.current_stream(self._device))

    def finish(self) -> None:
        """Waits until the last replay has recorded its events; as a rule it has. Call it before the next."""
        *_, last = self._events.values()
        last.synchronize()
        self._replay += 1

    def report(self, on_layer: OnLayer) -> None:
        """Tells the layers of the last replay, in their order."""
        for layer_idx, event in self._events.items():
            on_layer(layer_idx, partial(self._is_ready, event, self._replay))

    def _is_ready(self, event: torch.cuda.Event, replay: int) -> bool:
        return replay != self._replay or event.query()
