"""How tokens are drawn and when generation stops by default, from `generation_config.json`, then
`config.json`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.checkpoint import length_limit, read_config, read_json, text_config
from cluster.config.families import part_of_whole
from cluster.errors import ConfigError

logger = logging.getLogger(__name__)

_LIMITED_BY_DEFAULT = ("llama4", "llama4_text")


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Values for fields that a request leaves out."""

    temperature: float = 1.0  # 0 when the model says `do_sample: false`
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None  # None: as many as the context has room for
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> GenerationDefaults:
        file = Path(path) / "generation_config.json"
        generation = read_json(file) if file.is_file() else {}
        config = read_config(path)
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id", text_config(config).get("eos_token_id"))
        temperature = 0.0 if generation.get("do_sample") is False else generation.get("temperature")
        return cls(
            temperature=1.0 if temperature is None else float(temperature),
            top_p=float(generation.get("top_p") or 1.0),
            top_k=int(generation.get("top_k") or 0),
            min_p=float(generation.get("min_p") or 0.0),
            max_tokens=generation.get("max_new_tokens"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


def context_length(path: str | Path, asked: int = 0) -> int:
    """Tokens of prompt and answer: those that the operator asks for, or for which the model was made, or
    those of the longest sequence that is served. Raises ConfigError for more than that, or if no length is
    known."""
    text = _with_length(path)
    limit = length_limit(text)
    if asked:
        if limit is not None and asked > limit.num_tokens:
            raise ConfigError(
                f"max_model_len is {asked}; {path} is not served beyond {limit.num_tokens} tokens, where "
                f"{limit.reason}",
                param="max_model_len",
            )
        return asked
    length = text.get("max_position_embeddings")
    if not length:
        raise ConfigError(f"{path}/config.json names no max_position_embeddings; set max_model_len")
    if limit is None or limit.num_tokens >= length:
        return int(length)
    logger.warning(
        "%s is served up to %d tokens, not to %d: beyond them %s",
        path, limit.num_tokens, length, limit.reason,
    )  # fmt: skip
    return limit.num_tokens


def _with_length(path: str | Path) -> Mapping[str, Any]:
    """The part of the configuration that names a length. If none does, or other values limit the length, the
    family's defaults are needed: configurations on the hub leave out values that equal the default."""
    config = read_config(path)
    for part in (config, text_config(config)):
        if part.get("max_position_embeddings") and config["model_type"] not in _LIMITED_BY_DEFAULT:
            return part
    from transformers import AutoConfig

    served = AutoConfig.from_pretrained(path)
    if part := part_of_whole(served.model_type):
        served = getattr(served, part[1].part_key)
    return served.get_text_config().to_dict()
