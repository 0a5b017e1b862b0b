"""The engine of a worker, without a cluster around it: no sockets, no door, no HTTP. What `bench.gpu.served`
measures of the same requests is less by what the server costs.

Model, memory, recorded steps and warm-up are a worker's (`load_language`, `cluster.engine.warm_up`); requests
are those that a door sends to a worker that does everything.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.machine import DeviceSpeed
from bench.gpu.offline import TEMPERATURE, OfflineRequest
from bench.gpu.steps import worker_args
from cluster.clock import SystemClock
from cluster.engine.ahead import may_run_ahead
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.limits import limits_of, sizes_of
from cluster.engine.runner import LanguageRunner
from cluster.engine.warm_up import MAX_PROMPT_TOKENS, warm_up_answers, warm_up_prompts
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import ChannelMessage, Failed, Preempted, StartDecode, Tokens
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.language import load_language
from cluster.worker.outbox import Outbox
from cluster.worker.setup import set_up
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.lease.events import TransferEvent
from kv_transfer.lease.transfer_engine import TransferEngine

DOOR = 1
TIMEOUT_S = 600.0


class EngineAlone:
    """Computes requests to their ends. Blocks."""

    def __init__(self, folder: Path, machine: DeviceSpeed, **fields: object):
        """`fields`: of `ClusterArgs`, instead of their defaults."""
        args = worker_args(folder, machine, **fields)
        limits = limits_of(Role.WHOLE, args)
        sizes = sizes_of(Role.WHOLE, args, limits, machine.device.type)
        sizes = dataclasses.replace(sizes, feature_bytes=0)
        language = load_language(args, set_up(args, "bench-gpu", transport="in_process"), Role.WHOLE, sizes)
        clock, network, model = SystemClock(), InProcessNetwork(), language.model
        # Agents of one process know memory of the CPU only, and nothing is transferred here.
        rows = BlockMemory(feature_layout(model.feature_width, 1, model.dtype), 1)
        kv, features = (
            TransferEngine(network.agent(name), clock, _ignore, outgoing=memory, incoming=memory)
            for name, memory in (("kv", BlockMemory(model.kv_layout, 1)), ("features", rows))
        )
        store = FeatureStore(rows, BlockPool(1, 1), features)
        runner = LanguageRunner(model, language.steps, language.kv, store)
        blocks, self._slots = BlockPool(language.num_kv_blocks, args.block_size), no_cpu_slots(clock)
        self.num_tokens = self.num_steps = 0
        self.token_bytes = language.kv.layout.block_bytes / args.block_size  # K and V of a token
        self._num_open = 0
        self._outbox = Outbox(self._receive)
        self._outbox.add_door(DOOR)
        policy = SchedulingPolicy(**args.scheduling.model_dump())
        self._engine = LanguageEngine(
            model=model,
            runner=runner,
            blocks=blocks,
            transfer_engine=kv,
            outbox=self._outbox,
            clock=clock,
            policy=policy,
            limits=limits,
            cpu_slots=self._slots,
            features=store,
            runs_ahead=may_run_ahead(model.device),
        )
        warm_up_answers(
            runner, blocks, self._engine.fit, self._slots, limits.max_sequences, model.max_model_len
        )
        budget = self._engine.planner.budget
        warm_up_prompts(runner, blocks, budget, self._slots, min(MAX_PROMPT_TOKENS, model.max_model_len))

    def compute(self, requests: Sequence[OfflineRequest]) -> float:
        """All at once. Returns seconds; `num_tokens` and `num_steps` count."""
        started_at = time.monotonic()
        for number, each in enumerate(requests):
            request = GenerateRequest(
                str(number), Prompt(each.prompt), (SamplingParams(TEMPERATURE, seed=number),),
                StopParams(each.num_tokens),
            )  # fmt: skip
            self._num_open += 1
            self._engine.start(DOOR, StartDecode(request, TIMEOUT_S, prefills=True), time.monotonic())
        while self._num_open:
            self._engine.step()
            self.num_steps += 1
        return time.monotonic() - started_at

    def _receive(self, batch: list[tuple[int, ChannelMessage]]) -> None:
        for _, message in batch:
            if isinstance(message, Failed):
                raise RuntimeError(f"request {message.request_id}: {message.error.message}")
            if isinstance(message, Preempted):
                raise RuntimeError("the requests do not fit the memory for KV")
            if isinstance(message, Tokens):
                for event in message.events:
                    self.num_tokens += len(event.token_ids)
                    self._num_open -= event.finish_reason is not None


def _ignore(event: TransferEvent) -> None:
    """No request of this engine transfers anything."""
