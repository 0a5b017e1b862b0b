"""Where packed weights come from: packed now, into memory of this process (`FreshWeights`), or packed before,
and mapped from a file (`MappedWeights`). `RecordedWeights` packs and remembers what such a file needs.

A search for native replacements of a model's modules asks its source for each module. A fresh source builds
the candidates and compares them with the module. A mapped source builds the one that passed the comparison
when the file was written; the module's own matrices are not read, they are on the meta device.

`PackedWeights` asks the source for the memory of each matrix. Runs on the thread that loads the model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from cluster.kvcache.memory import on_huge_pages
from cluster.model.layers.search import Compared, Replacement, ReplacementSource, Settings

ALIGNMENT = 64  # of a matrix, in bytes: a cache line


@dataclass(frozen=True)
class Matrix:
    """A packed matrix, as the kernels read it. scales and sums: of INT8 weights, else empty."""

    packed: Tensor  # [bytes] uint8
    scales: Tensor  # [packed outputs] float32
    sums: Tensor  # [packed outputs] int32


class WeightSource(ReplacementSource, Protocol):
    def matrix(self, num_bytes: int, num_scales: int, pack: Callable[[Matrix], None]) -> Matrix:
        """The next matrix of the replacement that is being built. `pack` fills zeroed memory."""
        ...


class StaleWeights(Exception):
    """A file of packed weights does not fit the model. The caller packs again."""


class Arena:
    """Successive pieces of huge pages: with 4 KiB pages a small batch is 5 to 12 % slower (AMD EPYC, AVX-512
    BF16, 2 cores, interleaved). Pieces are not reused: memory lives as long as the tensors in it. Any
    thread."""

    def __init__(self, num_bytes: int = 64 << 20):
        """num_bytes: that are allocated at a time."""
        self._num_bytes = num_bytes
        self._room = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, zeros."""
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            if padded > self._room.numel():
                self._room = on_huge_pages(max(padded, self._num_bytes))
            piece, self._room = self._room[:num_bytes], self._room[padded:]
        return piece

    def copy(self, values: Tensor) -> Tensor:
        """Returns these values in a piece."""
        piece = self.take(values.numel() * values.element_size()).view(values.dtype).view(values.shape)
        return piece.copy_(values)


class FreshWeights(Compared):
    """Packs into memory of this process."""

    def __init__(self) -> None:
        self._arena = Arena()

    def matrix(self, num_bytes: int, num_scales: int, pack: Callable[[Matrix], None]) -> Matrix:
        packed = self._arena.take(num_bytes)
        matrix = Matrix(packed, torch.zeros(num_scales), torch.zeros(num_scales, dtype=torch.int32))
        pack(matrix)
        return matrix


@dataclass(frozen=True)
class Replaced:
    """A module that was replaced: how, and its matrices in the order in which they were asked for."""

    settings: Settings
    matrices: Sequence[Matrix]


class RecordedWeights:
    """Packs as `FreshWeights` does, and keeps what a file needs to give the same model again: the matrices,
    and every parameter that is not one of them (embeddings, norms, biases, modules that stay)."""

    def __init__(self, model: nn.Module, notes: Mapping[str, Any]) -> None:
        """model: the half as it was loaded, before a module is replaced. notes: more that the file keeps."""
        self.replaced: dict[str, Replaced] = {}
        # shape and dtype of parameters that exist in packed form only
        self.absent: dict[str, tuple[Sequence[int], torch.dtype]] = {}
        self.notes = notes
        self.is_complete = True  # False: something was packed outside of a named module
        self._fresh = FreshWeights()
        self._names = _names(model)
        self._matrices: list[Matrix] | None = None  # of the candidate that is being built
        self._packed: set[str] = set()
        self._parameters: dict[int, tuple[nn.Parameter, list[str]]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._parameters.setdefault(id(parameter), (parameter, []))[1].append(name)

    @property
    def parameters(self) -> list[tuple[list[str], Tensor]]:
        """What is kept as it is, with all names that share it."""
        return [(names, parameter.detach()) for parameter, names in self._parameters.values()]

    def matrix(self, num_bytes: int, num_scales: int, pack: Callable[[Matrix], None]) -> Matrix:
        matrix = self._fresh.matrix(num_bytes, num_scales, pack)
        if self._matrices is None:
            self.is_complete = False
        else:
            self._matrices.append(matrix)
        return matrix

    def replacement(
        self, module: nn.Module, candidates: Iterable[Settings], build: Callable[[Settings], Replacement],
        agrees: Callable[[Replacement, Settings], bool],
    ) -> Replacement | None:  # fmt: skip
        matrices: list[Matrix] = []

        def build_noting(settings: Settings) -> Replacement:
            matrices.clear()
            self._matrices = matrices
            try:
                return build(settings)
            finally:
                self._matrices = None

        def agrees_noting(candidate: Replacement, settings: Settings) -> bool:
            if agreed := agrees(candidate, settings):
                self._note(module, Replaced(settings, matrices))
            return agreed

        return self._fresh.replacement(module, candidates, build_noting, agrees_noting)

    def _note(self, module: nn.Module, replaced: Replaced) -> None:
        name = self._names.get(module)
        if name is None:
            self.is_complete = False
            return
        self.replaced[name] = replaced
        for own, leaf, parameter in self._own_parameters(module):
            if parameter.ndim < 2:
                continue
            self._packed.add(f"{own}.{leaf}")
            _, names = self._parameters[id(parameter)]
            if self._packed.issuperset(names):  # not also the weight of a module that stays
                del self._parameters[id(parameter)]
                self.absent.update((name, (parameter.shape, parameter.dtype)) for name in names)

    def _own_parameters(self, module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
        """Parameters below `module`, with the names that their modules had at first."""
        for part in module.modules():
            for leaf, parameter in part.named_parameters(recurse=False):
                yield self._names[part], leaf, parameter


@dataclass
class MappedWeights:
    """The weights of a half in a mapped file, read only. Serves one model."""

    parameters: Sequence[tuple[list[str], Tensor]]  # as `RecordedWeights.parameters`
    absent: Mapping[str, tuple[Sequence[int], torch.dtype]]  # shape and dtype of what exists packed only
    replaced: Mapping[str, Replaced]
    notes: Mapping[str, Any]
    evictable_bytes: int  # which the kernel may drop and read again; 0: the memory is locked
    _names: weakref.WeakKeyDictionary[nn.Module, str] = field(default_factory=weakref.WeakKeyDictionary)
    _left: list[Matrix] = field(default_factory=list)  # of the replacement that is being built

    def name_modules(self, model: nn.Module) -> None:
        self._names = _names(model)

    def matrix(self, num_bytes: int, num_scales: int, pack: Callable[[Matrix], None]) -> Matrix:
        matrix = self._left.pop(0) if self._left else None
        if matrix is None or (matrix.packed.numel(), matrix.scales.numel()) != (num_bytes, num_scales):
            raise StaleWeights("a packed matrix has another size than the model needs")
        return matrix

    def replacement(
        self, module: nn.Module, candidates: Iterable[Settings], build: Callable[[Settings], Replacement],
        agrees: Callable[[Replacement, Settings], bool],
    ) -> Replacement | None:  # fmt: skip
        replaced = self.replaced.get(self._names.get(module, ""))
        if replaced is None:
            return None
        self._left = list(replaced.matrices)
        replacement = build(replaced.settings)
        if self._left:
            raise StaleWeights(f"{len(self._left)} packed matrices more than the model needs")
        return replacement


def _names(model: nn.Module) -> weakref.WeakKeyDictionary[nn.Module, str]:
    return weakref.WeakKeyDictionary({module: name for name, module in model.named_modules()})
