"""How tokens are drawn and when generation stops by default, from `generation_config.json`, then
`config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cluster.config.checkpoint import max_rope_length, read_config, read_json, text_config
from cluster.config.families import part_of_whole
from cluster.errors import ConfigError


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
        temperature = generation.get("temperature", 1.0)
        return cls(
            temperature=0.0 if generation.get("do_sample") is False else float(temperature),
            top_p=float(generation.get("top_p") or 1.0),
            top_k=int(generation.get("top_k") or 0),
            min_p=float(generation.get("min_p") or 0.0),
            max_tokens=generation.get("max_new_tokens"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


def context_length(path: str | Path, asked: int = 0) -> int:
    """Tokens of prompt and answer: those that the operator asks for, or for which the model was made. Raises
    ConfigError for more than rotary frequencies allow, or if no length is known."""
    text = _with_length(path)
    longest = max_rope_length(text)
    if asked:
        if longest is not None and asked > longest:
            raise ConfigError(
                f"max_model_len is {asked}; the rotary frequencies of {path} depend on the length of a "
                f"sequence beyond {longest} tokens",
                param="max_model_len",
            )
        return asked
    length = text.get("max_position_embeddings")
    if not length:
        raise ConfigError(f"{path}/config.json names no max_position_embeddings; set max_model_len")
    return min(int(length), longest or int(length))


def _with_length(path: str | Path) -> Mapping[str, Any]:
    """The part of the configuration that names a length. If none does, the family's default is meant:
    configurations on the hub leave out values that equal the default."""
    config = read_config(path)
    for part in (config, text_config(config)):
        if part.get("max_position_embeddings"):
            return part
    from transformers import AutoConfig

    served = AutoConfig.from_pretrained(path)
    if part := part_of_whole(served.model_type):
        served = getattr(served, part[1].part_key)
    return served.get_text_config().to_dict()
