"""What a half takes of a checkpoint, and how much memory that is, known before a weight is read: from the
model on the meta device and the headers of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from cluster.config.checkpoint import StoredTensor, stored_tensors
from cluster.config.weight_formats import Quantisation
from cluster.model.reading import FilePart

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class HalfSizes:
    """A lower bound of what this rank will hold of a half."""

    config: PreTrainedConfig  # of the whole model
    num_weights: int  # parameters
    num_bytes: int  # of them, in the dtypes in which the model has them


CheckRoom = Callable[[HalfSizes], None]  # raises ConfigError


class HalfFiles:
    """The weight files of a checkpoint, and the parts of them that a half takes."""

    def __init__(self, files: Sequence[Path], quantisation: Quantisation | None):
        """files: of safetensors, whose headers are right; none: nothing is known of the bytes."""
        self._stored = {name: each for file in files for name, each in stored_tensors(file).items()}
        self._quantised = {} if quantisation is None else quantisation.weights

    def taken(self, model: PreTrainedModel, conversions: Sequence[WeightTransform]) -> list[FilePart]:
        """The bytes of the tensors that transformers will read into this model, by its own renaming. model:
        on the meta device, without its other half."""
        codes = {name for weight in self._quantised.values() for name in filter(None, weight[2:])}
        pieces = []
        for name in taken_names(model, conversions, (self._stored.keys() - codes) | self._quantised.keys()):
            weight = self._quantised.get(name)
            stored = (self._stored[each] for each in ([name] if weight is None else filter(None, weight[2:])))
            pieces += [FilePart(each.file, each.begin, each.end) for each in stored]
        return pieces

    def mapped(self) -> dict[str, Tensor] | None:
        """All tensors, as parts of mapped files: nothing is read before it is touched. safetensors' own
        slices touch every tensor when they are taken, which waits for the disk. None: there is a dtype that
        is not known here."""
        if not self._stored or any(each.dtype not in _DTYPES for each in self._stored.values()):
            return None
        files = {each.file for each in self._stored.values()}
        mapping = {
            file: torch.UntypedStorage.from_file(str(file), shared=False, nbytes=file.stat().st_size)
            for file in files
        }
        return {name: _tensor(mapping[each.file], each) for name, each in self._stored.items()}


def sizes_of(model: PreTrainedModel, num_stored: int | None = None) -> HalfSizes:
    """model: on the meta device, with this rank's shares. num_stored: bytes of its share of the files; of
    linears that keep their codes no more is held."""
    own = [own_share(parameter) for parameter in model.parameters()]
    num_bytes = sum(each.nbytes for each in own)
    if num_stored is not None:
        num_bytes = min(num_bytes, num_stored)
    return HalfSizes(model.config, sum(each.numel() for each in own), num_bytes)


def own_share(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _tensor(mapping: torch.UntypedStorage, stored: StoredTensor) -> Tensor:
    part: Any = mapping[stored.begin : stored.end]
    return torch.empty(0, dtype=_DTYPES[stored.dtype]).set_(part).view(stored.shape)


def taken_names(
    model: PreTrainedModel, conversions: Sequence[WeightTransform], names: Iterable[str]
) -> dict[str, str]:
    """By the names of the stored tensors that the model takes, in order: the model's names, where several
    tensors may become one."""
    conversions = deepcopy(conversions)  # some change when they are asked
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    held: dict[str, Any] = model.state_dict()
    prefix = model.base_model_prefix

    taken = {}
    for name in sorted(names, key=dot_natural_key):
        renamed = rename_source_key(name, renamings, converters, prefix, held)[0]
        if name in held or renamed in held:
            taken[name] = name if name in held else renamed
    return taken
