"""Reads experts that a checkpoint holds transposed as the model has them: [experts, rows, columns].

The hub's checkpoints of some families hold experts as [experts, columns, rows]; folders that transformers has
saved hold them as the model does. transformers transposes a matrix if its shape is not that of the parameter.
That is wrong for a rank's share, whose shape is another one anyway, and for square matrices. So its
conversions by shape are taken out (`without_transposing`), and it is given tensors that need none
(`in_model_layout`).

The shapes of a layer's two matrices say which layout a file has: rows of the first are gates and their
values, twice as many as the second has columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter, WeightTransform

from cluster.errors import ConfigError

_GATES, _DOWN = "experts.gate_up_proj", "experts.down_proj"


class TransposedSlice:
    """A tensor [experts, columns, rows] as [experts, rows, columns], read where it is sliced."""

    def __init__(self, stored: Any):
        self._stored = stored

    def get_shape(self) -> list[int]:
        experts, columns, rows = self._stored.get_shape()
        return [experts, rows, columns]

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis, or slices of leading axes."""
        experts, rows, columns = (*(() if index is ... else index), *3 * (slice(None),))[:3]
        return self._stored[experts, columns, rows].transpose(1, 2).contiguous()


def has_two_layouts(model_type: str) -> bool:
    """Whether checkpoints of this type have two layouts."""
    return any(map(_transposes_by_shape, get_checkpoint_conversion_mapping(model_type) or ()))


def without_transposing(conversions: Sequence[WeightTransform]) -> list[WeightTransform]:
    return [each for each in conversions if not _transposes_by_shape(each)]


def _transposes_by_shape(conversion: WeightTransform) -> bool:
    if not isinstance(conversion, WeightConverter):
        return False
    return any(isinstance(step, Transpose) and step.check_dims for step in conversion.operations)


@contextmanager
def stored_tensors(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """All tensors of the checkpoint, by name. Nothing is read before it is sliced. Raises ConfigError for a
    checkpoint in another format than safetensors."""
    if not files:
        raise ConfigError(
            "weights of this model type, or ranks' pieces of them, are read from safetensors only",
            param="model",
        )
    tensors: dict[str, Any] = {}
    with ExitStack() as opened:
        for file in files:
            reader = opened.enter_context(safe_open(file, framework="pt"))
            tensors |= {name: reader.get_slice(name) for name in reader.offset_keys()}
        try:
            yield tensors
        finally:
            tensors.clear()


def in_model_layout(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same tensors, with all experts as the model has them. Raises ConfigError for experts of neither
    layout."""
    transposed = dict(tensors)
    for gates in filter(re.compile(rf"{re.escape(_GATES)}$").search, tensors):
        down = gates.removesuffix(_GATES) + _DOWN
        if down not in tensors:
            continue  # the loader names what is missing
        if _is_transposed(gates, tensors[gates].get_shape(), tensors[down].get_shape()):
            transposed |= {name: TransposedSlice(tensors[name]) for name in (gates, down)}
    return transposed


def _is_transposed(name: str, gates: Sequence[int], down: Sequence[int]) -> bool:
    if len(gates) == len(down) == 3:
        (_, first, second), (_, third, fourth) = gates, down
        if (first, second) == (2 * fourth, third):
            return False
        if (first, second) == (fourth, 2 * third):
            return True
    raise ConfigError(
        f"the experts {name} {list(gates)} and {_DOWN} {list(down)} are in no layout that is known",
        param="model",
    )
