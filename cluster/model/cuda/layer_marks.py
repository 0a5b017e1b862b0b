"""When a recorded step has written the K and V of each layer.

Every replay has a number, which lies on the device. Behind each layer the step copies it to the layer's place
in the host's memory. A layer is written once its place has the number, or a later one. (An event that a graph
records says nothing certain between the launch of a replay and that moment.)
"""

from __future__ import annotations

from functools import partial

import torch

from cluster.model.step_model import OnLayer


class LayerMarks:
    def __init__(self, device: torch.device, num_layers: int):
        self._number = torch.zeros(1, dtype=torch.int64, device=device)
        self._places = torch.zeros(num_layers, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._seen = self._places.numpy()
        self._layers: dict[int, None] = {}  # in the order of a step
        self._num_replays = 0

    def record(self, layer_idx: int) -> None:
        """Makes the copy a part of what is recorded now."""
        self._layers[layer_idx] = None
        self._places[layer_idx : layer_idx + 1].copy_(self._number, non_blocking=True)

    def begin(self) -> None:
        """Gives the next replay its number. Enqueued."""
        self._num_replays += 1
        self._number.fill_(self._num_replays)

    def report(self, on_layer: OnLayer) -> None:
        """Tells the layers of the last replay, in their order."""
        for layer_idx in self._layers:
            on_layer(layer_idx, partial(self._is_written, layer_idx, self._num_replays))

    def _is_written(self, layer_idx: int, number: int) -> bool:
        return bool(self._seen[layer_idx] >= number)
