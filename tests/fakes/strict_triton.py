"""`triton` in form only, so that launches run where it is not installed. A launch computes nothing. It must
bind its arguments to the kernel's parameters; those that are `tl.constexpr` must be Python numbers, all
others tensors of the simulated GPU, numbers or None.

`with strict_triton() as launches:` imports our kernels again, over this module, and lists their launches.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from tests.fakes.cuda_device import CudaTensor

KERNELS = (
    "cluster.model.cuda.early_kernels",
    "cluster.model.cuda.attention_kernels",
    "cluster.model.cuda.adapter_kernels",
    "cluster.model.cuda.coded_kernels",
    "cluster.model.cuda.draw_kernels",
    "cluster.model.cuda.filter_kernels",
    "cluster.model.cuda.layer_kernels",
    "cluster.model.cuda.packed_kernels",
    "cluster.model.cuda.product_kernels",
    "cluster.model.cuda.tower_kernels",
    "cluster.model.cuda.expert_kernels",
    "cluster.model.cuda.mixer_kernels",
    "cluster.model.cuda.delta_kernels",
    "cluster.model.cuda.channel_kernels",
    "cluster.model.cuda.mamba_kernels",
    "kv_transfer.codecs.triton_codec",
    "kv_transfer.codecs.triton_checksum",
)
# of the compiler, beside the arguments
OPTIONS = frozenset(("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl"))


@dataclass(frozen=True)
class Launch:
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    not_specialised: frozenset[str]
    constants: frozenset[str]

    @property
    def variant(self) -> tuple[object, ...]:
        """Launches of one kernel that differ in this wait for the compiler, each the first time."""
        forms = {name: self._form(name, value) for name, value in {**self.arguments, **self.options}.items()}
        return (self.kernel, *forms.items())

    def _form(self, name: str, value: Any) -> object:
        if isinstance(value, CudaTensor):
            return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
        if name in self.constants or not isinstance(value, int):
            return value if not isinstance(value, float) or name in self.constants else float
        bits = 32 if value < 1 << 31 else 64
        return bits if name in self.not_specialised else (bits, value == 1, value % 16 == 0)


class _Kernel:
    def __init__(
        self, function: Callable[..., None], launches: list[Launch], do_not_specialize: Sequence[str] = ()
    ):
        self._name, self._signature = function.__name__, inspect.signature(function)
        self._launches = launches
        parameters = self._signature.parameters.values()
        self._constants = OPTIONS | {each.name for each in parameters if each.annotation == "tl.constexpr"}
        self._not_specialised = frozenset(do_not_specialize)
        assert self._not_specialised <= set(self._signature.parameters) - self._constants

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert 1 <= len(grid) <= 3 and all(isinstance(size, int) and size > 0 for size in grid)
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS & set(kwargs)}
        arguments = self._signature.bind(*args, **kwargs).arguments
        for name, value in arguments.items():
            is_constant = name in self._constants
            allowed = (bool, int, float) if is_constant else (CudaTensor, int, float, type(None))
            assert isinstance(value, allowed), f"{self._name}: {name} is a {type(value).__name__}"
            if isinstance(value, CudaTensor):  # Triton launches on the thread's device, wherever tensors lie
                assert value.device.index == torch.cuda.current_device(), f"{self._name}: {name}"
        self._launches.append(
            Launch(self._name, grid, arguments, options, self._not_specialised, self._constants)
        )


@contextmanager
def strict_triton() -> Iterator[list[Launch]]:
    launches: list[Launch] = []
    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.__dict__.update(
        jit=lambda function=None, **options: (
            partial(_Kernel, launches=launches, **options)
            if function is None
            else _Kernel(function, launches)
        ),
        cdiv=lambda count, size: -(-count // size),
        language=language,
    )
    language.__dict__["constexpr"] = lambda number: number
    with mock.patch.dict(sys.modules, {"triton": triton, "triton.language": language}), ExitStack() as stack:
        for name in KERNELS:
            package, _, leaf = name.rpartition(".")
            sys.modules.pop(name, None)
            names = importlib.import_module(package).__dict__
            stack.enter_context(mock.patch.dict(names))  # where an import leaves the module as well
            names[leaf] = importlib.import_module(name)
        yield launches
