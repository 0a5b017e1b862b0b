"""Devices other than the CPU below them, for workers that share a few cores. A worker that sleeps leaves the
cores to the others.

throttled   everything is computed, and each call of the model lasts some times as long
emulated    a call of the model lasts as long as a curve says; instead of computing, its worker sleeps. Embeddings, KV and logits are
            zeros: every token is the vocabulary's first. All else is real: preprocessing, scheduling, memory,
            transfers, messages

So emulated workers behave like as many machines, as long as the cores are not busy with what is real.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cluster.engine.worker
import encoder_service.service
from cluster.engine.runner import LanguageRunner
from cluster.kvcache.memory import BlockMemory
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.states import StateSpan
from cluster.model.step_model import OnLayer, StepModel
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.media import Modality
from cluster.types.members import Role
from encoder_service.runner import EncoderRunner

# Round figures; slow enough for two cores to do all that is real in less than half of the time.
_ENCODE: dict[Modality, Curve] = dict.fromkeys((Modality.IMAGE, Modality.VIDEO), Curve(0.008, 8e-4))
_PROMPTS, _ANSWERS = Curve(0.010, 2.5e-4, 5e-8), Curve(0.030, 5e-4, 2e-8)
EMULATED: Mapping[Role, ServiceCurves] = {
    role: ServiceCurves(
        encode=_ENCODE if role.encodes else {},
        prefill=_PROMPTS if role is not Role.ENCODE else None,
        decode=_ANSWERS if role.decodes else None,
    )
    for role in Role
}


@dataclass
class Device:
    """The emulated device of one worker process. `slowdown` may be changed at any time by any thread."""

    curves: ServiceCurves | None = None  # None: as fast as the CPU
    slowdown: float = 1.0
    wanted_s: float = 0.0  # of all emulated calls
    taken_s: float = 0.0  # more, where the cores were busy
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)

    @contextmanager
    def throttled(self) -> Iterator[None]:
        """Round a call that computes."""
        began_at = self.clock()
        yield
        if self.slowdown > 1:
            self.sleep((self.slowdown - 1) * (self.clock() - began_at))

    def take(self, seconds: float) -> None:
        """Instead of a call. Blocks."""
        began_at, wanted_s = self.clock(), self.slowdown * seconds
        self.sleep(wanted_s)
        self.wanted_s += wanted_s
        self.taken_s += self.clock() - began_at


class _Steps:
    """A language model on a device."""

    def __init__(self, steps: StepModel, device: Device, num_layers: int, vocab_size: int):
        self._steps, self._device = steps, device
        self._num_layers, self._vocab_size = num_layers, vocab_size

    def forward(
        self, chunks: Sequence[SequenceChunk], kv: BlockMemory, on_layer: OnLayer | None = None
    ) -> Tensor:
        curve = self._device.curves and self._device.curves.prefill
        if curve is None:
            with self._device.throttled():
                return self._steps.forward(chunks, kv, on_layer)
        for layer_idx in range(self._num_layers):
            self._device.take(step_s(curve, chunks) / self._num_layers)
            if on_layer is not None:
                on_layer(layer_idx)
        return torch.zeros(sum(chunk.num_logits for chunk in chunks), self._vocab_size)

    def decode(
        self,
        token_ids: Sequence[int] | Tensor,
        context_lens: Sequence[int],
        deltas: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        kv: BlockMemory,
        adapters: Sequence[int] = (),
        states: Sequence[StateSpan] = (),
    ) -> Tensor:
        curve = self._device.curves and self._device.curves.decode
        if curve is None:
            with self._device.throttled():
                return self._steps.decode(token_ids, context_lens, deltas, block_tables, kv, adapters, states)
        num_sequences = len(token_ids)
        self._device.take(curve.seconds(num_sequences, sum(context_lens) / num_sequences))
        return torch.zeros(num_sequences, self._vocab_size)

    @property
    def recorded_tokens(self) -> int:
        return self._steps.recorded_tokens

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int], kv: BlockMemory) -> None:
        self._steps.copy_blocks(sources, targets, kv)


class _Encoder:
    """An encoder on a device."""

    def __init__(self, model: EncoderModel, device: Device):
        self._model, self._device = model, device
        vision = getattr(model.config, "vision_config", None)
        self._merge = getattr(vision, "spatial_merge_size", 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def encode(self, modality: Modality, items: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        curve = self._device.curves and self._device.curves.encode.get(modality)
        if curve is None:
            with self._device.throttled():
                return self._model.encode(modality, items)
        counts = [num_rows(item, self._merge) for item in items]
        self._device.take(curve.seconds(sum(counts)))
        return [torch.zeros(count, self._model.feature_width, dtype=self._model.dtype) for count in counts]


def step_s(curve: Curve, chunks: Sequence[SequenceChunk]) -> float:
    """The duration of a step that computes these; a token's context is what its prompt had before the
    step."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    pairs = sum(count * chunk.num_computed_tokens for count, chunk in zip(counts, chunks, strict=True))
    return curve.seconds(sum(counts), pairs / max(1, sum(counts)))


def num_rows(item: Mapping[str, Tensor], merge: int) -> int:
    """Embedding rows of an item whose grid of patches (t, h, w) is among its tensors; `merge`: side of the
    squares that become one row. Raises StopIteration for one without."""
    grid = next(value for key, value in item.items() if key.endswith("grid_thw"))
    return math.prod(int(size) for size in grid[0]) // merge**2


def run_on(device: Device) -> None:
    """Whatever service this process builds from here on computes on that device."""
    torch.set_num_threads(1)

    def encoder_runner(model: EncoderModel, *rest: Any) -> EncoderRunner:
        emulated: Any = _Encoder(model, device)
        return EncoderRunner(emulated, *rest)

    def language_runner(model: LanguageModel, steps: StepModel, *rest: Any) -> LanguageRunner:
        return LanguageRunner(model, _Steps(steps, device, model.num_layers, model.vocab_size), *rest)

    encoder_service.service.EncoderRunner = encoder_runner
    cluster.engine.worker.LanguageRunner = language_runner
