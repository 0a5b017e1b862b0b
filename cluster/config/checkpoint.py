"""What a model folder says about itself. Reads JSON and file headers in milliseconds, without torch and
transformers.

The launcher and the composition ask before anything starts, doors and workers when they load. Every
ConfigError names the file at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cluster.config.families import family_of_type, no_adapter, part_of_whole, why_refused
from cluster.config.quantised import declared, judge
from cluster.config.weight_formats import Header, Quantisation
from cluster.errors import ConfigError
from cluster.types.media import Modality

_MEDIA_PARTS = ("vision_config", "audio_config")
_TEXT_CLASS_ENDINGS = ("ForCausalLM", "LMHeadModel")
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json",
)  # fmt: skip
_PICKLED = "pytorch_model*.bin"
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")  # of PEFT
# Of text configurations in which layers store unlike KV, compress it, or have states in place of it.
_OTHER_KV = (
    "kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "full_attention_interval", "full_attn_idxs",
    "attn_layer_period", "attn_layer_indices", "hybrid_override_pattern", "layers_block_type",
)  # fmt: skip
_IGNORES_STATE = ("jamba", "zamba")  # transformers' Mamba-1 starts each piece of a prompt without a state
_KV_LAYERS = {"full_attention", "sliding_attention"}
_BY_LENGTH = "its rotary frequencies depend on the length of a sequence"
_ROPE_BY_LENGTH = ("longrope", "su", "dynamic")  # "su": longrope's name in older configurations


@dataclass(frozen=True)
class Weights:
    num_parameters: int  # of the whole checkpoint; 0 for a format whose headers are not read here
    quantisation: Quantisation | None = None  # as the files have it; workers hold plain weights
    file_bytes: int = 0


class StoredTensor(NamedTuple):
    file: Path
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]
    begin: int  # its first byte in the file
    end: int  # the byte after its last one


def check_checkpoint(folder: Path) -> tuple[dict[str, Any], Weights]:
    """The configuration of the part that is served, and the weights. Raises ConfigError for everything that
    would make loading fail or give other weights, as far as it can be seen without reading a weight."""
    config = read_config(folder)
    check_family(config)
    weights = check_weights(folder)
    check_tokenizer(folder)
    return config, weights


def read_json(file: Path) -> dict[str, Any]:
    """Raises ConfigError if the file is missing or holds no JSON object."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {file}: {error}", param="model") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} holds no JSON object", param="model")
    return content


def read_config(folder: str | Path) -> dict[str, Any]:
    """The content of config.json, by today's names. Of a checkpoint with a speech generator: the part that is
    served."""
    file = Path(folder) / "config.json"
    config = read_json(file)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{file} names no model_type", param="model")
    if (served := part_of_whole(model_type)) is None:
        older = family_of_type(model_type).older_names
        return {older[name]: value for name, value in config.items() if name in older} | config
    family, whole = served
    part = config.get(whole.part_key)
    if not isinstance(part, dict):
        raise ConfigError(f"{file} has no {whole.part_key}", param="model")
    return {**part, "model_type": family.model_type, "architectures": [whole.part_class]}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model inside a multimodal model; of a text model the whole."""
    part = config.get("text_config")
    return part if isinstance(part, dict) else config


@dataclass(frozen=True)
class LengthLimit:
    num_tokens: int
    reason: str  # what is so beyond it


def length_limit(text: Mapping[str, Any]) -> LengthLimit | None:
    """The longest sequence that is computed as `generate` computes it; None: any is. `text`: configuration of
    a language model."""
    limits = [LengthLimit(length, _BY_LENGTH) for length in _rope_lengths(text)]
    if (chunk := text.get("attention_chunk_size")) is not None:
        limits.append(LengthLimit(chunk, "its attention is divided into chunks"))
    if text.get("attn_temperature_tuning"):
        limits.append(LengthLimit(text["floor_scale"] - 1, "its queries are scaled by their positions"))
    return min(limits, key=lambda limit: limit.num_tokens, default=None)


def _rope_lengths(text: Mapping[str, Any]) -> list[int]:
    """Returns the lengths beyond which rotary frequencies depend on the sequence's length: a token's K would
    depend on the tokens after it, and on other sequences of its step."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    lengths = []
    for part in (rope, *(part for part in rope.values() if isinstance(part, dict))):
        form = part.get("rope_type") or part.get("type")
        if form in _ROPE_BY_LENGTH:
            key, longest = "original_max_position_embeddings", text.get("max_position_embeddings")
            original = part.get(key) or text.get(key)
            lengths.append(longest if form == "dynamic" else original or longest)
    return [length for length in lengths if length]


def placeholder_ids(config: Mapping[str, Any]) -> dict[Modality, int]:
    """Ids of the tokens that stand for embedding rows, as `read_config` gives them."""
    ids = {
        modality: config.get(f"{modality}_token_id", config.get(f"{modality}_token_index"))
        for modality in Modality
    }
    return {modality: token_id for modality, token_id in ids.items() if token_id is not None}


def takes_media(config: Mapping[str, Any]) -> bool:
    """Whether this model needs an encode pool."""
    return bool(family_of_type(config["model_type"]).modalities)


def check_family(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a model type or class that cannot be served, as far as the names show it."""
    name = config["model_type"]
    if reason := why_refused(name) or why_not_computed(name, text_config(config)):
        _refuse(name, reason)
    if family_of_type(name).modalities:
        return
    if config.get("is_encoder_decoder"):
        _refuse(name, "it is an encoder-decoder model; only decoder-only language models are served")
    if any(part in config for part in _MEDIA_PARTS):
        _refuse(name, no_adapter())
    class_name = (config.get("architectures") or [""])[0]
    if not class_name.endswith(_TEXT_CLASS_ENDINGS):
        _refuse(name, f"its class '{class_name}' is not a causal language model")


def why_not_computed(model_type: str, text: Mapping[str, Any]) -> str | None:
    """The reason for refusing what layers do by this configuration of a language model; None: it says nothing
    against it."""
    if (text.get("n_recurrent_loops") or 1) > 1:
        return "its layers run several times for a token, with other KV each time (n_recurrent_loops)"
    if text.get("use_bidirectional_attention") not in (None, False, "vision"):
        return "all its tokens see each other in both directions (use_bidirectional_attention)"
    if model_type in _IGNORES_STATE:
        return "transformers' layers ignore the state that a piece of a prompt begins with"
    return None


def check_tokenizer(folder: Path) -> None:
    """Raises ConfigError if transformers would make an empty tokenizer or fail on a broken file."""
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
    """Checks every header and size, not the bytes inside tensors. Raises ConfigError for a file that is
    missing, truncated or in another format, for weights that are not plain numbers and would not become
    such, and for an adapter."""
    check_no_adapter(folder)
    files = weight_files(folder)
    if not files:
        if quantisation := declared(folder, *_with_part(folder)):
            what = f"{quantisation} in pickled files, not in safetensors"
            raise ConfigError(f"{folder} has {what}: use the unquantised checkpoint", param="model")
        return Weights(0)
    headers = {name: header for file in files for name, header in read_headers(file).items()}
    quantisation = check_headers(folder, headers)
    num_bytes = sum(file.stat().st_size for file in files)
    return Weights(_num_parameters(headers, quantisation), quantisation, num_bytes)


def check_headers(folder: Path, headers: Mapping[str, Header]) -> Quantisation | None:
    """How these tensors are quantised; None: they are plain. Raises ConfigError for what is not served."""
    return judge(folder, *_with_part(folder), headers)


def check_configuration(folder: Path) -> None:
    """`check_checkpoint` of a folder that has no weights and no tokenizer yet. Raises ConfigError."""
    check_no_adapter(folder)
    if (folder / "config.json").is_file():
        check_family(read_config(folder))
        declared(folder, *_with_part(folder))


def _with_part(folder: Path) -> tuple[dict[str, Any], str | None]:
    """All of config.json, and the key of the part that is served; None: the whole is."""
    config = read_json(folder / "config.json")
    served = part_of_whole(str(config.get("model_type")))
    return config, None if served is None else served[1].part_key


def check_no_adapter(folder: Path) -> None:
    """Raises ConfigError for a folder with an adapter of PEFT: with the base model's weights next to it the
    adapter would be left out."""
    file = next((file for name in _ADAPTER_FILES if (file := folder / name).is_file()), None)
    if file is not None:
        base = read_json(file).get("base_model_name_or_path") if file.suffix == ".json" else None
        of = f" of {base}" if base else ""
        raise ConfigError(
            f"{file} is an adapter{of} (LoRA or another of PEFT), not a model: give the base model as "
            "`model`, and a folder with this file under `adapters`",
            param="model",
        )


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a checkpoint, in transformers' order of preference. Empty for a checkpoint in a
    format without headers."""
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


def read_headers(file: Path) -> dict[str, Header]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.offset_keys()}
            return {name: Header(part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        raise ConfigError(
            f"{file} ({size:,} bytes) is no whole safetensors file: {error}", param="model"
        ) from error


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """All tensors of a safetensors file whose header is known to be right (`check_weights`)."""
    with file.open("rb") as content:
        length = int.from_bytes(content.read(8), "little")
        entries = json.loads(content.read(length))
    entries.pop("__metadata__", None)
    first = 8 + length
    return {
        name: StoredTensor(
            file, entry["dtype"], tuple(entry["shape"]), *(first + offset for offset in entry["data_offsets"])
        )
        for name, entry in entries.items()
    }


def kv_row_bytes(config: Mapping[str, Any], item_bytes: int) -> int:
    """Bytes of one token's KV in all layers; 0 if the configuration does not say it directly."""
    text = text_config(config)
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    layers, kv_heads = text.get("num_hidden_layers"), text.get("num_key_value_heads") or heads
    if not (heads and width and layers and kv_heads) or any(map(text.get, _OTHER_KV)):
        return 0
    if not _KV_LAYERS.issuperset(text.get("layer_types") or ()):
        return 0
    return 2 * layers * kv_heads * (text.get("head_dim") or width // heads) * item_bytes


def _num_parameters(headers: Mapping[str, Header], quantisation: Quantisation | None) -> int:
    """The parameters as the plain model has them."""
    if quantisation is None:
        return sum(math.prod(header.shape) for header in headers.values())
    replaced = set(quantisation.replaced)
    kept = sum(math.prod(header.shape) for name, header in headers.items() if name not in replaced)
    return kept + sum(math.prod(weight.shape) for weight in quantisation.weights.values())


def _refuse(name: str, reason: str) -> None:
    raise ConfigError(f"model type '{name}' is not supported: {reason}", param="model")
