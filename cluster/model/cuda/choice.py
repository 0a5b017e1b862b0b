"""Which attention serves a model on this GPU: each library that can be imported, and our Triton kernels,
computes decode steps and a chunk of a prompt of the model's shape. What fails, or gives other numbers than
plain softmax, is left out; of the others the fastest is taken, for prompts and for answers apart: a library
may be the fastest for prompts and decode long contexts slowly, as it does not split them. The log says all
that was found.

Runs once, when the model is loaded, on the loading thread. Takes seconds, most of it for compiling.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.model.attention import AttentionBackend, AttentionShape, ModelAttention
from cluster.model.attention_flash import FlashAttention, reads_pages
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda import decode_attention
from cluster.model.cuda.libraries import FlashLibrary, installed
from cluster.model.kv_format import LayerCache, PlainRows, layer_cache
from cluster.model.layers.trial import RandomStep, median_s

logger = logging.getLogger(__name__)

# (computed, new) tokens of each sequence
DECODES: tuple[tuple[tuple[int, int], ...], ...] = (
    tuple((1000 + 7 * i, 1) for i in range(8)),
    ((16_000, 1), (16_383, 1)),  # too few sequences to fill a GPU, unless their contexts are split
)
CHUNK = ((512, 256), (0, 100))
NUM_ROUNDS = 5
TOLERANCE = 0.03  # of the norm of what plain softmax gives; bfloat16 has 8 bits


def choose(
    device: torch.device,
    dtype: torch.dtype,
    shape: AttentionShape,
    fallback: ModelAttention,
    libraries: Callable[[], Sequence[tuple[str, FlashLibrary]]] = lambda: tuple(installed()),
) -> ModelAttention:
    """The fallback, if all else fails: decode steps by it are not recorded. Raises RuntimeError if the device
    broke in the attempt."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    candidates = _Candidates(device, dtype, shape)
    if decode_attention.is_available():
        candidates.add_answers(
            "our Triton kernels", None, FlashAttention(fallback, None, None, True, processors)
        )
    has_kernels = bool(candidates.answers)
    for name, library in libraries():
        backend = FlashAttention(fallback, library, library, has_kernels, processors)
        candidates.add_prompts(name, library, backend)
        if not has_kernels or candidates.reads_pages(library):  # else our kernels decode for it
            candidates.add_answers(name, library, backend)
    prompts, answers = _fastest(candidates.prompts, "prompts"), _fastest(candidates.answers, "answers")
    del candidates
    torch.cuda.empty_cache()  # what torch keeps would count as used when the KV cache is planned
    if prompts is answers is None and not has_kernels:
        return fallback
    return FlashAttention(fallback, prompts, answers, has_kernels, processors)


@dataclass(frozen=True)
class _Timed:
    seconds: float
    name: str
    library: FlashLibrary | None  # None: our kernels


def _fastest(candidates: Sequence[_Timed], what: str) -> FlashLibrary | None:
    if not candidates:
        logger.warning("attention: plain torch computes %s, several times slower than a kernel would", what)
        return None
    best = min(candidates, key=lambda each: each.seconds)
    logger.info("attention: %s is the fastest of %d for %s", best.name, len(candidates), what)
    return best.library


class _Candidates:
    """What has given the right numbers, and how long it takes."""

    def __init__(self, device: torch.device, dtype: torch.dtype, shape: AttentionShape):
        self.prompts: list[_Timed] = []
        self.answers: list[_Timed] = []
        self._device, self._block_size = device, shape.block_size
        exact = TorchAttention()  # not the worker's own, which would keep scratch for the long decode
        steps = {sizes: _Step(device, dtype, shape, sizes) for sizes in (*DECODES, CHUNK)}
        expected = {sizes: (step, step.attend(exact)) for sizes, step in steps.items()}
        self._decodes, self._chunk = [expected[sizes] for sizes in DECODES], expected[CHUNK]

    def reads_pages(self, library: FlashLibrary) -> bool:
        step, _ = self._chunk
        return reads_pages(library, self._block_size) and step.is_plain

    def add_prompts(self, name: str, library: FlashLibrary | None, backend: AttentionBackend) -> None:
        self._add(self.prompts, "prompts", [self._chunk], name, library, backend)

    def add_answers(self, name: str, library: FlashLibrary | None, backend: AttentionBackend) -> None:
        self._add(self.answers, "answers", self._decodes, name, library, backend)

    def _add(
        self, found: list[_Timed], what: str, steps: Sequence[tuple[_Step, Tensor]], name: str,
        library: FlashLibrary | None, backend: AttentionBackend,
    ) -> None:  # fmt: skip
        try:
            seconds = [step.seconds(backend, right) for step, right in steps]
        except Exception as error:  # libraries raise what they like: it is not taken, and the log says why
            torch.cuda.synchronize(self._device)  # raises if the device itself is broken
            logger.warning("attention: %s is left out for %s: %s", name, what, error)
            return
        times = " and ".join(f"{1e6 * each:.1f}" for each in seconds)
        logger.info("attention: %s takes %s us for %s", name, times, what)
        found.append(_Timed(sum(seconds), name, library))


class _Step:
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
        self.is_plain = isinstance(self._cache.key, PlainRows)
        slots, width = self._step.slots, self._cache.key.row_shape[1]
        query = torch.randn(len(slots), shape.num_heads, width, generator=generator)
        self._query = query.to(device, dtype)
        self._new = self._cache.key.rows(slots, dtype), self._cache.value.rows(slots, dtype)

    def attend(self, backend: AttentionBackend) -> Tensor:
        return backend.attend(self._step.batch(), self._layer, self._query, *self._new, self._cache)

    def seconds(self, backend: AttentionBackend, expected: Tensor) -> float:
        """The median of some rounds. Raises ValueError for other numbers than the expected ones."""
        error = float((self.attend(backend).float() - expected.float()).norm() / expected.float().norm())
        if not error <= TOLERANCE:  # also for NaN
            raise ValueError(f"its results are wrong by {error:.1%}")
        return median_s(lambda: self.attend(backend), self._query.device, NUM_ROUNDS)
