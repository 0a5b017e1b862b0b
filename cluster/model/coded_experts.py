"""Loads the experts of a quantised checkpoint with their codes: all matrices of a layer's first product as
one, and all of its second.

transformers alone knows which tensors become a layer's experts, and in which order. So it is given numbers in
place of weights: a column with the number of each row (`NumberedRows`), which it stacks and joins as it would
the weights. What it has made of them says where the codes of each row belong.

    with the model on the meta device   `take_places`: the parameters of experts become columns
    transformers reads                  columns
    with the model that was read        `settle`: codes, expert by expert, straight to their device

A rank has whole experts, or rows of the first matrices and columns of the last; it reads these codes alone.
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
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from cluster.model.dequantising import DequantisedSlice, FusedSlice
from cluster.model.half_files import own_share, taken_names
from cluster.model.layers.codes import CodedExperts, Codes, runs_of
from cluster.model.row_numbers import FIRST_ROW, NumberedRows, RowDivision, row_division, runs_in

logger = logging.getLogger(__name__)

_PROJECTIONS = ("gate_up_proj", "up_proj", "down_proj")
_MAX_RUNS = 2  # of rows of an expert: gates and their values
_NUM_THREADS, _AT_ONCE = 4, 16  # that bring matrices into their layout, and how many before they are moved


class _Place(NamedTuple):
    """A parameter of a layer's experts."""

    experts: Any
    leaf: str
    sources: tuple[str, ...]  # names of the tensors that it is made of
    division: RowDivision  # over ranks


class _ExpertMatrix(NamedTuple):
    """Some rows and columns of a matrix of a quantised weight."""

    name: str
    weight: DequantisedSlice
    rows: range
    columns: range
    first: int  # of its rows in the matrix of all experts
    step: int  # to the next one there

    @property
    def scale_rows(self) -> int:
        """Successive rows there that have one scale."""
        return runs_of(self.rows, self.weight.scale_rows)[1] if self.step == 1 else 1

    def places(self, scale_rows: int = 1) -> slice:
        """Where its rows are in the matrix of all experts, or their scales, one for so many rows."""
        end = self.first + self.step * len(self.rows)
        return slice(self.first // scale_rows, -(-end // scale_rows), self.step)

    def codes(self) -> Codes:
        return self.weight.codes(self.name, self.rows, self.columns)


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
            places = [self._place(module, leaf, sources[f"{path}.{leaf}"]) for leaf in leaves]
            if None not in places:
                self._places += cast("list[_Place]", places)
        numbers = {name: number for number, name in enumerate(self._names)}
        for place in self._places:
            column = nn.Parameter(place.division.column, requires_grad=False)
            place.experts.register_parameter(place.leaf, column)
            for name in place.sources:
                columns_axis = -2 if place.experts.is_transposed else -1
                shape = self.tensors[name].get_shape()
                self.tensors[name] = NumberedRows(shape, numbers[name], len(shape) + columns_axis)

    def _matrices_of(self, name: str, experts: Any) -> list[DequantisedSlice]:
        """Returns the matrices of a tensor that lies as the module has it."""
        weight = self.tensors[name]
        if isinstance(weight, FusedSlice):
            return weight.matrices(columns_first=experts.is_transposed)
        return [self._plain[name]]

    def _place(self, experts: Any, leaf: str, sources: Sequence[str]) -> _Place | None:
        """None: not all of its tensors can keep their codes."""
        if not sources or not self._weights >= {*sources}:
            return None
        division = row_division(experts.get_parameter(leaf), columns_axis=1 if experts.is_transposed else 2)
        if division is None:
            return None
        matrices = {name: self._matrices_of(name, experts) for name in sources}
        of_all = [each for of_name in matrices.values() for each in of_name]
        if not all(each.has_codes_of(own) for each in of_all for own in division.columns):
            return None
        self._matrices |= matrices
        return _Place(experts, leaf, tuple(sources), division)

    def settle(self) -> list[str]:
        """Puts codes in place of the columns. Returns the names of weights that cannot keep their codes: then
        the model has to be read again. Raises ConfigError for a code that is not finite."""
        lost: list[str] = []
        for place in self._places:
            made = self._made(place)
            if made is None:
                lost += place.sources
            else:
                place.experts.register_parameter(place.leaf, None)
                del place.experts._parameters[place.leaf]
                place.experts.add_module(place.leaf, made)
        return lost

    def give_up(self) -> None:
        """Experts will be dequantised when the model is read again."""
        self.forget([name for place in self._places for name in place.sources])

    def forget(self, names: Sequence[str]) -> None:
        """These will be dequantised when the model is read again."""
        self._weights -= {*names}
        if names:
            logger.info(
                "%d weights of experts are converted and cannot keep their codes: %s", len(names), names[0]
            )

    def _made(self, place: _Place) -> CodedExperts | None:
        columns = own_share(place.experts.get_parameter(place.leaf).detach()).cpu()
        if columns.dtype != torch.int64 or columns.ndim != 3:
            return None
        matrices: list[_ExpertMatrix] = []
        for expert, rows in enumerate(columns.flatten(1)):
            if (own := self._parts(rows, place, expert * len(rows))) is None:
                return None
            matrices += own
        codes = _stacked(matrices, self._device)
        return None if codes is None else CodedExperts(codes, len(columns))

    def _parts(self, numbers: Tensor, place: _Place, begin: int) -> list[_ExpertMatrix] | None:
        """Returns whose rows these are, from row `begin` of the matrix of all experts on. None: they are no
        rows of the place's tensors, or more than two runs of successive ones, which follow each other or
        alternate (gates and values of gpt_oss)."""
        found, step = [], 2 if len(numbers) > 2 and numbers[2] == numbers[0] + 1 else 1
        for strand in range(step):
            first = begin + strand
            for run in runs_in(numbers[strand::step]):
                number, row = divmod(run.start, FIRST_ROW)
                name = self._names[number] if 0 <= number < len(self._names) else ""
                if name not in place.sources:
                    return None
                matrices = self._matrices[name]
                expert, row = divmod(row, matrices[0].num_rows)
                weight, rows = matrices[expert], range(row, row + len(run))
                if rows.stop > weight.num_rows or len(found) == _MAX_RUNS:
                    return None
                found.append(_ExpertMatrix(name, weight, rows, place.division.own_columns, first, step))
                first += len(run)
        return found


def is_of_experts(name: str, tensor: object) -> bool:
    """Whether it is a quantised weight of experts, which are one tensor or which transformers merges."""
    return isinstance(tensor, FusedSlice) or (isinstance(tensor, DequantisedSlice) and ".experts." in name)


def _stacked(matrices: Sequence[_ExpertMatrix], device: torch.device) -> Codes | None:
    """One matrix on the device; None: they differ in more than their numbers. A few of them are in the memory
    of the CPU at once."""
    scale_rows = math.gcd(*(size for each in matrices for size in (each.scale_rows, len(each.rows))))
    first, num_rows = matrices[0].codes(), sum(len(each.rows) for each in matrices)

    def empty(like: Tensor, num_rows: int) -> Tensor:
        return like.new_empty(num_rows, *like.shape[1:], device=device)

    numbers, scales = empty(first.numbers, num_rows), empty(first.scales, num_rows // scale_rows)
    zeros = None if first.zeros is None else empty(first.zeros, num_rows // scale_rows)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        for start in range(0, len(matrices), _AT_ONCE):
            some = matrices[start : start + _AT_ONCE]
            for each, codes in zip(some, pool.map(_ExpertMatrix.codes, some), strict=True):
                if codes.columns != first.columns:
                    return None
                codes = codes.with_scales_of(scale_rows)
                numbers[each.places()] = codes.numbers
                scales[each.places(scale_rows)] = codes.scales
                if zeros is not None:
                    zeros[each.places(scale_rows)] = codes.zeros
    return replace(first, numbers=numbers, scales=scales, zeros=zeros, scale_rows=scale_rows)
