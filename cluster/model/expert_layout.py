"""Reads experts in the layouts that checkpoints have: all of a layer as one tensor, perhaps transposed, or an
entry for each.

*Transposed.* The hub's checkpoints of some families hold experts as [experts, columns, rows]; folders that
transformers has saved hold them as the model does. transformers transposes a matrix if its shape is not that
of the parameter. That is wrong for a rank's share, whose shape is another one anyway, and for square
matrices. So its conversions by shape are taken out, and it is given tensors that need none
(`in_model_layout`).

The shapes of a layer's two matrices say which layout a file has: rows of the first are gates and their
values, twice as many as the second has columns.

*An entry for each.* Exporters of quantised weights give every expert linears of its own (gate_proj, up_proj,
down_proj), also in families of which transformers knows the one tensor only. A module of experts says how it
holds them, and with that how such entries become its tensor (`fit_experts`). Where it holds columns first,
entries are turned before transformers takes a rank's part of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightTransform,
)

from cluster.errors import ConfigError
from cluster.model.dequantising import FusedSlice

_GATES, _DOWN = "experts.gate_up_proj", "experts.down_proj"
# Classes that do not say how they hold gates and values, and have one after the other.
_CONCATENATED = ("Llama4TextExperts",)


class TransposedSlice:
    """A tensor [..., columns, rows] as [..., rows, columns], read where it is sliced."""

    def __init__(self, stored: Any):
        self._stored = stored

    def get_shape(self) -> list[int]:
        *experts, columns, rows = self._stored.get_shape()
        return [*experts, rows, columns]

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis, or slices of leading axes."""
        num_axes = len(self._stored.get_shape())
        *experts, rows, columns = (*(() if index is ... else index), *3 * (slice(None),))[:num_axes]
        return self._stored[(*experts, columns, rows)].mT.contiguous()


def has_two_layouts(model_type: str) -> bool:
    """Whether checkpoints of this type have two layouts."""
    return any(map(_transposes_by_shape, get_checkpoint_conversion_mapping(model_type) or ()))


def fit_experts(
    model: PreTrainedModel, conversions: Sequence[WeightTransform], tensors: dict[str, Any] | None
) -> list[WeightTransform]:
    """The conversions by which experts in any layout become the model's: transformers' own first. tensors:
    what it is given to read, of which those are turned that lie unlike the model's; None: it reads the files
    itself, and then lacks entries of experts with columns first. Raises ConfigError for experts of no layout
    that is known."""
    forms = {form for path, module in model.named_modules() if (form := _form_of(path, module)) is not None}
    if tensors is None:
        forms = {form for form in forms if not form.is_transposed}
    else:
        for entry in [entry for form in forms if form.is_transposed for entry in form.entries(tensors)]:
            if not isinstance(tensors[entry], TransposedSlice):  # by an earlier attempt
                tensors[entry] = _turned(tensors[entry])
    if tensors is not None and any(map(_transposes_by_shape, conversions)):
        tensors.update(in_model_layout(tensors))
        conversions = [each for each in conversions if not _transposes_by_shape(each)]
    return [*conversions, *(each for form in sorted(forms) for each in _joining(form))]


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
            transposed |= {name: _turned(tensors[name]) for name in (gates, down)}
    return transposed


def _turned(tensor: Any) -> FusedSlice | TransposedSlice | Tensor:
    if isinstance(tensor, Tensor):
        return tensor.mT
    return tensor.turned() if isinstance(tensor, FusedSlice) else TransposedSlice(tensor)


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


class _FusedForm(NamedTuple):
    """How a module holds its experts."""

    name: str  # the last part of its path
    has_gate: bool
    is_concatenated: bool  # gates, then values; otherwise they alternate
    is_transposed: bool  # [experts, columns, rows]
    has_bias: bool

    def entries(self, names: Iterable[str]) -> list[str]:
        """Those that are weights of single experts."""
        pattern = re.compile(rf"\.{self.name}\.\d+\.(gate|up|down)_proj\.weight$")
        return list(filter(pattern.search, names))


def _form_of(path: str, module: Any) -> _FusedForm | None:
    """None: the module has no experts in one tensor, or does not say how it holds them."""
    down, name = getattr(module, "down_proj", None), path.rpartition(".")[2]
    if not isinstance(down, Tensor) or down.ndim != 3:
        return None
    if hasattr(module, "is_concatenated"):
        return _FusedForm(
            name, module.has_gate, module.is_concatenated, module.is_transposed, module.has_bias
        )
    if type(module).__name__ in _CONCATENATED:
        is_transposed = _is_transposed(path, module.gate_up_proj.shape, down.shape)
        return _FusedForm(name, True, True, is_transposed, False)
    return None


def _joining(form: _FusedForm) -> Iterator[WeightConverter]:
    """The conversions that make a module's parameters of the entries."""
    targets = {"gate_up_proj": ("gate_proj", "up_proj")} if form.has_gate else {"up_proj": ("up_proj",)}
    for target, sources in {**targets, "down_proj": ("down_proj",)}.items():
        names = [rf"\.{form.name}\.\d+\.{source}" for source in sources]
        outputs = 2 if form.is_transposed else 1
        joined = _joined(len(sources), outputs, alternates=not form.is_concatenated)
        yield WeightConverter([rf"{name}\.weight" for name in names], f".{form.name}.{target}", joined)
        if form.has_bias:
            joined = _joined(len(sources), 1, alternates=not form.is_concatenated)
            yield WeightConverter([rf"{name}\.bias" for name in names], f".{form.name}.{target}_bias", joined)


def _joined(num_sources: int, outputs: int, *, alternates: bool) -> list[ConversionOps]:
    """outputs: the axis of what is joined."""
    if num_sources == 1:
        return [MergeModulelist(dim=0)]
    alternating = [Interleave(outputs, inverse=True)] if alternates else []
    return [MergeModulelist(dim=0), Concatenate(dim=outputs), *alternating]
