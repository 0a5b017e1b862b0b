"""A closed loop of dialogues against one running server, and the figures computed from it.

`concurrency` clients take dialogues from one list; each client sends its next request when it has the answer
to the last.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import aiohttp

from bench.client import ChatRequest, Endpoint, TimedAnswer, ask, open_session
from bench.engine.processes import CpuCost, CpuUsage
from bench.engine.prompts import Prompts
from bench.engine.rows import Dialogue, LoadRow
from bench.engine.servers import RunningServer
from deploy.simulator.results import percentile

ROW_TIMEOUT_S = 300.0
WARM_UP_TOKENS = 8
WARM_UP_CONCURRENCY = 4


@dataclass(frozen=True)
class RowResult:
    """One row of one server in one repetition. Times are those of complete answers; a failed request is not
    an answer.
    """

    server: str
    row: str
    concurrency: int
    repetition: int
    num_requests: int
    num_failed: int  # refused, interrupted, too short or not finished in time
    failures: tuple[str, ...]  # the first three different ones
    num_prompt_tokens: int
    num_tokens: int
    tokens_per_s: float  # generated tokens / wall time
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float  # of the gaps of all requests together
    itl_p99_s: float
    wall_s: float
    server_cpu_s: float
    server_cpu_by_role_s: Mapping[str, float]  # parts of `server_cpu_s`
    client_cpu_s: float
    other_cores: float
    start_s: float  # the server's, from its command to /health


async def closed_loop(
    endpoint: Endpoint, dialogues: Sequence[Dialogue], concurrency: int, timeout_s: float = ROW_TIMEOUT_S
) -> list[TimedAnswer]:
    """Records of the requests that ended, complete or not. A request that is not sent or not finished in time
    has no record.
    """
    records: list[TimedAnswer] = []
    waiting = iter(dialogues)
    async with open_session() as session:
        clients = (_client(session, endpoint, waiting, records) for _ in range(concurrency))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*clients)
    return records


async def _client(
    session: aiohttp.ClientSession,
    endpoint: Endpoint,
    waiting: Iterator[Dialogue],
    records: list[TimedAnswer],
) -> None:
    for dialogue in waiting:
        messages = list(dialogue.opening)
        for turn in dialogue.turns:
            messages = [*messages, turn.message]
            record = await ask(session, endpoint, ChatRequest(messages, turn.num_tokens, turn.kind))
            records.append(record)
            if record.failure:
                break
            messages = [*messages, {"role": "assistant", "content": record.text}]


def measure_row(
    server: RunningServer, row: LoadRow, prompts: Prompts, concurrency: int, repetition: int
) -> RowResult:
    """Blocks for up to ROW_TIMEOUT_S."""
    num_dialogues = row.num_dialogues(concurrency)
    dialogues = row.dialogues(prompts, concurrency, repetition, num_dialogues)
    before = CpuUsage.now(server.mark)
    records = asyncio.run(closed_loop(server.endpoint, dialogues, concurrency))
    cost = CpuCost.between(before, CpuUsage.now(server.mark))
    num_requests = sum(len(dialogue.turns) for dialogue in dialogues)
    return summarise(server, row.name, concurrency, repetition, num_requests, records, cost)


def summarise(
    server: RunningServer,
    row: str,
    concurrency: int,
    repetition: int,
    num_requests: int,
    records: Sequence[TimedAnswer],
    cost: CpuCost,
) -> RowResult:
    complete = [record for record in records if not record.failure]
    ttfts_s = [record.ttft_s for record in complete]
    gaps_s = [gap for record in complete for gap in record.gaps_s]
    num_tokens = sum(record.num_tokens for record in complete)
    failures = dict.fromkeys(record.failure for record in records if record.failure)
    return RowResult(
        server=server.name,
        row=row,
        concurrency=concurrency,
        repetition=repetition,
        num_requests=num_requests,
        num_failed=num_requests - len(complete),
        failures=tuple(failures)[:3],
        num_prompt_tokens=sum(record.num_prompt_tokens for record in complete),
        num_tokens=num_tokens,
        tokens_per_s=num_tokens / cost.wall_s,
        ttft_p50_s=percentile(ttfts_s, 0.5),
        ttft_p99_s=percentile(ttfts_s, 0.99),
        itl_p50_s=percentile(gaps_s, 0.5),
        itl_p99_s=percentile(gaps_s, 0.99),
        wall_s=cost.wall_s,
        server_cpu_s=cost.server_cpu_s,
        server_cpu_by_role_s=cost.server_cpu_by_role_s,
        client_cpu_s=cost.client_cpu_s,
        other_cores=cost.other_cores,
        start_s=server.start_s,
    )


def warm_up(server: RunningServer, rows: Sequence[LoadRow], prompts: Prompts) -> None:
    """Short answers to prompts of each row's size, one at a time and concurrently, so that nothing is
    compiled or first allocated while times are taken.
    """
    for row in rows:
        for concurrency in (1, WARM_UP_CONCURRENCY):
            dialogues = [
                _shortened(dialogue) for dialogue in row.dialogues(prompts, concurrency, -1, concurrency)
            ]
            asyncio.run(closed_loop(server.endpoint, dialogues, concurrency))


def _shortened(dialogue: Dialogue) -> Dialogue:
    return replace(dialogue, turns=(replace(dialogue.turns[0], num_tokens=WARM_UP_TOKENS),))
