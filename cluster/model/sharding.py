"""How the language half of a model is divided over the ranks of a worker, by transformers' own plans.

* Tensor parallelism divides every matrix of its plan, experts included.
* Expert parallelism gives each rank whole experts, and divides the rest as tensor parallelism does. All ranks
  have all tokens: each computes those that chose its experts, and their sum is a collective, as after any
  other part of a layer.

A model that cannot be divided is refused by name before a weight is read. transformers refuses plans that do
not fit the model; what its plans compute wrong was found by trying every family with two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

from cluster.config.ranks import check_heads, check_plan
from cluster.errors import ConfigError
from cluster.model.failures import LOADING_ERRORS, is_out_of_memory

# transformers' names of ways to divide a linear; None: every rank has all of it.
_IN_PIECES = (
    None, "colwise", "rowwise", "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep",
    "replicate", "replicated_with_grad_allreduce",
)  # fmt: skip


@dataclass(frozen=True)
class Sharding:
    num_ranks: int = 1
    expert_parallel: bool = False  # each rank has whole experts

    def plan(self) -> DistributedConfig:
        num_expert_ranks = self.num_ranks if self.expert_parallel else 1
        return DistributedConfig(
            tp_size=self.num_ranks, ep_size=num_expert_ranks, ep_implementation="all_reduce"
        )


UNDIVIDED = Sharding()
Linear = TypeVar("Linear", bound=nn.Module)


def read_share(
    half_class: type[PreTrainedModel],
    path: str | Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    sharding: Sharding,
    *,
    may_copy: bool,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Reads this rank's share of the weights. All ranks of the group call it together. may_copy: several
    ranks may have the same KV head. Raises ConfigError."""
    text_config = config.get_text_config()
    check_plan(config.model_type, expert_parallel=sharding.expert_parallel)
    for layer in text_config.per_layer_config:
        heads = layer.num_attention_heads
        kv_heads = getattr(layer, "num_key_value_heads", None) or heads
        check_heads(heads, kv_heads, sharding.num_ranks, may_copy=may_copy)
    if sharding.expert_parallel and not text_config.base_model_ep_plan:
        raise _no_experts(config.model_type)
    with distributing(config.model_type, sharding.num_ranks):
        loaded: Any = half_class.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, distributed_config=sharding.plan()
        )
    if not loaded[0].tp_plan:
        raise ConfigError(
            f"model type '{config.model_type}' has no tensor-parallel plan in transformers",
            param="tensor_parallel_size",
        )
    if sharding.expert_parallel and not any(map(_has_whole_experts, loaded[0].modules())):
        raise _no_experts(config.model_type)
    return loaded


@contextmanager
def distributing(model_type: str, num_ranks: int) -> Iterator[None]:
    """Loading and probing a share; with one rank nothing is distributed. Raises ConfigError for what
    transformers cannot distribute."""
    try:
        yield
    except LOADING_ERRORS as error:
        if num_ranks == 1 or is_out_of_memory(error):
            raise
        raise ConfigError(
            f"transformers cannot distribute model type '{model_type}' to {num_ranks} ranks: {error}",
            param="tensor_parallel_size",
        ) from error


def divided_oddly(model: PreTrainedModel, linears: Iterable[Linear]) -> list[Linear]:
    """Returns those of the linears that ranks divide in another way than by successive pieces of their
    outputs or inputs: adapters cannot change them."""
    names = {module: name for name, module in model.named_modules()}

    def way(linear: nn.Module) -> str | None:
        return model.tp_plan.get(name_in_plan(names[linear]))

    return [linear for linear in linears if way(linear) not in _IN_PIECES]


def name_in_plan(name: str) -> str:
    """Returns the name of a module in any layer, e.g. 'model.layers.*.feed_forward.w1'."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _has_whole_experts(module: nn.Module) -> bool:
    return getattr(module, "_is_expert_parallel", False)


def _no_experts(model_type: str) -> ConfigError:
    return ConfigError(
        f"model type '{model_type}' has no experts that ranks could have whole: set expert_parallel false",
        param="expert_parallel",
    )
