"""Hidden rows of a step's tokens, which heads that draft tokens read (`draft_head`).

Hooks on the text model copy them into one tensor at a fixed address, in every step: a recorded step copies
them, too, when it is replayed. A step with more tokens than there is room for keeps the first of them;
answers come first. Used on the engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.model.cuda.draw import to_device


class HiddenRows:
    """`width`: of a row, in numbers. `capacity`: tokens of a step whose rows are kept."""

    def __init__(
        self,
        capacity: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        layers: Sequence[int] = (),
    ):
        """layers: a row is what these layers take as input, side by side. Empty: it is what the text model
        returns, from which logits are computed."""
        self.capacity = capacity
        self.width = hidden_size * max(1, len(layers))
        self._hidden_size, self._layers = hidden_size, tuple(layers)
        self._rows = torch.zeros(capacity, self.width, dtype=dtype, device=device)

    def attach(self, text_model: nn.Module) -> None:
        """From now on, steps of the text model keep rows here. Call it once, before steps are recorded."""
        if not self._layers:
            text_model.register_forward_hook(
                lambda _model, _args, output: self._keep(output.last_hidden_state)
            )
        layers = cast(nn.ModuleList, text_model.layers)
        for place, layer_idx in enumerate(self._layers):
            layers[layer_idx].register_forward_pre_hook(partial(self._keep_input, place), with_kwargs=True)

    def take(self, indices: Sequence[int]) -> Tensor:
        """[n, width], a copy: the rows of these tokens of the last step, each below `capacity`."""
        return self._rows[to_device(indices, self._rows.device)]

    def _keep_input(
        self, place: int, _layer: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        self._keep(args[0] if args else keywords["hidden_states"], place)

    def _keep(self, hidden: Tensor, place: int = 0) -> None:
        """hidden [1, T, hidden_size]: may change afterwards."""
        rows, start = hidden[0, : self.capacity], place * self._hidden_size
        self._rows[: len(rows), start : start + self._hidden_size].copy_(rows)
