"""What a model folder says about itself, read as JSON and file headers, in milliseconds: no torch, no transformers.

All processes take these answers from here: the launcher and the composition before anything starts, doors and workers when they
load. Every ConfigError names the file at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError

# Model types that take media and have an adapter in cluster/model/families.py; any other type is text or refused.
MEDIA_FAMILIES = frozenset({
    "audioflamingo3", "gemma3", "glmasr", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3",
    "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe",
    "smolvlm", "voxtral",
})  # fmt: skip
NOT_SERVED = {"voxtral": "mistral-common makes its prompts, not a chat template"}
THINKER_CLASSES = {  # checkpoints that also hold a speech generator, which is not served: the class of the part that is
    "qwen2_5_omni": "Qwen2_5OmniThinkerForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
_MEDIA_PARTS = ("vision_config", "audio_config")
_TEXT_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
_PICKLED = "pytorch_model*.bin"


@dataclass(frozen=True)
class Weights:
    num_parameters: int  # of the whole checkpoint; 0 for files whose headers are not read here


def check_checkpoint(folder: Path) -> tuple[dict[str, Any], Weights]:
    """The configuration of the part that is served, and its weights. Raises ConfigError for what loading would fail on, as far as
    that shows without reading a weight."""
    config = read_config(folder)
    check_family(config)
    check_tokenizer(folder)
    return config, check_weights(folder)


def read_json(file: Path) -> dict[str, Any]:
    """Raises ConfigError for a file that is missing or no JSON object."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object", param="model")
    return content


def read_config(folder: str | Path) -> dict[str, Any]:
    """config.json; of a checkpoint with a speech generator the part of it that is served."""
    file = Path(folder) / "config.json"
    config = read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{file} names no model_type", param="model")
    if model_type in THINKER_CLASSES:
        thinker = config.get("thinker_config")
        if not isinstance(thinker, dict):
            raise ConfigError(f"{file} has no thinker_config", param="model")
        return {
            **thinker,
            "model_type": f"{model_type}_thinker",
            "architectures": [THINKER_CLASSES[model_type]],
        }
    return config


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the language model inside a multimodal model; of a text model the whole."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


def takes_media(config: Mapping[str, Any]) -> bool:
    """Whether this model needs an encode pool."""
    return config["model_type"] in MEDIA_FAMILIES


def check_family(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a model type or class that is refused by name, as far as the names tell."""
    name = config["model_type"]
    if name in NOT_SERVED:
        _refuse(name, NOT_SERVED[name])
    if name in MEDIA_FAMILIES:
        return
    if config.get("is_encoder_decoder"):
        _refuse(name, "it is an encoder-decoder model; only decoder-only language models are served")
    if any(part in config for part in _MEDIA_PARTS):
        _refuse(
            name,
            f"it is multimodal and has no adapter; model types with one: {', '.join(sorted(MEDIA_FAMILIES))}",
        )
    class_name = (config.get("architectures") or [""])[0]
    if not class_name.endswith(_TEXT_CLASS_ENDINGS):
        _refuse(name, f"its class '{class_name}' is not a causal language model")


def check_tokenizer(folder: Path) -> None:
    """Raises ConfigError where transformers would make an empty tokenizer, or fail on a broken file."""
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"{folder} has no tokenizer (tokenizer.json, tokenizer.model, … are missing)", param="model"
        )
    file = folder / "tokenizer.json"
    if file.is_file():
        from tokenizers import Tokenizer

        try:
            Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"cannot read {file}: {error}", param="model") from error


def check_weights(folder: Path) -> Weights:
    """Looks at every header and size; bytes inside tensors are not compared with anything. Raises ConfigError for a file that is
    missing, cut short or none of the format."""
    files = _weight_files(folder)
    return Weights(sum(_count_parameters(file) for file in files))


def _weight_files(folder: Path) -> list[Path]:
    """In transformers' order of preference; empty for a checkpoint in a format that has no headers."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        if any(folder.glob(_PICKLED)):
            return []
        raise ConfigError(
            f"{folder} has no weights: {whole.name} and {index.name} are missing", param="model"
        )
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise ConfigError(f"{index} has no weight_map", param="model")
    files = [folder / name for name in sorted(set(names.values()))]
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file} is missing; {index.name} names it", param="model")
    return files


def _count_parameters(file: Path) -> int:
    from safetensors import SafetensorError, safe_open

    count = 0
    try:
        with safe_open(file, framework="numpy") as tensors:
            for name in tensors.offset_keys():
                count += math.prod(tensors.get_slice(name).get_shape())
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise ConfigError(
            f"{file} ({size:,} bytes) is no whole safetensors file: {error}", param="model"
        ) from error
    return count


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"model type '{name}' is not supported: {reason}", param="model")
