"""What the ranks of a tensor-parallel worker cannot share. Asked with what config.json says before anything
starts, and with what transformers makes of it when a share is loaded. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from cluster.config.checkpoint import text_config
from cluster.config.hybrids import has_whole_mixers, keeps_states, mixer_heads
from cluster.errors import ConfigError

# Model types whose experts may only be whole: by transformers' plan for parts of them the model gives other
# numbers.
_WHOLE_EXPERTS = ("step3p7",)
# Model types whose plan gives other numbers. Gemma 3n takes the mean of a row of its MLP, of which a rank has
# a share.
_WRONG_PLANS = ("gemma3n_text",)
_PARAM = "tensor_parallel_size"


def check_ranks(config: Mapping[str, Any], num_ranks: int, *, expert_parallel: bool) -> None:
    """Raises ConfigError for what the configuration says by itself; a number that it leaves out is not
    looked at."""
    if num_ranks == 1:
        return
    model_type, text = config["model_type"], text_config(config)
    check_plan(model_type, expert_parallel=expert_parallel)
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if isinstance(heads, int):
        num_kv = kv_heads if isinstance(kv_heads, int) else heads
        check_heads(heads, num_kv, num_ranks, may_copy=keeps_states(config))
    if has_whole_mixers(config):
        refuse_mixers(model_type)
    check_mixers(model_type, mixer_heads(config), num_ranks)


def check_plan(model_type: str, *, expert_parallel: bool) -> None:
    """Raises ConfigError for a model type of which a plan of transformers gives other numbers."""
    if model_type in _WRONG_PLANS:
        raise ConfigError(
            f"transformers cannot distribute model type '{model_type}': by its plan the model gives other "
            "numbers",
            param=_PARAM,
        )
    if not expert_parallel and model_type in _WHOLE_EXPERTS:
        raise ConfigError(
            f"transformers cannot divide the experts of model type '{model_type}' into parts (the model "
            "would give other numbers), only give ranks whole ones: set expert_parallel true",
            param="expert_parallel",
        )


def check_heads(heads: int, kv_heads: int, num_ranks: int, *, may_copy: bool) -> None:
    """may_copy: several ranks may have the same KV head. Raises ConfigError if the heads cannot be
    distributed evenly."""
    are_even = kv_heads % num_ranks == 0 or (may_copy and num_ranks % kv_heads == 0)
    if heads % num_ranks or not are_even:
        raise ConfigError(
            f"{heads} attention heads with {kv_heads} KV heads cannot be distributed evenly to {num_ranks} "
            "ranks",
            param=_PARAM,
        )


def refuse_mixers(model_type: str) -> NoReturn:
    raise ConfigError(
        f"model type '{model_type}' keeps states beside its KV that ranks cannot share: it runs on one rank "
        "only",
        param=_PARAM,
    )


def check_mixers(model_type: str, heads: Mapping[str, int], num_ranks: int) -> None:
    """heads: numbers of which each rank has an equal share, by what they are. Raises ConfigError."""
    for what, number in heads.items():
        if number % num_ranks:
            raise ConfigError(
                f"model type '{model_type}': {number} {what} of its mixers cannot be distributed evenly to "
                f"{num_ranks} ranks",
                param=_PARAM,
            )
