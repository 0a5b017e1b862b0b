"""Whether the memory that a worker needs is available, shown as arithmetic. Checked twice: with a lower bound
before a weight is read, and after the weights are loaded and before any block memory is allocated. A
configuration that cannot work fails at the start, and not at the first long prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from cluster.config.machine import available_memory
from cluster.errors import ConfigError

MIB = 1 << 20
LIBRARIES_PART = 64  # of a GPU's memory: 1.25 GiB of 80
PATCHES_PER_ROW = 4  # merged 2 by 2 in most families; an upper bound for the others
EXAMPLES: Mapping[str, int] = {  # prompt and answer, in tokens
    "text of 1,024 + 256 tokens": 1_280,
    "one image of 256 tokens, 64 + 256 of text": 576,
    "video of 7,680 tokens, 64 + 256 of text": 8_000,
}


@dataclass(frozen=True)
class MemoryPlan:
    """All fields are bytes, except the counts."""

    weights: int
    step: int  # the largest intermediate tensors of one step
    features: int  # embeddings: the memory that encoders write into, the cache in an encoder
    kv_per_token: int = 0
    num_kv_tokens: int = 0  # 0 in encoders
    wire: int = 0  # KV that travels coded
    tier: int = 0  # KV that the first tier of the cache has lost, if it lies in the same memory
    inputs: int = 0  # preprocessed media that wait for the next calls of an encoder
    graphs: int = 0  # recorded steps (`cluster/model/cuda/graphs.py`), or calls of encoders
    encoder: int = 0  # what calls of an encoder in the same process will take
    libraries: int = 0  # of a GPU: what is allocated later, and not by torch
    is_loaded: bool = True  # False: memory for the weights is wanted, too

    @property
    def wanted(self) -> int:
        """Bytes beside what is loaded."""
        beside = self.late + self.step + self.tier + self.inputs + self.graphs + self.encoder + self.libraries
        return beside if self.is_loaded else beside + self.weights

    @property
    def late(self) -> int:
        """The part that lies in block memories (`LateMemory`)."""
        return self.kv_per_token * self.num_kv_tokens + self.features + self.wire

    def check(self, available: int) -> None:
        """Raises ConfigError, with the arithmetic, if less than `wanted` is available."""
        if self.wanted > available:
            raise ConfigError(f"this worker needs more memory than there is:\n{self.describe(available)}")

    def blocks_within(self, block_tokens: int, share: float, total: int, used: int, available: int) -> int:
        """How many blocks of KV fit beside everything else if this process, which uses `used` bytes of the
        device's `total` now, may use a share of them. Raises ConfigError, with the arithmetic, if that is no
        room for one sequence."""
        left = min(share * total - max(used, self.weights), available) - self.wanted
        num_blocks = int(left // (block_tokens * self.kv_per_token))
        if num_blocks < 2:
            what = f"memory_share {share:g} of {_mib(total).strip()} leaves no room for KV"
            raise ConfigError(f"{what}:\n{self.describe(available)}", param="memory_share")
        return num_blocks

    def describe(self, available: int) -> str:
        kv = f"  = {self.num_kv_tokens:,} tokens × {self.kv_per_token:,} bytes"
        # what, bytes, and a remark; parts that a worker does not have are left out
        parts = (
            ("weights", self.weights, "  (loaded)" if self.is_loaded else "  (at least)"),
            ("KV cache", self.kv_per_token * self.num_kv_tokens if self.num_kv_tokens else None, kv),
            ("embeddings", self.features, ""),
            ("coded KV", self.wire or None, ""),
            ("KV, second tier", self.tier or None, ""),
            ("media, prepared", self.inputs or None, ""),
            ("one step", self.step, "  (estimate; on a GPU what one took, if more)"),
            ("recorded steps", self.graphs or None, "  (measured; of encoders, at most)"),
            ("calls of encoders", self.encoder or None, ""),
            ("libraries", self.libraries or None, "  (assumption)"),
            ("wanted", self.wanted, "  beside the weights" if self.is_loaded else ""),
            ("available", available, ""),
        )
        lines = [f"  {what:<18} {_mib(size)}{remark}" for what, size, remark in parts if size is not None]
        for what, num_tokens in EXAMPLES.items() if self.num_kv_tokens else ():
            lines.append(f"  fits in the cache  {self.num_kv_tokens // num_tokens:,} × {what}")
        return "\n".join(lines)


def step_bytes(num_tokens: int, hidden_size: int, vocab_size: int, num_sequences: int, itemsize: int) -> int:
    """The widest tensors of a layer are about four times the hidden size, and about three of them exist at
    once, with one copy of the hidden states in float32. The logits are float32, twice. An upper estimate for
    the families that are supported, not a measurement. Scores of attention and rows of experts come on top
    (`LanguageModel.score_bytes`, `expert_bytes`)."""
    return num_tokens * hidden_size * (12 * itemsize + 4) + 2 * 4 * num_sequences * vocab_size


def encoder_step_bytes(num_rows: int, config: PreTrainedConfig, itemsize: int) -> int:
    """The same for an encoder call with `num_rows` embedding rows, each merged from `PATCHES_PER_ROW` patches
    or frames, by the widest of the model's encoders."""
    encoders = (getattr(config, name, None) for name in ("vision_config", "audio_config"))
    names = ("hidden_size", "embed_dim", "d_model")  # names that families use for an encoder's width
    widths = [getattr(encoder, name, 0) for encoder in encoders if encoder is not None for name in names]
    return step_bytes(num_rows * PATCHES_PER_ROW, max(widths), 0, 0, itemsize)


def available_bytes(device: torch.device, evictable_bytes: int = 0) -> int:
    """Bytes that can be allocated on the device now. evictable_bytes: mapped weights that are not locked in
    memory; the kernel counts them as available. Locked ones count once per host, however many workers map
    them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return available_memory() - evictable_bytes


def gpu_bytes(device: torch.device) -> tuple[int, int]:
    """The memory of a GPU, and what this process has taken of it for tensors."""
    return torch.cuda.mem_get_info(device)[1], torch.cuda.memory_reserved(device)


def library_bytes(device: torch.device) -> int:
    """What kernels that are loaded later, their stacks, and transports take beside torch's memory. An
    assumption: other workers on the device make it hard to measure. 0 on the CPU."""
    return torch.cuda.mem_get_info(device)[1] // LIBRARIES_PART if device.type == "cuda" else 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:10,.1f} MiB"
