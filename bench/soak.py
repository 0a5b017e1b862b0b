"""Many requests, some of whose clients disconnect at random moments. Nothing may be held afterwards, and
nothing may grow meanwhile.

    python -m bench.soak --url http://127.0.0.1:8000 --num-requests 1000 --cancelled-ratio 0.2
    python -m bench.soak --minutes 90 [--config FILE]

Streams mixed requests at a fixed concurrency and closes the connection of a fifth of them after a random
time. Then waits until the cluster is idle and reads /metrics: in-flight choices, requests, blocks, bytes and
open leases must be zero in every worker.

With `--minutes` it starts a cluster of its own, loads it for so long and has a verdict for each series
(`bench.soak_series`): memory, descriptors and threads of each kind of process, /dev/shm, latency. A day at
one request per second is 86,400 requests. Linux only; other programs on the machine disturb latency and
/dev/shm.

Exit status 1 if anything is still held, a request that was not cancelled got no answer, or a series grows.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import ssl
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.chaos.processes import Processes
from bench.soak_series import Sampler, table
from bench.workload import KINDS, Case, make_case, make_cases
from deploy.serving.command import DEFAULT_CONFIG
from deploy.serving.launch import LocalCluster
from deploy.serving.ports import free_port

HELD = (
    "epdg_door_flights",
    "epdg_worker_running",
    "epdg_worker_waiting",
    "epdg_worker_queued_units",
    "epdg_worker_used_blocks",
    "epdg_worker_open_leases",
    "epdg_worker_media_bytes",
    "epdg_worker_sending_bytes",
)
NUM_SAMPLES = 120
READY_TIMEOUT_S = 300.0

OnToken = Callable[[], None]


async def stream(
    client: httpx.AsyncClient, model_id: str, case: Case, on_line: OnToken = lambda: None
) -> str:
    """Read one streamed answer to its end; returns its outcome. `on_line` is called for each event."""
    body = {"model": model_id, "messages": case.messages, "max_tokens": 64, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            return f"http {response.status_code}"
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            if line:
                on_line()
        return "answered" if last == "data: [DONE]" else "broken off"


async def run(
    url: str,
    cases: Iterable[Case],
    concurrency: int,
    cancelled_ratio: float,
    seed: int,
    on_answer: Callable[[list[float]], None] = lambda times: None,
) -> Counter[str]:
    """`on_answer` is given the instants of each complete answer: its start, then its events."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    left = enumerate(cases)
    new_client = partial(httpx.AsyncClient, base_url=url, timeout=120, verify=ssl.create_default_context())
    async with new_client() as client:
        model_id = (await client.get("/v1/models")).json()["data"][0]["id"]

    def note(times: list[float]) -> None:
        times.append(time.monotonic())

    async def one_after_another() -> None:
        client = new_client()
        for number, case in left:
            leaves = int((number + 1) * cancelled_ratio) > int(number * cancelled_ratio)
            leaves_after_s = rng.uniform(0, 0.4) if leaves else None
            times = [time.monotonic()]
            try:
                async with asyncio.timeout(leaves_after_s):
                    outcome = await stream(client, model_id, case, partial(note, times))
            except TimeoutError:
                outcome = "left"
                await client.aclose()  # httpcore counts some connections of cancelled requests for ever
                client = new_client()
            outcomes[outcome] += 1
            if outcome == "answered":
                on_answer(times)
        await client.aclose()

    await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
    return outcomes


def read_held(url: str) -> dict[str, float]:
    """Every metric that must be zero in an idle cluster and is not, with its value."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    return {
        f"{sample.name}{sample.labels}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name in HELD and sample.value != 0
    }


def wait_idle(url: str, timeout_s: float) -> dict[str, float]:
    """Waits until nothing is held. Returns what is still held after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while (held := read_held(url)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return held


def endless(seed: int, until: float) -> Iterator[Case]:
    """New cases until that instant of `time.monotonic`."""
    rng = random.Random(seed)
    for kind in itertools.cycle(KINDS):
        if time.monotonic() >= until:
            return
        yield make_case(rng, kind)


async def load_and_sample(url: str, sampler: Sampler, args: argparse.Namespace) -> Counter[str]:
    seconds = 60 * args.minutes
    cases = endless(args.seed, time.monotonic() + seconds)
    sampling = asyncio.create_task(sampler.sample_every(seconds / NUM_SAMPLES))
    try:
        return await run(
            url, cases, args.concurrency, args.cancelled_ratio, args.seed, sampler.latency.add_answer
        )
    finally:
        sampling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampling


def at_free_port(config: Path, folder: Path) -> Path:
    """A copy of the configuration: another cluster may answer at its port."""
    settings = yaml.safe_load(config.read_text())
    settings["http_options"] = {**settings.get("http_options", {}), "port": free_port()}
    copy = folder / "cluster.yaml"
    copy.write_text(yaml.safe_dump(settings))
    return copy


def soak(args: argparse.Namespace) -> int:
    """Runs for so many minutes, on a cluster of its own."""
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(at_free_port(args.config, Path(folder))) as cluster,
    ):
        cluster.wait_ready(READY_TIMEOUT_S)
        sampler = Sampler(Processes(cluster.folder).by_kind)
        outcomes = asyncio.run(load_and_sample(cluster.url, sampler, args))
        held = wait_idle(cluster.url, timeout_s=30)
    number = sum(outcomes.values())
    print(f"{number} requests in {args.minutes:g} min: {dict(outcomes)}")
    print(f"as many as in {number / 3600:.2f} h at one request per second")
    print(f"still held: {held or 'nothing'}")
    verdicts = sampler.verdicts()
    print(table(verdicts, 1000 / max(1, number) * 60 * args.minutes))
    grows = any(verdict.rises for verdict in verdicts)
    return 0 if not held and not grows and set(outcomes) <= {"answered", "left"} else 1


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--num-requests", type=int, default=1000)
    parser.add_argument("--minutes", type=float, help="start a cluster and load it for so long")
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="of that cluster")
    parser.add_argument("--cancelled-ratio", type=float, default=0.2)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.minutes is not None:
        return soak(args)
    cases = make_cases(args.seed, args.num_requests)
    started_at = time.monotonic()
    outcomes = asyncio.run(run(args.url, cases, args.concurrency, args.cancelled_ratio, args.seed))
    elapsed_s = time.monotonic() - started_at
    held = wait_idle(args.url, timeout_s=30)
    print(json.dumps({"outcomes": outcomes, "seconds": round(elapsed_s, 1), "still_held": held}))
    return 0 if not held and set(outcomes) <= {"answered", "left"} else 1


if __name__ == "__main__":
    raise SystemExit(main())
