"""The instruction sets that servers may use: all that the CPU has, or AVX2 as on a CPU without AVX-512. Pure.

Each library has its own limit:

* our kernels: the setting `cpu_kernels`;
* torch, oneDNN and MKL: environment variables, in every Python server;
* vllm's kernels and the code that torch.compile makes: `avx2/sitecustomize.py` and TORCHINDUCTOR_CPP_MARCH;
* llama.cpp: a second build (`install_peers.sh`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NATIVE, AVX2 = "native", "avx2"
ISAS = (NATIVE, AVX2)
_HOOK = Path(__file__).parent / "avx2"
_TORCH = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}


def cluster_args(isa: str) -> dict[str, Any]:
    """Arguments of our cluster."""
    return {} if isa == NATIVE else {"cpu_kernels": isa}


def torch_environment(isa: str) -> Mapping[str, str]:
    return {} if isa == NATIVE else _TORCH


def vllm_environment(isa: str, cache: Path) -> Mapping[str, str]:
    """`cache`: a folder for compiled code, which must not be shared by instruction sets."""
    environment = {
        "VLLM_CACHE_ROOT": str(cache / isa),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / isa / "inductor"),
    }
    if isa == NATIVE:
        return environment
    return {**environment, **_TORCH, "PYTHONPATH": str(_HOOK), "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3"}


def llama_server(folder: Path, isa: str) -> Path:
    """The server for this instruction set in llama.cpp's folder."""
    return folder / f"llama-server-{isa}"
