"""What cannot be served together: settings with each other, and with the model's configuration. Reads no
weight, so that it is said before anything starts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cluster.config.checkpoint import read_config, text_config
from cluster.config.draft_heads import layers_read
from cluster.config.hybrids import keeps_states
from cluster.config.ranks import check_ranks
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.types.transfer import GROUP_TOKENS


def check_combination(args: ClusterArgs) -> None:
    """`args`: resolved, so folders are absolute. Raises ConfigError."""
    config = read_config(args.model)
    check_ranks(config, args.tensor_parallel_size, expert_parallel=args.expert_parallel)
    _check_weights(args)
    _check_codec(args, config)
    if args.decode.speculation.method == "draft":
        _check_draft(config, args.decode.speculation.model)
    layers_read(args)


def _check_weights(args: ClusterArgs) -> None:
    if args.weight_dtype == "auto":
        return
    what = f"weight_dtype {args.weight_dtype}"
    if args.tensor_parallel_size > 1:
        raise ConfigError(f"{what} needs tensor_parallel_size 1", param="weight_dtype")
    if args.device == "cuda" or args.cpu_kernels == "none":
        raise ConfigError(
            f"{what} needs the native CPU kernels, not device cuda or cpu_kernels none", param="weight_dtype"
        )


def _check_codec(args: ClusterArgs, config: Mapping[str, Any]) -> None:
    codec, what = args.transfer.codec, f"transfer.codec {args.transfer.codec}"
    if codec == "int4" and keeps_states(config):
        raise ConfigError(
            f"{what} has to pass a probe of the whole model, which knows no states; model type "
            f"'{config['model_type']}' keeps some",
            param="transfer.codec",
        )
    if codec == "int4" and args.tensor_parallel_size > 1:
        raise ConfigError(
            f"{what} has to pass a probe of the whole model, which needs tensor_parallel_size 1",
            param="transfer.codec",
        )
    if codec in ("int8", "int4") and (args.kv_cache_dtype != "auto" or GROUP_TOKENS % args.block_size):
        raise ConfigError(
            f"{what} needs kv_cache_dtype auto and a block_size that divides {GROUP_TOKENS}",
            param="transfer.codec",
        )


def check_vocabularies(draft: int, target: int) -> None:
    """Raises ConfigError if the two models do not have equal numbers of tokens."""
    if draft != target:
        raise ConfigError(
            f"the draft model ({draft} tokens) and the target model ({target} tokens) must have the same "
            "vocabulary",
            param="decode.speculation.model",
        )


def _check_draft(target: Mapping[str, Any], folder: str) -> None:
    config = read_config(Path(folder))
    if keeps_states(config):
        raise ConfigError(
            f"model type '{config['model_type']}' keeps states: it cannot be a draft model",
            param="decode.speculation.model",
        )
    sizes = [text_config(each).get("vocab_size") for each in (config, target)]
    if isinstance(sizes[0], int) and isinstance(sizes[1], int):
        check_vocabularies(sizes[0], sizes[1])
