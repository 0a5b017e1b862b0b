"""The device of a simulated worker: durations follow from curves, tokens and rows mean nothing.

A device runs one call at a time, in the order of asking. On a worker that encodes, too, the answers' step
that has waited for an encoder's call costs no more than what it adds to it: the weights are read while the
encoder computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from cluster.engine.state import (
    AnswerChoice,
    FirstTokens,
    LanguageRequest,
    PromptWork,
    Work,
    WorkResult,
)
from cluster.kvcache.blocks import BlockPool
from cluster.types.media import MediaItem, Modality
from cluster.worker.cpu_slots import CpuSlots
from deploy.simulator.engine_loop import EngineLoop, Rest
from deploy.simulator.events import VirtualClock
from deploy.simulator.hardware import Chunks, step_s
from deploy.simulator.spec import WorkerSpec
from encoder_service.runner import Piece, Prepared

ONE_TOKEN = (0,)  # simulated tokens have no meaning, only a number
Noise = Callable[[], float]  # a factor of one call's duration


class Device:
    """What the engines of one worker share. `spec` and `slowdown` may change while the worker runs: by
    `become`."""

    def __init__(self, spec: WorkerSpec, clock: VirtualClock, noise: Noise):
        self.spec, self.clock, self.noise = spec, clock, noise
        self.slowdown = 1.0
        self.free_at = 0.0  # when the last call ends
        self.answers: EngineLoop | None = None  # of the language engine, which may rest

    def run(self, seconds: float, hidden_s: float = 0.0) -> float:
        """A call of the caller begins as soon as the device is free; the clock is at its end afterwards.
        `hidden_s`: of this, what a call that it waits for hides. Returns when it began."""
        now = self.clock.now()
        begins_at = max(now, self.free_at)
        if begins_at > now:
            seconds -= hidden_s
        self.free_at = begins_at + seconds
        self.clock.spend(self.free_at - now)
        return begins_at

    def become(self, spec: WorkerSpec, slowdown: float) -> None:
        """All further calls last as long as this says."""
        self.spec, self.slowdown = spec, slowdown
        self.end_rest()

    def end_rest(self) -> None:
        """Another engine wants the device, or the device becomes another: the step of the answers that runs
        ends first."""
        if self.answers is not None:
            self.free_at = max(self.free_at, self.answers.end_rest())


class DeviceSlots(CpuSlots):
    """`ran_s`: of one step, where an engine has done several in one."""

    def __init__(self, clock: VirtualClock):
        super().__init__(clock, None, 0)
        self.num_steps = 1

    @property
    def ran_s(self) -> float:
        return super().ran_s / self.num_steps


class SimRunner:
    """It stands in place of `LanguageRunner`, and takes the time of a device."""

    num_drafted = num_accepted = 0

    def __init__(self, device: Device, blocks: BlockPool, slots: DeviceSlots):
        self.device, self._blocks, self._slots = device, blocks, slots
        self._rest: tuple[Rest, int] | None = None  # that the next step makes up for
        self._answering: Sequence[LanguageRequest] = ()  # all that run in the next step, if that is known
        self.has_freed = False  # the last step has ended answers: requests may get their blocks
        self.began_at = 0.0  # when the last step of prompts began

    # Durations

    def step_s(self, chunks: Chunks, num_answers: int, context_tokens: float) -> float:
        """How long a step lasts, without noise."""
        device = self.device
        return device.slowdown * step_s(device.spec.curves, chunks, num_answers, context_tokens)

    @property
    def fixed_s(self) -> float:
        """The part of a step of answers that does not depend on their number."""
        curve = self.device.spec.curves.decode
        return 0.0 if curve is None else self.device.slowdown * curve.fixed_s

    def plan(self, began_at: float) -> Rest | None:
        """Steps of the same answers, from `began_at` on. None: there are fewer than two."""
        num = len(self._answering)
        if num == 0:
            return None
        left = min(map(_num_left, self._answering))
        num_steps = min(left, self.max_steps())
        if num_steps < 2:
            return None
        noise, context = self.device.noise(), sum(r.choices[0].num_context_tokens for r in self._answering)
        first_s, second_s = (noise * self.step_s((), num, context + more) for more in (0, num))
        return Rest(began_at, num_steps, first_s, second_s - first_s)

    def max_steps(self) -> int:
        """How many steps of these answers there is memory for, from the beginning of the rest on."""
        num = max(1, len(self._answering))
        return self._blocks.num_free // num * self._blocks.block_size

    def num_blocks_for(self, num_steps: int) -> int:
        """What the answers may need in so many steps."""
        return len(self._answering) * -(-num_steps // self._blocks.block_size)

    def make_up(self, rest: Rest, num_steps: int) -> None:
        """The next step of the engine is so many of these."""
        self._rest = rest, num_steps

    # As `LanguageRunner`

    def may_draw(self, request: LanguageRequest) -> bool:
        return True

    def room_for_prompts(self, answers: Sequence[LanguageRequest]) -> int | None:
        return None

    def propose(self, requests: Sequence[LanguageRequest]) -> None:
        if self._rest is not None:
            drafts = [0] * (self._rest[1] - 1)
            for request in requests:
                request.choices[0].propose(drafts)

    def run(self, works: Sequence[Work], on_layer: Any, then: Sequence[AnswerChoice]) -> list[WorkResult]:
        prompts = [work for work in works if isinstance(work, PromptWork)]
        requests = [work for work in works if isinstance(work, LanguageRequest)]
        if self._rest is not None:
            (rest, num_steps), self._rest = self._rest, None
            self._slots.num_steps = num_steps
            self.device.clock.spend(rest.seconds(num_steps))
            self.device.free_at = max(self.device.free_at, self.device.clock.now())
        else:
            num_steps = self._slots.num_steps = 1
            chunks = [(work.sequence.num_computed_tokens, work.num_tokens) for work in prompts]
            context = sum(request.choices[0].num_context_tokens for request in requests)
            seconds = self.step_s(chunks, len(requests), context) * self.device.noise()
            began_at = self.device.run(seconds, 0.0 if prompts else min(seconds, self.fixed_s))
            self.began_at = began_at if prompts else self.began_at
        tokens = [ONE_TOKEN * num_steps]
        self._answering = []
        if not prompts and len(requests) < self.device.spec.max_batch:  # else others may run in the next step
            self._answering = [r for r in requests if _num_left(r) > num_steps]
        self.has_freed = len(self._answering) < len(requests)
        for request in requests:
            request.choices[0].drop_drafts()
        return [WorkResult(tokens) if isinstance(work, LanguageRequest) else WorkResult() for work in works]

    def first_tokens(self, requests: Sequence[LanguageRequest]) -> list[FirstTokens]:
        return [FirstTokens(ONE_TOKEN) for _ in requests]

    def warm_up_prompt(self, num_tokens: int, block_table: Sequence[int]) -> None:
        self.device.clock.spend(self.step_s([(0, num_tokens)], 0, 0))

    def warm_up_answers(
        self, num_sequences: int, num_context_tokens: int, block_table: Sequence[int]
    ) -> None:
        self.device.clock.spend(self.step_s((), num_sequences, num_sequences * num_context_tokens))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Nothing is in them."""

    def forget(self, choice: Any) -> None:
        """Nothing is known of it."""


def _num_left(request: LanguageRequest) -> int:
    """Tokens that the answer still gets."""
    return request.request.stop.max_tokens - request.choices[0].num_generated


@dataclass(frozen=True)
class _Units(Prepared):
    """Both counts are of the whole item: rows that the encoder computes, and embeddings, which may be
    pooled."""

    num_call_rows: int = 0
    num_rows: int = 0

    def rows_until(self, unit: int) -> int:
        return self.num_rows * unit // self.num_units


class SimEncoderRunner:
    """It stands in place of `EncoderRunner`. An item's rows are zeros of a byte each. A video can be cut
    everywhere, nothing else can."""

    def __init__(self, device: Device):
        self._device = device

    def prepare_s(self, item: MediaItem) -> float:
        """How long the preparation of the item takes on its thread."""
        curve = self._device.spec.encoder_curves.prepare[item.modality]
        return self._device.slowdown * curve.seconds(item.num_call_rows)

    def call_s(self, modality: Modality, num_rows: int) -> float:
        """How long a call with so many rows lasts, without noise."""
        return self._device.slowdown * self._device.spec.encoder_curves.encode[modality].seconds(num_rows)

    def prepare(self, item: MediaItem, is_wanted: Any = None) -> Prepared:
        self._device.clock.spend(self.prepare_s(item))
        num_units = item.num_call_rows if item.modality is Modality.VIDEO else 1
        return _Units({}, num_units, item.num_call_rows, item.geometry.num_tokens)

    def record_next(self) -> bool:
        return False

    def encode(self, modality: Modality, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        num_rows, rows = 0, []
        for piece in pieces:
            prepared = piece.prepared
            assert isinstance(prepared, _Units)
            num_rows += prepared.num_call_rows * (piece.end - piece.start) // prepared.num_units
            count = prepared.rows_until(piece.end) - prepared.rows_until(piece.start)
            rows.append(torch.zeros(count, 1, dtype=torch.int8))
        self._device.end_rest()
        self._device.run(self.call_s(modality, num_rows) * self._device.noise())
        return rows
