"""LoRA adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) as PEFT writes them: what a folder holds,
whether it can be served, and how much room a worker has for such. Reads JSON, headers and a hash, without
torch.

An adapter changes linear modules of the language half: y = W x + scaling * B A x. What an adapter says beyond
that is refused by name, and so is an entry of adapter_config.json that is not known here.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.config.checkpoint import read_headers, read_json
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_FLOATS = ("F16", "BF16", "F32")
# Of adapter_config.json. How an adapter was trained, or what its tensors say as well
_SAYS_NOTHING = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "lora_dropout", "target_modules",
    "exclude_modules", "layers_to_transform", "layers_pattern", "task_type", "peft_version",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "arrow_config",
    "runtime_config", "qalora_group_size", "ensure_weight_tying",
}  # fmt: skip
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "alpha_pattern", "rank_pattern", "init_lora_weights",
    "bias",
}  # fmt: skip
# Initial values that leave the base model's weights as they are; others (PiSSA, OLoRA, LoftQ) change them
_PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal")


@dataclass(frozen=True)
class AdaptedModule:
    """rank: rows of A and columns of B."""

    rank: int
    scaling: float
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Adapter:
    """An adapter that may be served.

    digest: of its weights and of what they are multiplied by. It names the adapter everywhere but in the API:
    another content under the same name has another digest.
    modules: by their path in the model that the adapter was trained on.
    """

    name: str
    folder: Path
    digest: str
    modules: Mapping[str, AdaptedModule]

    @property
    def weights(self) -> Path:
        return self.folder / _WEIGHTS


@dataclass(frozen=True)
class AdapterRoom:
    """The adapters of a worker, and its room for them.

    num_slots: how many it holds at once; 0: it has no room.
    rank: the largest of a module.
    adapters: what it begins with. The first is in slot 1.
    is_open: every linear has room, for adapters that are loaded later.
    """

    num_slots: int = 0
    rank: int = 0
    adapters: Sequence[Adapter] = ()
    is_open: bool = False

    @property
    def modules(self) -> str:
        """Says which modules may have an adapter."""
        paths = {module for adapter in self.adapters for module in adapter.modules}
        return "all linears" if self.is_open else " ".join(sorted(paths))


NO_ADAPTERS = AdapterRoom()


def room_for(adapters: Sequence[Adapter]) -> AdapterRoom:
    """Returns room for these and no others."""
    ranks = (module.rank for adapter in adapters for module in adapter.modules.values())
    return AdapterRoom(len(adapters), max(ranks, default=0), adapters)


def adapter_room(args: ClusterArgs) -> AdapterRoom:
    """Reads the adapters of the settings. Raises ConfigError."""
    adapters = read_adapters(args.adapters, args.max_lora_rank)
    if not args.adapters_folder:
        return room_for(adapters)
    if len(adapters) > args.max_loras:
        raise ConfigError(
            f"there are {len(adapters)} adapters, and max_loras is {args.max_loras}", param="max_loras"
        )
    return AdapterRoom(args.max_loras, args.max_lora_rank, adapters, is_open=True)


def read_adapters(folders: Mapping[str, str], max_rank: int) -> list[Adapter]:
    """Returns the adapters in the order of their names. Raises ConfigError, which names the adapter."""
    return [
        read_adapter(name, Path(folder).expanduser(), max_rank) for name, folder in sorted(folders.items())
    ]


def read_adapter(name: str, folder: Path, max_rank: int) -> Adapter:
    """Reads the whole file. Raises ConfigError, which names the adapter."""
    try:
        return _read(name, folder, max_rank)
    except ConfigError as error:
        raise ConfigError(f"adapter '{name}': {error.message}", param="adapters") from error


def folder_within(root: str, path: str) -> Path:
    """Returns the folder that `path` names, relative to `root` or absolute. Raises ConfigError if it, or a
    file of an adapter in it, lies outside of `root`, wherever links lead, or if there is no such folder."""
    top = Path(root).resolve()
    try:
        folder = (top / path).resolve()
        inside = [
            each.resolve().is_relative_to(top) for each in (folder, folder / _CONFIG, folder / _WEIGHTS)
        ]
        is_folder = folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # no path, or links in a circle
        raise ConfigError(f"{path[:200]!r} is no path of a folder") from error
    if not all(inside):
        raise ConfigError("the folder and its files must lie in adapters_folder")
    if not is_folder:
        raise ConfigError(f"there is no folder {path[:200]!r} in adapters_folder")
    return folder


def content_digest(modules: Mapping[str, AdaptedModule], content: Iterable[bytes]) -> str:
    """The digest of an adapter whose file has this content."""
    digest = hashlib.sha256(json.dumps([[path, module.scaling] for path, module in modules.items()]).encode())
    for piece in content:
        digest.update(piece)
    return digest.hexdigest()[:32]


def tensor_names(module: str) -> tuple[str, str]:
    """Returns the names of A and of B in the adapter's file."""
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _read(name: str, folder: Path, max_rank: int) -> Adapter:
    config = read_json(folder / _CONFIG)
    _check(config)
    file = folder / _WEIGHTS
    if not file.is_file():
        raise ConfigError(f"{file} is missing; adapters in other formats are not served")
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, header in read_headers(file).items():
        if (match := _TENSOR.fullmatch(tensor)) is None:
            raise ConfigError(
                f"{file} holds {tensor}: only lora_A and lora_B of linear modules are served (no embeddings, "
                "magnitudes, biases or whole modules)"
            )
        if header.dtype not in _FLOATS or len(header.shape) != 2:
            raise ConfigError(f"{file}: {tensor} is {header.dtype} {header.shape}, not a matrix of floats")
        shapes.setdefault(match["module"], {})[match["side"]] = header.shape
    if not shapes:
        raise ConfigError(f"{file} changes no module")
    modules = {path: _module(path, sides, config, max_rank) for path, sides in sorted(shapes.items())}
    return Adapter(name, folder, content_digest(modules, _pieces_of(file)), modules)


def _pieces_of(file: Path) -> Iterator[bytes]:
    with file.open("rb") as content:
        while piece := content.read(1 << 22):
            yield piece


def _check(config: Mapping[str, Any]) -> None:
    """Raises ConfigError for everything that is not plain LoRA."""
    if (kind := config.get("peft_type")) != "LORA":
        raise ConfigError(f"peft_type {kind!r} is not served, only LORA")
    if (start := config.get("init_lora_weights")) not in _PLAIN_STARTS:
        raise ConfigError(
            f"init_lora_weights {start!r} changes the base model's weights; convert the adapter to plain "
            "LoRA (PEFT: path_initial_model_for_weight_conversion)"
        )
    if (bias := config.get("bias", "none")) != "none":
        raise ConfigError(f"bias {bias!r} is not served")
    unknown = sorted(key for key, value in config.items() if value and key not in _SAYS_NOTHING | _READ)
    if unknown:
        raise ConfigError(f"{_CONFIG} asks for what is not served: {', '.join(unknown)}")
    for key in ("alpha_pattern", "rank_pattern"):
        for pattern in config.get(key) or {}:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{key} {pattern!r} is no regular expression: {error}") from error


def _module(
    path: str, sides: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], max_rank: int
) -> AdaptedModule:
    if sides.keys() != {"A", "B"}:
        raise ConfigError(f"{path} has lora_{next(iter(sides))} alone")
    (rank, inputs), (outputs, columns) = sides["A"], sides["B"]
    said = _of_pattern(config, "rank_pattern", path, config.get("r"))
    if not rank == columns == said:
        raise ConfigError(f"{path}: A has rank {rank}, B {columns}, and {_CONFIG} says {said}")
    if rank > max_rank:
        raise ConfigError(f"{path} has rank {rank}; at most max_lora_rank, {max_rank}, is served")
    alpha = _of_pattern(config, "alpha_pattern", path, config.get("lora_alpha"))
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise ConfigError(f"{path}: lora_alpha is {alpha!r}, no number")
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank  # rsLoRA: Kalajdzievski 2023
    return AdaptedModule(rank, alpha / divisor, inputs, outputs)


def _of_pattern(config: Mapping[str, Any], key: str, path: str, default: Any) -> Any:
    """As PEFT does it: the first pattern that matches the end of the path wins."""
    found = (
        value for pattern, value in (config.get(key) or {}).items() if re.match(rf"(.*\.)?({pattern})$", path)
    )
    return next(found, default)
