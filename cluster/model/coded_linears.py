"""Loads the linears of a quantised text model with their codes; of a rank, with the codes of its share alone.

transformers alone knows which tensor becomes the weight of which linear, and which of its rows a rank has. So
it is given a column with the number of each row, as for experts (`coded_experts`), and reads these in place
of the weight. What it has made of them says which rows the linear has. Columns are divided by position.

    with the model on the meta device   `take_places`: weights become columns of numbers
    transformers reads                  columns
    with the model that was read        `lost`, `settle`: linears of codes take the places of the linears

A linear stays plain where ranks would cut its columns so that no kernel computes with a piece, or divide it
in another way than by its outputs or inputs. Runs on the thread that loads the model. Ranks of codes have not
run on GPUs.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from cluster.model.coded_experts import is_of_experts
from cluster.model.collectives import Collectives
from cluster.model.dequantising import DequantisedSlice
from cluster.model.half_files import own_share, taken_names
from cluster.model.layers.codes import CodedLinear, CodedProduct, Codes, joined
from cluster.model.mixer_shares import piece_of
from cluster.model.rank_linears import coded_kind, coded_linear
from cluster.model.row_numbers import FIRST_ROW, NumberedRows, RowDivision, row_division, runs_in
from cluster.model.sharding import name_in_plan

logger = logging.getLogger(__name__)


class _LinearPlace(NamedTuple):
    """A linear whose weight is a column of numbers while transformers reads."""

    name: str  # of the stored weight
    number: int  # that its rows' numbers begin with
    path: str
    linear: nn.Linear
    kind: type[CodedLinear]
    division: RowDivision  # over ranks


class LinearLoading:
    """The linears of one model, through all attempts to read it."""

    def __init__(
        self, tensors: dict[str, Any], text_of: Callable[[PreTrainedModel], nn.Module], product: CodedProduct,
        device: torch.device, collectives: Collectives | None,
    ):  # fmt: skip
        """tensors: what transformers reads; quantised weights of linears in it are replaced. device: where
        the codes of a rank go. collectives: of a rank."""
        self.tensors, self._text_of, self._product = tensors, text_of, product
        self._device, self._collectives = device, collectives
        self._weights: dict[str, DequantisedSlice] = {
            name: each
            for name, each in tensors.items()
            if isinstance(each, DequantisedSlice) and not is_of_experts(name, each)
        }
        self._plain = dict(self._weights)
        self._places: list[_LinearPlace] = []

    def begin(self) -> None:
        """Makes the tensors plain weights again. Call it before each attempt to read the model."""
        self.tensors.update(self._plain)
        self._places = []

    @property
    def has_places(self) -> bool:
        """Whether transformers reads columns of numbers."""
        return bool(self._places)

    def take_places(self, model: PreTrainedModel, conversions: Sequence[WeightTransform]) -> None:
        """model: on the meta device, before anything is read into it."""
        names = taken_names(model, conversions, self.tensors)
        num_sources, of_text = Counter(names.values()), {*self._text_of(model).modules()}
        linears = {
            f"{path}.weight": (path, module)
            for path, module in model.named_modules()
            if type(module) is nn.Linear and module in of_text
        }
        plain: list[str] = []
        for number, (name, target) in enumerate(names.items(), 1):
            if (
                (weight := self._weights.get(name)) is None
                or target not in linears
                or num_sources[target] > 1
            ):
                continue
            path, linear = linears[target]
            way = "" if self._collectives is None else model.tp_plan.get(name_in_plan(path), "")
            kind, division = coded_kind(linear, way), _division(linear)
            if kind is None or division is None or not all(map(weight.has_codes_of, division.columns)):
                plain.append(name)
                continue
            self._places.append(_LinearPlace(name, number, path, linear, kind, division))
            self.tensors[name] = NumberedRows(weight.get_shape(), number, columns_axis=1)
            linear.weight = nn.Parameter(division.column, requires_grad=False)
        if plain:
            logger.info("%d linears cannot keep their codes, or ranks their part: %s", len(plain), plain[0])

    def lost(self) -> list[str]:
        """Returns the names of weights from which transformers has made something else than rows."""
        return [place.name for place in self._places if self._rows_of(place) is None]

    def settle(self, model: nn.Module) -> None:
        """Puts linears of codes in place of the linears; none is lost. Raises ConfigError for a code that is
        not finite."""
        for place in self._places:
            weight, columns = self._weights[place.name], place.division.own_columns
            parts = [
                weight.codes(place.name, rows=rows, columns=columns) for rows in self._rows_of(place) or ()
            ]
            codes: Codes = joined(parts)
            if self._collectives is not None:
                codes = codes.to(self._device)
            parent, _, leaf = place.path.rpartition(".")
            made = coded_linear(place.linear, codes, self._product, place.kind, self._collectives)
            setattr(model.get_submodule(parent), leaf, made)

    def give_up(self) -> None:
        """Linears will be dequantised when the model is read again."""
        self.forget([place.name for place in self._places])

    def forget(self, names: Sequence[str]) -> None:
        """These will be dequantised when the model is read again."""
        for name in names:
            self._weights.pop(name, None)
        if names:
            logger.info("%d weights are converted and cannot keep their codes: %s", len(names), names[0])

    def _rows_of(self, place: _LinearPlace) -> list[range] | None:
        """The rows of the stored weight that the linear has, as runs of successive ones. None: these are no
        numbers of its rows."""
        column = own_share(place.linear.weight.detach())
        if column.dtype != torch.int64 or column.ndim != 2 or column.shape[1] != 1 or not len(column):
            return None
        rows = column[:, 0].cpu() - place.number * FIRST_ROW
        if not 0 <= int(rows.min()) <= int(rows.max()) < self._weights[place.name].num_rows:
            return None
        return runs_in(rows)


def _division(linear: nn.Linear) -> RowDivision | None:
    division, piece = row_division(linear.weight, columns_axis=1), piece_of(linear)
    if division is None or piece is None or not piece.cut.is_last:
        return division
    pieces = [piece.cut.ranges(rank, piece.num_ranks)[0] for rank in range(piece.num_ranks)]
    return replace(division, columns=[range(own.start, own.stop) for own in pieces], rank=piece.rank)
