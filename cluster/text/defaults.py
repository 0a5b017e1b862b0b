"""How the model's own folder wants it to be drawn and stopped (`generation_config.json`, then `config.json`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from cluster.errors import ConfigError


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Values for fields that a request leaves out."""

    temperature: float = 1.0  # 0 when the model says `do_sample: false`
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None  # None: whatever the context has room for
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> GenerationDefaults:
        generation = _read(Path(path) / "generation_config.json")
        config = _read(Path(path) / "config.json")
        eos = generation.get("eos_token_id")
        if eos is None:
            eos = config.get("eos_token_id", config.get("text_config", {}).get("eos_token_id"))
        temperature = generation.get("temperature", 1.0)
        return cls(
            temperature=0.0 if generation.get("do_sample") is False else float(temperature),
            top_p=float(generation.get("top_p") or 1.0),
            top_k=int(generation.get("top_k") or 0),
            min_p=float(generation.get("min_p") or 0.0),
            max_tokens=generation.get("max_new_tokens"),
            eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        )


def context_length(path: str | Path) -> int:
    """Tokens of prompt and answer that the model was made for. Raises ConfigError when its config does not say."""
    config = _read(Path(path) / "config.json")
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            return int(part["max_position_embeddings"])
    raise ConfigError(f"{path}/config.json names no max_position_embeddings; set max_model_len")


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}
