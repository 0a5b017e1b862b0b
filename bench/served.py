"""What a served token costs besides the model: CPU time, wake-ups, gaps of streams, by process. Linux only.

    python -m bench.served --tokens 400 --streams 5 --concurrency 1 [--url URL --url URL]

A stream is one greedy chat answer, read from a plain socket, so the client costs little. The processes are
all of the cluster that listens at the URL. CPU time is the kernel's, in nanoseconds; a wake-up is a voluntary
context switch. With several URLs the clusters take turns, stream by stream, so that two versions can be
compared on one machine. Figures are medians over the streams. `--streams 0 --seconds 10`: the same of idle
clusters.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import re
import socket
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

PROC = Path("/proc")
MODELS = ("Encode", "Prefill", "Decode")  # replicas that run a model
PROGRAMS = (
    "raylet/raylet",  # first: its command line has those of the agents that it starts
    "serve.scripts",
    "log_monitor",
    "runtime_env",
    "dashboard.py",
    "gcs_server",
    "haproxy",
)
_TEXT = re.compile(rb'"delta":\{"content":')


@dataclass
class Run:
    """What a cluster spent while it generated `num_tokens`, or, idle, in `seconds`."""

    num_tokens: int = 0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    spent: dict[str, list[float]] = field(default_factory=lambda: defaultdict(lambda: [0.0, 0.0]))

    def per_unit(self, process: str) -> tuple[float, float]:
        """(ms of CPU, wake-ups) per token, or per second if there are no tokens."""
        cpu_s, num_wakes = self.spent.get(process, (0.0, 0.0))
        unit = self.num_tokens or self.seconds
        return 1e3 * cpu_s / unit, num_wakes / unit


def pids_of(url: str) -> list[int]:
    """All processes of the cluster that listens at `url`. Raises LookupError."""
    port, folder = urlsplit(url).port or 80, None
    wanted = {f"socket:[{inode}]" for inode in _listeners(port)}
    for process in _processes():
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in wanted for link in (process / "fd").iterdir()):
                folder = _cluster_of(process)
    if folder is None:
        raise LookupError(f"no local cluster of this user listens at {url}")
    parents = {int(process.name): _parent(process) for process in _processes()}
    # Processes that the variable marks, and their descendants: a long title overwrites the environment.
    marked = {int(process.name) for process in _processes() if _cluster_of(process) == folder}
    return sorted(pid for pid in parents if marked.intersection(_lineage(pid, parents)))


def name_of(pid: int) -> str:
    words = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    if replica := re.match(r"ray::ServeReplica:[^:]*:(\w+)", words):
        return replica[1]
    return next((program for program in PROGRAMS if program in words), words.split()[0] if words else "?")


def reading(pids: list[int]) -> dict[str, tuple[str, float, int]]:
    """Thread id → (process, CPU seconds, wake-ups) so far."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            name = name_of(pid)
            for task in (PROC / str(pid) / "task").iterdir():
                with contextlib.suppress(OSError):
                    cpu_s = int((task / "schedstat").read_text().split()[0]) / 1e9
                    status = (task / "status").read_text()
                    num_wakes = int(status.split("voluntary_ctxt_switches:", 1)[1].split()[0])
                    found[task.name] = name, cpu_s, num_wakes
    return found


def spend(run: Run, pids: list[int], is_over: Callable[[], bool]) -> None:
    """Adds what the processes spend until it is over."""
    before, started_at = reading(pids), time.perf_counter()
    while not is_over():
        time.sleep(0.005)
    run.seconds = time.perf_counter() - started_at
    for task, (name, cpu_s, num_wakes) in reading(pids).items():
        _, old_cpu_s, old_wakes = before.get(task, (name, 0.0, 0))
        run.spent[name][0] += cpu_s - old_cpu_s
        run.spent[name][1] += num_wakes - old_wakes


def read_stream(url: str, body: bytes, arrivals: list[float]) -> None:
    """Appends the instant at which each event with text came. Raises RuntimeError for a refusal."""
    address = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as client:
        client.sendall(head.encode() + body)
        tail = b""
        while data := client.recv(1 << 16):
            arrivals += [time.perf_counter()] * len(_TEXT.findall(data))
            tail = (tail + data)[-512:]
    if b"[DONE]" not in tail:
        raise RuntimeError(f"the stream ended early: {tail.decode(errors='replace')}")


def measure(url: str, pids: list[int], args: argparse.Namespace) -> Run:
    """Measures from the first tokens of all streams until one of them is almost over."""
    messages = [{"role": "user", "content": "Tell a long story."}]
    fields = {"max_tokens": args.tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    body = json.dumps({"model": args.model, "messages": messages, **fields}).encode()
    arrivals: list[list[float]] = [[] for _ in range(args.concurrency)]
    threads = [threading.Thread(target=read_stream, args=(url, body, own)) for own in arrivals]
    for thread in threads:
        thread.start()
    while not all(arrivals) and all(thread.is_alive() for thread in threads):
        time.sleep(0.005)
    run, num_before = Run(), sum(map(len, arrivals))
    almost = args.tokens - 8
    spend(run, pids, lambda: max(map(len, arrivals)) >= almost or not all(t.is_alive() for t in threads))
    run.num_tokens = sum(map(len, arrivals)) - num_before
    for thread in threads:
        thread.join()
    for own in arrivals:
        run.gaps_s += [later - earlier for earlier, later in itertools.pairwise(own[1:])]
    return run


def show(runs: list[Run]) -> None:
    if all(run.gaps_s for run in runs):
        middle = statistics.median(statistics.median(run.gaps_s) for run in runs)
        low = statistics.median(statistics.quantiles(run.gaps_s, n=10)[0] for run in runs)
        print(f"ITL p50 {1e3 * middle:.2f} ms, p10 {1e3 * low:.2f} ms; {len(runs)} runs")
    unit = "token" if runs[0].num_tokens else "second"
    print(f"{'process':36} {f'CPU ms/{unit}':>14} {f'wake-ups/{unit}':>16}")
    names = {name for run in runs for name in run.spent}
    costs = {name: list(zip(*(run.per_unit(name) for run in runs), strict=True)) for name in names}
    rows = {name: [statistics.median(column) for column in columns] for name, columns in costs.items()}
    for name, row in sorted(rows.items(), key=lambda item: -item[1][0]):
        print(f"{name:36} {row[0]:14.3f} {row[1]:16.2f}")
    others = [name for name in names if name not in (*MODELS, "Door")]
    total = statistics.median(sum(run.per_unit(name)[0] for name in others) for run in runs)
    print(f"{'all but Door and model replicas':36} {total:14.3f}")


def _processes() -> list[Path]:
    return [entry for entry in PROC.iterdir() if entry.name.isdigit()]


def _listeners(port: int) -> list[str]:
    """Inodes of the sockets that listen on this TCP port."""
    rows = [line.split() for line in (PROC / "net/tcp").read_text().splitlines()[1:]]
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rpartition(":")[2], 16) == port]


def _cluster_of(process: Path) -> bytes | None:
    with contextlib.suppress(OSError):
        variables = (process / "environ").read_bytes().split(b"\0")
        return next((variable for variable in variables if variable.startswith(b"RAY_TMPDIR=")), None)
    return None


def _parent(process: Path) -> int:
    with contextlib.suppress(OSError):
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _lineage(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    """The process, its parent and so on."""
    while pid:
        yield pid
        pid = parents.get(pid, 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", action="append", help="of a cluster; may be repeated")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--streams", type=int, default=5, help="repetitions for each cluster; 0: idle")
    parser.add_argument("--seconds", type=float, default=10.0, help="idle time")
    parser.add_argument("--concurrency", type=int, default=1)
    args = parser.parse_args()
    urls = args.url or ["http://127.0.0.1:8000"]
    pids = {url: pids_of(url) for url in urls}
    runs: dict[str, list[Run]] = {url: [Run()] if not args.streams else [] for url in urls}
    for url in urls if not args.streams else ():
        end = time.perf_counter() + args.seconds
        spend(runs[url][0], pids[url], lambda end=end: time.perf_counter() >= end)
    for _, url in itertools.product(range(args.streams), urls):
        runs[url].append(measure(url, pids[url], args))
    for url in urls:
        print(
            f"\n{url}, {args.concurrency} at once, {args.tokens} tokens each"
            if args.streams
            else f"\n{url}, idle"
        )
        show(runs[url])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
