"""Which attention serves a model on this GPU. Our Triton kernels do, if they give the numbers of plain
softmax for decode steps and for long chunks of prompts of the model's shape. A library serves long chunks
instead (`attention_cuda` says which) if it gives these numbers as well, in less time than ours and all other
libraries. The log says all that was found.

Runs once, when the model is loaded, on the loading thread. Takes seconds, most of it for compiling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from cluster.config.machine import has_triton
from cluster.model.attention import AttentionBackend, AttentionShape, ModelAttention
from cluster.model.attention_cuda import CudaAttention, library_can
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.libraries import FlashLibrary, installed
from cluster.model.kv_format import LayerCache, layer_cache
from cluster.model.layers.trial import RandomStep, median_s

logger = logging.getLogger(__name__)

# (computed, new) tokens of each sequence
DECODES: tuple[tuple[tuple[int, int], ...], ...] = (
    tuple((1000 + 7 * i, 1) for i in range(8)),
    ((16_000, 1), (16_383, 1)),  # too few sequences to fill a GPU, unless their contexts are split
)
CHUNKS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 1500), (0, 548)),  # whole prompts
    ((2048, 1024),),  # its KV is read from blocks
)
NUM_ROUNDS = 5
# Of the norm of what plain softmax gives; bfloat16 has 8 bits.
TOLERANCES = {torch.bfloat16: 0.03, torch.float16: 0.03, torch.float32: 1e-4}


def choose(
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    fallback: ModelAttention,
    libraries: Callable[[], Sequence[tuple[str, FlashLibrary]]] = lambda: tuple(installed()),
) -> ModelAttention:
    """The fallback, if our kernels fail: steps by it are not recorded. Raises RuntimeError if the device
    broke in the attempt."""
    ours = _chosen(device, dtype, shape, fallback, libraries) if has_triton() else None
    torch.cuda.empty_cache()  # what torch keeps would count as used when the KV cache is planned
    if ours is None:
        logger.warning("attention: plain torch computes it, several times slower than our kernels would")
        return fallback
    return ours


def _chosen(
    device: torch.device, dtype: torch.dtype, shape: AttentionShape, fallback: ModelAttention,
    libraries: Callable[[], Sequence[tuple[str, FlashLibrary]]],
) -> CudaAttention | None:  # fmt: skip
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    ours = CudaAttention(fallback, processors)
    answers = [TrialStep(device, dtype, shape, sizes) for sizes in DECODES]
    prompts = [TrialStep(device, dtype, shape, sizes) for sizes in CHUNKS]
    answers_s = _seconds(answers, "answers", "our kernels", ours)
    best_s = _seconds(prompts, "long prompt chunks", "our kernels", ours)
    if answers_s is None or best_s is None:
        return None
    best, best_name, num_right = None, "our kernels", 1
    # libraries compute in 16 bits only
    for name, library in libraries() if dtype != torch.float32 and prompts[0].suits_libraries else ():
        backend = CudaAttention(fallback, processors, library)
        seconds = _seconds(prompts, "long prompt chunks", name, backend)
        num_right += seconds is not None
        if seconds is not None and seconds < best_s:
            best, best_name, best_s = library, name, seconds
    logger.info("attention: long prompt chunks by %s, the fastest of %d", best_name, num_right)
    return CudaAttention(fallback, processors, best)


def _seconds(steps: Sequence[TrialStep], what: str, name: str, backend: AttentionBackend) -> float | None:
    """None: it fails, or gives wrong numbers."""
    try:
        seconds = [step.seconds(backend) for step in steps]
    except Exception as error:  # libraries raise what they like: it is not taken, and the log says why
        torch.cuda.synchronize(steps[0].device)  # raises if the device itself is broken
        logger.warning("attention: %s: left out for %s: %s", name, what, error)
        return None
    times = " and ".join(f"{1e6 * each:.1f}" for each in seconds)
    logger.info("attention: %s: %s us for %s", name, times, what)
    return sum(seconds)


class TrialStep:
    """One layer's attention over random KV."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: AttentionShape,
        sizes: Sequence[tuple[int, int]],
    ):
        generator, self._layer = torch.Generator().manual_seed(0), shape.layer
        self._step = RandomStep(shape.layout, sizes, device, dtype, generator)
        self._cache: LayerCache = layer_cache(self._step.memory, 0)
        self.device = device
        self.suits_libraries = library_can(self._layer, self._cache)
        slots, width = self._step.slots, self._cache.key.row_shape[1]
        query = torch.randn(len(slots), shape.num_heads, width, generator=generator)
        self._query, self._tolerance = query.to(device, dtype), TOLERANCES[dtype]
        self._new = self._cache.key.rows(slots, dtype), self._cache.value.rows(slots, dtype)
        # not by the worker's own backend, which would keep scratch for the long decode
        self._expected = self._attend(TorchAttention()).float()

    def _attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(self._step.batch(), self._layer, self._query, *self._new, self._cache)

    def seconds(self, backend: AttentionBackend) -> float:
        """The median of some rounds. Raises ValueError for numbers that are not those of plain softmax."""
        error = float((self._attend(backend).float() - self._expected).norm() / self._expected.norm())
        if not error <= self._tolerance:  # also for NaN
            raise ValueError(f"its results are wrong by {error:.1%}")
        return median_s(lambda: self._attend(backend), self.device, NUM_ROUNDS)
