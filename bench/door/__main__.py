"""What door processes relay. See README.md.

python -m bench.door [--doors 1] [--seconds 5] [--streams 64,256] [--rates 3000,6000,max]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import uvloop

from bench import DEMO_MODEL
from bench.arguments import parser_of
from bench.door.clients import Lags, ask, body, leave, open_unread, read_stream
from bench.door.stub import StubWorker
from bench.records import origin
from cluster.text.tokenizer import TextProcessor

NUM_MEASURED = 16  # streams beside those that are slow or leave
NUM_OTHERS = 500
OTHERS_STEP_S = 0.2
CONNECTIONS = 16
SHORT_TOKENS = 8
LONGEST = 4000  # tokens of an answer: as many as the model's context has room for
SETTLING_S = 1.0  # between the first step and the measured time


@dataclass
class Bench:
    stub: StubWorker
    ports: Iterator[int]  # of the doors, in turn
    pids: Sequence[int]
    words: dict[str, int]
    seconds: float

    def lags(self) -> Lags:
        return Lags(self.words, self.stub.sent_at)

    @contextlib.asynccontextmanager
    async def stepping(self, steps: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """`steps`: of the stub, until they are cancelled."""
        running = asyncio.ensure_future(steps)
        try:
            yield
        finally:
            running.cancel()

    @contextlib.asynccontextmanager
    async def reading(self, clients: Iterable[Coroutine[Any, Any, None]], num: int) -> AsyncIterator[None]:
        """Runs clients next to the block, which begins when the stub has `num` requests. After the block they
        leave, and the stub soon has none: what is not read, or left, is cancelled there."""
        tasks = [asyncio.ensure_future(client) for client in clients]
        try:
            await self._until(lambda: self.stub.num_running >= num)
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._until(lambda: self.stub.num_running == 0)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_so():
                await asyncio.sleep(0.05)

    @contextlib.contextmanager
    def timed(self, row: dict[str, Any]) -> Iterator[None]:
        began_at, door_s, own_s = time.monotonic(), self._doors_cpu_s(), time.process_time()
        yield
        row["seconds"] = seconds = time.monotonic() - began_at
        row["door_cpu"] = round((self._doors_cpu_s() - door_s) / seconds, 3)
        row["stub_and_clients_cpu"] = round((time.process_time() - own_s) / seconds, 2)

    def _doors_cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))


def cpu_s(pid: int) -> float:
    """Reads the clock of a process and all its threads, as clock_getcpuclockid(3) names it: a jiffy would
    be hundreds of tokens."""
    return time.clock_gettime(~pid << 3 | 2)


def figures(lags_s: Sequence[float]) -> dict[str, float]:
    p50, p99 = np.percentile(lags_s, [50, 99]) * 1e3
    return {"lag_p50_ms": round(float(p50), 2), "lag_p99_ms": round(float(p99), 2)}


async def streams(bench: Bench, num_streams: int, rate: float | None) -> dict[str, Any]:
    """Measures streams that get so many tokens a second together; None: as many as the doors can relay."""
    row: dict[str, Any] = {"row": "streams", "streams": num_streams, "offered": rate or "max"}
    lags = bench.lags()
    steps = (
        bench.stub.run_ahead(lambda: len(lags.values)) if rate is None else bench.stub.run(num_streams / rate)
    )
    clients = (read_stream(next(bench.ports), LONGEST, lags) for _ in range(num_streams))
    async with bench.reading(clients, num_streams), bench.stepping(steps):
        await asyncio.sleep(SETTLING_S)
        begin = len(lags.values)
        with bench.timed(row):
            await asyncio.sleep(bench.seconds)
            values = lags.values[begin:]
        assert bench.stub.num_running == num_streams, "an answer has ended before its row"
    row |= {"tokens": len(values), "tokens_per_s": round(len(values) / row["seconds"])}
    row["door_us_per_token"] = round(1e6 * row["door_cpu"] * row["seconds"] / len(values), 1)
    return row | figures(values)


async def short_requests(bench: Bench) -> dict[str, Any]:
    """Sends as many requests as the doors answer, eight tokens each; steps of a millisecond."""
    row: dict[str, Any] = {"row": "short requests", "connections": CONNECTIONS, "tokens": SHORT_TOKENS}
    request, ends_at, statuses = body(SHORT_TOKENS, False), time.monotonic() + bench.seconds, []

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", next(bench.ports))
        while time.monotonic() < ends_at:
            statuses.append(await ask(reader, writer, request))
        writer.close()

    async with bench.stepping(bench.stub.run(1e-3)):
        with bench.timed(row):
            await asyncio.gather(*(client() for _ in range(CONNECTIONS)))
    assert set(statuses) == {200}, "a request failed"
    return row | {"requests_per_s": round(len(statuses) / row["seconds"], 1)}


async def beside(bench: Bench, kind: str) -> dict[str, Any]:
    """Streams that are read, among others that are read, that are never read, or whose clients leave."""
    row: dict[str, Any] = {"row": f"{NUM_MEASURED} streams beside {NUM_OTHERS} {kind}"}
    num_tokens, lags, unread = int(bench.seconds / OTHERS_STEP_S), bench.lags(), []
    others: list[Coroutine[Any, Any, None]] = []
    if kind == "read":
        others = [read_stream(next(bench.ports), 4 * num_tokens, bench.lags()) for _ in range(NUM_OTHERS)]
    elif kind == "leaving":
        others = [_leave_one_by_one(bench)]
    else:
        unread = [open_unread(next(bench.ports), 4 * num_tokens) for _ in range(NUM_OTHERS)]
    num_others = 0 if kind == "leaving" else NUM_OTHERS
    # the first step comes behind the last of the others: none of them ends before all are there
    async with bench.reading(others, num_others), bench.stepping(bench.stub.run(OTHERS_STEP_S)):
        with bench.timed(row):
            measured = (read_stream(next(bench.ports), num_tokens, lags) for _ in range(NUM_MEASURED))
            await asyncio.gather(*measured)
        for client in unread:
            client.close()
    return row | figures(lags.values)


async def _leave_one_by_one(bench: Bench) -> None:
    for _ in range(NUM_OTHERS):
        await leave(next(bench.ports), 1000)


def step_words() -> dict[str, int]:
    """Text → token id: words that stay what they are next to each other."""
    text = TextProcessor.load(DEMO_MODEL, None)
    named = {text.text([token_id]): token_id for token_id in range(text.vocab_size)}
    return {name[1:]: token_id for name, token_id in named.items() if re.fullmatch(" [a-z]{2,}", name)}


@contextlib.asynccontextmanager
async def started(num_doors: int, seconds: float) -> AsyncIterator[Bench]:
    tokens = step_words()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stub = StubWorker(f"unix:{folder}/stub", list(tokens.values()))
        member = msgspec.json.encode(await stub.start()).decode()
        stack.push_async_callback(stub.aclose)
        doors = [await stack.enter_async_context(_door(member)) for _ in range(num_doors)]
        ports, pids = [port for port, _ in doors], [pid for _, pid in doors]
        yield Bench(stub, itertools.cycle(ports), pids, {word: i for i, word in enumerate(tokens)}, seconds)


@contextlib.asynccontextmanager
async def _door(member: str) -> AsyncIterator[tuple[int, int]]:
    """Port and process."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.door.served", member),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        yield int(await process.stdout.readline()), process.pid
    finally:
        process.kill()
        await process.wait()


async def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--doors", type=int, default=1, help="processes, asked in turn")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--rates", default="3000,6000,max", help="tokens per second of all streams")
    args = parser.parse_args()
    print(json.dumps(origin() | {"doors": args.doors}))
    async with started(args.doors, args.seconds) as bench:
        await streams(bench, 8, 400.0)  # warm
        for num_streams, rate in itertools.product(args.streams.split(","), args.rates.split(",")):
            row = await streams(bench, int(num_streams), None if rate == "max" else float(rate))
            print(json.dumps(row), flush=True)
        print(json.dumps(await short_requests(bench)), flush=True)
        for kind in ("read", "unread", "leaving"):
            print(json.dumps(await beside(bench, kind)), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
