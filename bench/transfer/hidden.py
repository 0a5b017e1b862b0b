"""How much of the KV transfer the prefill hides.

A prompt goes through prefill and decode over a link of a given speed, in three modes:
* pipelined: layer by layer while prefill computes;
* after prefill: everything is sent after the first token;
* recomputed: as pipelined, but decode computes the part that would not hide.

One process, real services and engines; the in-process agent with an emulated link: bytes count as arrived
when the link could have carried them. The visible time of a transfer is the time from prefill's first token
to the lease's completion at decode. Hidden share: 1 - (visible time, pipelined) / (visible time, after
prefill).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np

from bench.in_process import setup_here, started
from bench.records import Record
from cluster.config.settings import ClusterArgs
from cluster.engine import engine as language_engine
from cluster.engine import forward, kv_output
from cluster.engine.kv_output import send_computed
from cluster.engine.state import FirstTokens, LanguageRequest
from cluster.engine.worker import LanguageWorker
from cluster.ids import new_request_id
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from decode_service.service import decode_worker
from kv_transfer.agents.agent import TransferState
from kv_transfer.agents.in_process import InProcessNetwork
from kv_transfer.lease.events import Completed
from prefill_service.service import prefill_worker
from router.door import Door
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline

NUM_GENERATED = 3
TIMEOUT_S = 300.0


class SlowLink:
    """An agent whose writes take as long as on a link of `bytes_per_s`, one after the other."""

    def __init__(self, agent: Any, link: EmulatedLink):
        self._agent = agent
        self._link = link
        self._free_at = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def post(self, peer: str, local: np.ndarray, remote: np.ndarray, notification: bytes = b"") -> Any:
        handle = self._agent.post(peer, local, remote, notification)
        num_bytes = int(local[:, 1].sum())
        self._link.num_bytes += num_bytes
        self._free_at = max(self._free_at, time.monotonic()) + num_bytes / self._link.bytes_per_s
        return handle, self._free_at

    def poll(self, handle: Any) -> TransferState:
        inner, due_at = handle
        return TransferState.PENDING if time.monotonic() < due_at else self._agent.poll(inner)

    def ended_at(self, handle: Any) -> float:
        return handle[1]

    def release(self, handle: Any) -> None:
        self._agent.release(handle[0])


@dataclass
class EmulatedLink:
    bytes_per_s: float
    num_bytes: int = 0


@dataclass
class RequestTimes:
    """The times of one request, as perf_counter reads; tokens at the door."""

    started_at: float = 0.0
    prefilled_at: float = 0.0
    complete_at: float = 0.0
    tokens_at: list[float] = field(default_factory=list)


class NoPush:
    """Replaces `StepPush`: nothing is sent while the step runs."""

    def __init__(self, *_: object):
        pass

    def on_layer(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def after_prefill() -> Iterator[None]:
    """Everything is sent after the first tokens."""

    def send_late(request: Any, block_size: int) -> None:
        if request.first_tokens:
            send_computed(request, block_size)

    with (
        patch.object(forward, "StepPush", NoPush),
        patch.object(language_engine, "send_computed", send_late),
        all_travels(),
    ):
        yield


@contextmanager
def all_travels() -> Iterator[None]:
    with patch.object(kv_output, "plan_end", lambda *_: None):
        yield


MODES: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "pipelined": all_travels,
    "after prefill": after_prefill,
    "recomputed": nullcontext,
}


@asynccontextmanager
async def cluster(args: ClusterArgs, link: EmulatedLink, times: RequestTimes):
    """Prefill, decode and a door in this process. `times` receives the times of the request that runs. The
    door's policy never has a prompt computed where its answer is generated: its KV travels."""
    door_args = args.door.model_copy(update={"policy": "router.policy.baselines:PerStagePolicy"})
    args = args.model_copy(update={"door": door_args})
    network = InProcessNetwork()
    unique = secrets.token_hex(4)
    with patch(
        "cluster.worker.process.make_agent", lambda transport, name, *_: SlowLink(network.agent(name), link)
    ):
        prefill = prefill_worker(args, setup_here(args, f"p-{unique}"))
        decode = decode_worker(args, setup_here(args, f"d-{unique}"))
    _watch(prefill, decode, times)
    door = Door(args, lambda replica_id, request_id: decode.run(request_id))
    async with started(door, (prefill, decode)):
        yield door


def _watch(prefill: LanguageWorker, decode: LanguageWorker, times: RequestTimes) -> None:
    report, on_event = prefill.engine._on_prompt, decode.process.transfer_engine._on_event

    def report_first_tokens(request: LanguageRequest, first: FirstTokens) -> None:
        times.prefilled_at = time.perf_counter()
        report(request, first)

    def on_lease(event: Any) -> None:
        if isinstance(event, Completed):
            times.complete_at = time.perf_counter()
        on_event(event)

    prefill.engine._on_prompt = report_first_tokens
    decode.process.transfer_engine._on_event = on_lease


async def _ask(door: Door, num_tokens: int, draw: random.Random, times: RequestTimes) -> None:
    prompt = Prompt(tuple(draw.randrange(1000, 20000) for _ in range(num_tokens)))
    sampling = SamplingParams(temperature=0.0)
    request = GenerateRequest(new_request_id(), prompt, (sampling,), StopParams(NUM_GENERATED, ()))
    times.tokens_at.clear()
    times.started_at = time.perf_counter()
    (events,) = door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0)))
    async with asyncio.timeout(TIMEOUT_S):
        async for event in events:
            times.tokens_at += [time.perf_counter()] * len(event.token_ids)


async def measure(
    args: ClusterArgs, lengths: Sequence[int], links: Sequence[float], repeats: int
) -> list[Record]:
    """`links`: GB/s. Before the clock starts, each length is computed once over each link, so that the
    cluster knows its speed. The modes alternate.
    """
    records: list[Record] = []
    times, link, draw = RequestTimes(), EmulatedLink(1e12), random.Random(0)
    async with cluster(args, link, times) as door:
        for length, speed in itertools.product(lengths, links):
            link.bytes_per_s = speed * 1e9
            with all_travels():
                await _ask(door, length, draw, times)
            for repetition, (mode, change) in itertools.product(range(repeats), MODES.items()):
                link.num_bytes = 0
                with change():
                    await _ask(door, length, draw, times)
                records.append({
                    "type": "hidden", "mode": mode, "prompt_tokens": length, "link_gb_per_s": speed,
                    "repetition": repetition, "bytes": link.num_bytes,
                    "shows_s": times.complete_at - times.prefilled_at,
                    "ttft_s": times.tokens_at[0] - times.started_at,
                    "second_token_s": times.tokens_at[1] - times.started_at,
                })  # fmt: skip
    return records
