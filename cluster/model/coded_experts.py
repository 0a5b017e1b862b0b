"""Loads the experts of a quantised checkpoint with their codes: all matrices of a layer's first product as
one, and all of its second.

transformers alone knows which tensors become a layer's experts, and in which order. So it is given numbers in
place of weights: a column with the number of each row (`NumberedRows`), which it stacks and joins as it would
the weights. What it has made of them says where the codes of each row belong.

    with the model on the meta device   `take_places`: the parameters of experts become columns
    transformers reads                  columns
    with the model that was read        `settle`: codes, expert by expert, straight to their device

Only experts that transformers calls by the name of a function are taken, without a norm of their own. Experts
that cannot keep codes are dequantised: the log says which. Runs on the thread that loads the model.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from cluster.model.dequantising import DequantisedSlice, FusedSlice
from cluster.model.half_files import taken_names
from cluster.model.layers.codes import CodedExperts, Codes

logger = logging.getLogger(__name__)

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_WEIGHT = 1 << 32  # the number of the first row of the next weight
_NUM_THREADS, _AT_ONCE = 4, 16  # that bring matrices into their layout, and how many before they are moved


class NumberedRows:
    """Sliced in place of a quantised weight: numbers of its rows, as matrices of one column."""

    def __init__(self, weight: DequantisedSlice | FusedSlice, number: int, *, columns_first: bool):
        """columns_first: the last axis of experts in one tensor is their rows."""
        shape = weight.get_shape()
        shape[1 if len(shape) == 2 or columns_first else 2] = 1
        first = number * _WEIGHT
        self._rows = torch.arange(first, first + math.prod(shape)).view(shape)

    def get_shape(self) -> list[int]:
        return list(self._rows.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._rows[index]


class _Place(NamedTuple):
    """A parameter of a layer's experts."""

    experts: nn.Module
    leaf: str
    sources: tuple[str, ...]  # names of the tensors that it is made of


class _ExpertMatrix(NamedTuple):
    """A matrix of a quantised weight."""

    name: str
    weight: DequantisedSlice

    def codes(self) -> Codes:
        return self.weight.codes(self.name)


class ExpertLoading:
    """The experts of one model, through all attempts to read it."""

    def __init__(
        self, tensors: dict[str, Any], text_of: Callable[[PreTrainedModel], nn.Module], device: torch.device
    ):
        """tensors: what transformers reads; quantised weights of experts in it are replaced."""
        self.tensors, self._text_of, self._device = tensors, text_of, device
        self._plain = {name: each for name, each in tensors.items() if is_of_experts(name, each)}
        self._names = list(self._plain)
        self._weights = {*self._names}  # those that may keep their codes
        self._matrices: dict[str, list[DequantisedSlice]] = {}
        self._places: list[_Place] = []

    def begin(self) -> None:
        """Makes the tensors plain weights again. Call it before each attempt to read the model."""
        self.tensors.update(self._plain)
        self._places, self._matrices = [], {}

    @property
    def has_places(self) -> bool:
        """Whether transformers reads columns of numbers."""
        return bool(self._places)

    def take_places(self, model: PreTrainedModel, conversions: Sequence[WeightTransform]) -> None:
        """model: on the meta device, before anything is read into it."""
        sources = defaultdict(list)
        for name, target in taken_names(model, conversions, self.tensors).items():
            sources[target].append(name)
        of_text = {*self._text_of(model).modules()}
        for path, module in model.named_modules():
            if module not in of_text or getattr(module, "has_post_expert_norm", True):
                continue
            leaves = [leaf for leaf in _PROJECTIONS if module._parameters.get(leaf) is not None]
            places = [_Place(module, leaf, tuple(sources[f"{path}.{leaf}"])) for leaf in leaves]
            names = {name for place in places for name in place.sources}
            if not all(place.sources for place in places) or not names <= self._weights:
                continue
            matrices = {name: self._matrices_of(name, module) for name in names}
            if all(each.has_codes for of_name in matrices.values() for each in of_name):
                self._places += places
                self._matrices |= matrices
        numbers = {name: number for number, name in enumerate(self._names)}
        for place in self._places:
            own: Any = place.experts
            shape = list(own.get_parameter(place.leaf).shape)
            shape[1 if own.is_transposed else 2] = 1
            column = torch.empty(shape, dtype=torch.int64, device="meta")
            own.register_parameter(place.leaf, nn.Parameter(column, requires_grad=False))
            for name in place.sources:
                self.tensors[name] = NumberedRows(
                    self.tensors[name], numbers[name], columns_first=own.is_transposed
                )

    def _matrices_of(self, name: str, experts: Any) -> list[DequantisedSlice]:
        weight = self.tensors[name]
        if isinstance(weight, FusedSlice):
            return weight.matrices(columns_first=experts.is_transposed)
        return [weight]

    def settle(self) -> bool:
        """Puts codes in place of the columns. Returns whether all are; else the model has to be read again.
        Raises ConfigError for a code that is not finite."""
        lost = []
        for place in self._places:
            made = self._made(place.experts.get_parameter(place.leaf).detach())
            if made is None:
                lost += place.sources
            else:
                place.experts.register_parameter(place.leaf, None)
                del place.experts._parameters[place.leaf]
                place.experts.add_module(place.leaf, made)
        self._forget(lost)
        return not lost

    def give_up(self) -> None:
        """Experts will be dequantised when the model is read again."""
        self._forget([name for place in self._places for name in place.sources])

    def _forget(self, names: Sequence[str]) -> None:
        self._weights -= {*names}
        if names:
            logger.info(
                "%d weights of experts are converted and cannot keep their codes: %s", len(names), names[0]
            )

    def _made(self, columns: Tensor) -> CodedExperts | None:
        if columns.dtype != torch.int64 or columns.ndim != 3:
            return None
        matrices: list[_ExpertMatrix] = []
        for rows in columns.flatten(1):
            if (own := self._whole_matrices(rows)) is None:
                return None
            matrices += own
        codes = _stacked(matrices, self._device)
        return None if codes is None else CodedExperts(codes, len(columns))

    def _whole_matrices(self, rows: Tensor) -> list[_ExpertMatrix] | None:
        """Whose rows these are; None: they are not whole matrices, one after the other."""
        found = []
        while len(rows):
            number, row = divmod(int(rows[0]), _WEIGHT)
            name = self._names[number] if 0 <= number < len(self._names) else ""
            if (matrices := self._matrices.get(name)) is None:
                return None
            expert, first = divmod(row, matrices[0].num_rows)
            weight = matrices[expert]
            expected = torch.arange(weight.num_rows) + int(rows[0])
            if first or not torch.equal(rows[: weight.num_rows], expected):
                return None
            found.append(_ExpertMatrix(name, weight))
            rows = rows[weight.num_rows :]
        return found


def is_of_experts(name: str, tensor: object) -> bool:
    """Whether it is a quantised weight of experts, which are one tensor or which transformers merges."""
    return isinstance(tensor, FusedSlice) or (isinstance(tensor, DequantisedSlice) and ".experts." in name)


def _stacked(matrices: Sequence[_ExpertMatrix], device: torch.device) -> Codes | None:
    """One matrix on the device; None: they differ in more than their numbers. A few of them are in the memory
    of the CPU at once."""
    sizes = {each.weight.scale_rows for each in matrices}
    fit = all(each.weight.num_rows % each.weight.scale_rows == 0 for each in matrices)
    scale_rows = sizes.pop() if len(sizes) == 1 and fit else 1
    first = matrices[0].codes()
    num_rows = sum(each.weight.num_rows for each in matrices)
    numbers = torch.empty(num_rows, *first.numbers.shape[1:], dtype=first.numbers.dtype, device=device)
    scales, zeros, end = [], [], 0
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(matrices), _AT_ONCE):
            for codes in pool.map(_ExpertMatrix.codes, matrices[start : start + _AT_ONCE]):
                if codes.columns != first.columns:
                    return None
                begin, end = end, end + len(codes.numbers)
                numbers[begin:end].copy_(codes.numbers)
                codes = codes.with_scales_of(scale_rows)
                scales.append(codes.scales)
                zeros.append(codes.zeros)
    return replace(
        first,
        numbers=numbers,
        scales=torch.cat(scales).to(device),
        zeros=None if first.zeros is None else torch.cat(zeros).to(device),
        scale_rows=scale_rows,
    )
