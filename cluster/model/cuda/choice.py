"""Which attention serves a model on this GPU: each library that can be imported, and our Triton kernels,
computes a decode step and a chunk of a prompt of the model's shape. What fails, or gives other numbers than
plain softmax, is left out; of the others the fastest is taken. The log says all that was found.

Runs once, when the model is loaded, on the loading thread. Takes seconds, most of it for compiling.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import AttentionBackend, AttentionShape, PagedBatch
from cluster.model.attention_flash import FlashAttention
from cluster.model.cuda import decode_attention
from cluster.model.cuda.libraries import FlashLibrary, installed
from cluster.model.kv_format import LayerCache, layer_cache

logger = logging.getLogger(__name__)

DECODE = tuple((1000 + 7 * i, 1) for i in range(8))  # (computed, new) tokens of each sequence
CHUNK = ((512, 256), (0, 100))
NUM_ROUNDS = 5
TOLERANCE = 0.03  # of the norm of what plain softmax gives; bfloat16 has 8 bits


def choose(
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    fallback: AttentionBackend,
    libraries: Callable[[], Sequence[tuple[str, FlashLibrary]]] = lambda: tuple(installed()),
) -> AttentionBackend:
    """The fallback, if all else fails: decode steps by it are not recorded. Raises RuntimeError if the device
    broke in the attempt."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    steps = [_Step(device, dtype, shape, sizes) for sizes in (DECODE, CHUNK)]
    expected = [step.attend(fallback) for step in steps]

    def tried(name: str, backend: AttentionBackend) -> float | None:
        try:
            seconds = [step.seconds(backend, right) for step, right in zip(steps, expected, strict=True)]
        except Exception as error:  # libraries raise what they like: it is not taken, and the log says why
            torch.cuda.synchronize(device)  # raises if the device itself is broken
            logger.warning("attention: %s is left out: %s", name, error)
            return None
        logger.info("attention: %s takes %.1f and %.1f us", name, *(1e6 * each for each in seconds))
        return sum(seconds)

    found: list[tuple[float, str, AttentionBackend]] = []

    def add(name: str, backend: AttentionBackend) -> bool:
        seconds = tried(name, backend)
        if seconds is not None:
            found.append((seconds, name, backend))
        return seconds is not None

    has_kernels = decode_attention.is_available() and add(
        "our Triton kernels", FlashAttention(fallback, None, True, processors)
    )
    for name, library in libraries():
        add(name, FlashAttention(fallback, library, has_kernels, processors))
    if not found:
        logger.warning("attention: plain torch computes it, several times slower than a kernel would")
        return fallback
    _, name, backend = min(found, key=lambda each: each[0])
    logger.info("attention: %s is the fastest of %d for this model", name, len(found))
    return backend


class _Step:
    """One layer's attention over random KV."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        shape: AttentionShape,
        sizes: Sequence[tuple[int, int]],
    ):
        contexts, size = [old + new for old, new in sizes], shape.block_size
        per_sequence = -(-max(contexts) // size)
        self._layer = shape.layer
        kv = BlockMemory(shape.layout, per_sequence * len(sizes), device)
        tables = torch.arange(kv.num_blocks).view(len(sizes), per_sequence)
        slots = [
            tables[row, torch.arange(old, old + new) // size] * size + torch.arange(old, old + new) % size
            for row, (old, new) in enumerate(sizes)
        ]
        self._batch_of = lambda: PagedBatch(
            kv, size, torch.cat(slots).to(device), [new for _, new in sizes], contexts, tables.to(device),
            torch.tensor(contexts, device=device), [()] * len(sizes),
        )  # fmt: skip
        self._cache: LayerCache = layer_cache(kv, 0)
        generator = torch.Generator().manual_seed(0)

        def noise(count: int, heads: int, width: int) -> Tensor:
            return torch.randn(count, heads, width, generator=generator).to(device, dtype)

        (kv_heads, key_width), (_, value_width) = self._cache.key.row_shape, self._cache.value.row_shape
        every = (tables[:, :, None] * size + torch.arange(size)).flatten().to(device)
        self._cache.write(
            every, noise(len(every), kv_heads, key_width), noise(len(every), kv_heads, value_width)
        )
        num_new = sum(new for _, new in sizes)
        self._query = noise(num_new, shape.num_heads, key_width)
        new = torch.cat(slots).to(device)
        self._new = self._cache.key.rows(new, dtype), self._cache.value.rows(new, dtype)

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(self._batch_of(), self._layer, self._query, *self._new, self._cache)

    def seconds(self, backend: AttentionBackend, expected: Tensor) -> float:
        """The median of some rounds. Raises ValueError for other numbers than the expected ones."""
        error = float((self.attend(backend).float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE:  # also for NaN
            raise ValueError(f"its results are wrong by {error:.1%}")
        times = []
        for _ in range(NUM_ROUNDS):
            torch.cuda.synchronize(self._query.device)
            start = time.perf_counter()
            self.attend(backend)
            torch.cuda.synchronize(self._query.device)
            times.append(time.perf_counter() - start)
        return median(times)
