"""Loads a quantised checkpoint whose linears and experts keep their codes.

transformers alone knows which tensor belongs to which module (renamed keys, merged experts). So it is given
a stand-in for every weight whose codes can stay: one row of NaN that is repeated without taking memory.

* A stand-in is found as the weight of a linear of the text model: a linear of codes replaces that linear.
* It is found elsewhere: the plain weight replaces it.
* It is found nowhere, because transformers has computed something from it: the model is loaded again, with
  this weight plain.

So the plain weights of the linears exist nowhere. Experts are loaded in another way: `coded_experts`. Runs on
the thread that loads the model, while the files are open.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cluster.errors import ConfigError
from cluster.model.coded_experts import ExpertLoading, is_of_experts
from cluster.model.dequantising import DequantisedSlice
from cluster.model.layers.codes import CodedLinear, CodedProduct

logger = logging.getLogger(__name__)

Loaded = tuple[PreTrainedModel, dict[str, Any]]


class StandIn:
    """Sliced in place of a quantised weight. row: all rows of what is given, which tells it from others."""

    def __init__(self, weight: DequantisedSlice):
        self.weight = weight
        self.row = torch.full(weight.get_shape()[1:], torch.nan, dtype=weight.dtype)
        self.was_read = False

    def get_shape(self) -> list[int]:
        return self.weight.get_shape()

    def __getitem__(self, index: Any) -> Tensor:
        self.was_read = True
        return self.row.expand(self.get_shape())[index]

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether the tensor is the stand-in, neither turned nor a part of it."""
        return list(tensor.shape) == self.get_shape() and tensor.stride() == (0, 1)


def load_with_codes(
    read: Callable[[], Loaded],
    experts: ExpertLoading,
    text_of: Callable[[PreTrainedModel], nn.Module],
    product: CodedProduct,
) -> Loaded:
    """experts: take their places while `read` runs, which loads a model from their tensors; quantised weights
    in these are replaced."""
    tensors = experts.tensors
    weights = {
        name: tensor
        for name, tensor in tensors.items()
        if isinstance(tensor, DequantisedSlice) and tensor.has_codes and not is_of_experts(name, tensor)
    }
    while True:
        stand_ins = {name: StandIn(weight) for name, weight in weights.items()}
        tensors.update(stand_ins)
        experts.begin()
        try:
            model, report = read()
        except ConfigError:
            if not experts.has_places:
                raise
            experts.give_up()  # if that was not the reason, it is raised again
            continue
        lost = _replace(model, text_of(model), stand_ins, product)
        if experts.settle() and not lost:
            return model, report
        del model, report  # before there is another one
        if lost:
            logger.info("%d weights are converted and cannot keep their codes: %s", len(lost), lost[0])
            tensors.update({name: weights.pop(name) for name in lost})


def _replace(
    model: nn.Module, text: nn.Module, stand_ins: Mapping[str, StandIn], product: CodedProduct
) -> list[str]:
    """Returns the names of stand-ins that were read and are not in the model."""
    names = {each.row.data_ptr(): name for name, each in stand_ins.items()}
    of_text, found = {*text.modules()}, set()
    plain: dict[str, nn.Parameter] = {}
    for parent in [*model.modules()]:
        for child_name, child in [*parent.named_children()]:
            for leaf, parameter in [*child.named_parameters(recurse=False)]:
                name = names.get(parameter.data_ptr(), "")
                if not name or not stand_ins[name].is_whole(parameter):
                    continue
                found.add(name)
                if type(child) is nn.Linear and child in of_text:
                    codes = stand_ins[name].weight.codes(name)
                    setattr(parent, child_name, CodedLinear(codes, child.bias, product))
                    continue
                if name not in plain:
                    plain[name] = nn.Parameter(stand_ins[name].weight[...], requires_grad=False)
                child.register_parameter(leaf, plain[name])
    return [name for name, each in stand_ins.items() if each.was_read and name not in found]
