"""The language half of a simulated worker: the real engine, over a device of curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.inbox import Inbox
from cluster.engine.limits import StepLimits
from cluster.engine.state import LanguagePhase
from cluster.engine.warm_up import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, warm_up_answers, warm_up_prompts
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec, feature_layout
from cluster.types.messages import StartPrefill
from cluster.types.request import GenerateRequest
from deploy.simulator.device import SimRunner
from deploy.simulator.encoder import UNLIMITED, SimEncoder
from deploy.simulator.engine_loop import Call, Rest
from deploy.simulator.process import SimProcess


class SimLanguage:
    def __init__(self, process: Any, encoder: SimEncoder | None):
        self._process: SimProcess = process
        spec, model = process.spec, process.world.model
        size = model.block_size
        self.role = spec.role
        num_rooms = max(1, spec.feature_bytes // (max(1, model.bytes_per_row) * size))
        rooms = BlockMemory(feature_layout(1, size, torch.int8), num_rooms)
        features = FeatureStore(rooms, BlockPool(num_rooms, size), process.feature_transfer_engine)
        self.blocks = BlockPool(spec.num_blocks, size)
        self.runner: Any = SimRunner(process.device, self.blocks, process.seat.cpu_slots)
        stub: Any = SimpleNamespace(
            positions=lambda prompt: None,
            chunk_cut_spans=False,
            kv_layout=MemoryLayout((SegmentSpec(size, (model.kv_bytes_per_token,), torch.uint8),)),
            num_layers=1,
            sliding_window=None,
            state_blocks=model.state_blocks,
        )
        self._limits = StepLimits(
            max(spec.curves.max_step_units, size) if spec.curves.prefill is not None else 0,
            spec.max_batch if spec.role.decodes else 0,
            spec.step_target_s,
        )
        self.engine = LanguageEngine(
            model=stub,
            runner=self.runner,
            blocks=self.blocks,
            transfer_engine=process.kv_transfer_engine,
            outbox=process.seat.outbox,
            clock=process.clock,
            policy=process.policy,
            limits=self._limits,
            cpu_slots=process.seat.cpu_slots,
            features=features,
        )
        process.seat.resting = self
        process.step_began_at = lambda: self.runner.began_at
        Inbox(spec.role, process, self.engine, features, encoder)
        process.device.answers = process.seat.loop
        self.coming: dict[str, GenerateRequest] = {}  # prompts on their way to here, by request id
        self.warm_up()

    def warm_up(self) -> None:
        """The engine learns what it would measure before its first request."""
        limits, engine, slots = self._limits, self.engine, self._process.seat.cpu_slots
        with self._process.clock.at(self._process.clock.now()):
            if self.role.decodes:
                warm_up_answers(self.runner, self.blocks, engine.fit, slots, limits.max_sequences, UNLIMITED)
            if limits.max_prompt_tokens:
                most = MAX_PROMPT_TOKENS if self.role.prefills else MIN_PROMPT_TOKENS
                warm_up_prompts(self.runner, self.blocks, engine.planner.budget, slots, most)

    @property
    def replica_id(self) -> str:
        return self._process.spec.replica_id

    @property
    def busy_until(self) -> float:
        """The step that runs ends then. The engine's records contain its results already."""
        return self._process.loop.busy_until

    @property
    def asked(self) -> list[GenerateRequest]:
        """Prompts to be computed here that are on their way, or have come during that step."""
        waiting = (message for _, message, _ in self._process.loop.asked(self.engine.start))
        computed = [m.request for m in waiting if isinstance(m, StartPrefill) or m.prefills]
        return [*computed, *self.coming.values()]

    @property
    def answers(self) -> tuple[int, int]:
        """How many are generated, and how many tokens they see."""
        running = [r for r in self.engine.requests.values() if r.phase is LanguagePhase.RUNNING]
        return len(running), sum(r.choices[0].num_context_tokens for r in running)

    @property
    def max_step_tokens(self) -> int:
        """The most prompt tokens of the next step, if they see no earlier ones."""
        num_answers, _ = self.answers
        limit_s = self._process.policy.prompt_pause_s + self.runner.fixed_s if num_answers else math.inf
        return self.engine.planner.budget.max_tokens(0.0, limit_s)

    # How it may rest (`EngineLoop`)

    def may_take(self, calls: Sequence[Call], num_steps: int) -> bool:
        """Whether these are calls, if any, by which requests enter whose prompts others compute, and they
        leave the memory that so many steps need."""
        num_blocks = self.runner.num_blocks_for(num_steps)
        for function, args in calls:
            if function != self.engine.start or isinstance(args[1], StartPrefill) or args[1].prefills:
                return False
            num_blocks += args[1].request.num_prompt_blocks(self.blocks.block_size)
        return num_blocks <= self.blocks.num_free

    def admit(self) -> bool:
        """Takes in what has come. Whether only answers are to be generated all the same."""
        self.engine.admit()
        self.runner.has_freed = False
        return not self.engine.planner.has_runnable

    def plan(self, began_at: float) -> Rest | None:
        """What the engine does from `began_at` on, when a step is over, if nothing comes. None: it may be
        more than steps of the same answers."""
        return None if self.runner.has_freed else self.runner.plan(began_at)
