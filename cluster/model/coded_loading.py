"""Loads a quantised checkpoint whose linears and experts keep their codes, of a rank those of its share.

transformers reads numbers of rows in place of the weights that can stay codes (`coded_linears`,
`coded_experts`), so the plain weights of these exist nowhere. If it has computed something else from them,
the model is loaded again with these weights plain. Ranks decide that together. Runs on the thread that loads
the model, while the files are open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from cluster.errors import ConfigError
from cluster.model.coded_experts import ExpertLoading
from cluster.model.coded_linears import LinearLoading
from cluster.model.collectives import Collectives, OtherRankError
from cluster.model.layers.codes import CodedProduct

Loaded = tuple[PreTrainedModel, dict[str, Any]]


class CodedLoading:
    """What of one model keeps its codes, through all attempts to read it."""

    def __init__(
        self, tensors: dict[str, Any], text_of: Callable[[PreTrainedModel], nn.Module], product: CodedProduct,
        device: torch.device, collectives: Collectives | None = None,
    ):  # fmt: skip
        """tensors: what transformers reads; quantised weights in it are replaced. collectives: of a rank."""
        self._linears = LinearLoading(tensors, text_of, product, device, collectives)
        self._experts = ExpertLoading(tensors, text_of, device)
        self._collectives = collectives

    def take_places(self, model: PreTrainedModel, conversions: Sequence[WeightTransform]) -> None:
        """Called while `load` reads, with the model on the meta device."""
        self._linears.take_places(model, conversions)
        self._experts.take_places(model, conversions)

    def load(self, read: Callable[[], Loaded]) -> Loaded:
        """read: loads a model from the tensors. All ranks call it together. Raises ConfigError, or
        OtherRankError on a rank whose own share could be read."""
        while True:
            error = None
            for each in (self._linears, self._experts):
                each.begin()
            try:
                model, report = read()
            except ConfigError as raised:
                error = raised
            if not self._all_agree(error is None):
                self._give_up(error)
                continue
            lost = self._anywhere(self._linears.lost())
            of_experts = self._anywhere([] if lost else self._experts.settle())
            if not lost and not of_experts:
                self._linears.settle(model)
                return model, report
            del model, report  # before there is another one
            self._linears.forget(lost)
            self._experts.forget(of_experts)

    def _give_up(self, error: ConfigError | None) -> None:
        """Numbers may have been the reason; if they were not, the error is raised again."""
        having = [each for each in (self._experts, self._linears) if each.has_places]
        if not having:
            raise error or OtherRankError("another rank cannot read its share; its log says why")
        having[0].give_up()

    def _all_agree(self, agrees: bool) -> bool:
        return agrees if self._collectives is None else self._collectives.all_agree(agrees)

    def _anywhere(self, names: Sequence[str]) -> list[str]:
        """Names that a rank passes."""
        return list(names) if self._collectives is None else self._collectives.union(names)
