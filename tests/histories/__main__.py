"""python -m tests.histories run 17 [--trace]      one history again
python -m tests.histories many 100000 [0]       so many, from this seed on, on all cores
python -m tests.histories mutants [NAME …]      planted bugs: how many seeds each takes to be found
python -m tests.histories crashes               a process dies before step N of a scripted mix, for every N
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from os import cpu_count

from tests.histories.history import History, HistoryError, play
from tests.histories.hunt import MUTANTS, NAMED, seeds_to_find
from tests.histories.steps import VICTIMS, crash_everywhere

CHUNK = 100


def run(seed: int, *, has_trace: bool) -> int:
    history, failure = History(seed), ""
    try:
        counts = history.run()
    except HistoryError as error:
        failure = str(error)
    for line in history.trace_lines() if has_trace else ():
        print(line)
    print(failure or dict(counts))
    return bool(failure)


def chunk(first: int, number: int) -> tuple[Counter[str], list[str]]:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    for seed in range(first, first + number):
        try:
            counts += play(seed)
        except HistoryError as error:
            failures.append(str(error))
    return counts, failures


def many(number: int, first: int) -> int:
    counts: Counter[str] = Counter()
    failures: list[str] = []
    began_at = time.monotonic()
    with ProcessPoolExecutor(cpu_count()) as pool:
        starts = range(first, first + number, CHUNK)
        jobs = [pool.submit(chunk, start, min(CHUNK, first + number - start)) for start in starts]
        for job in jobs:
            more, failed = job.result()
            counts += more
            failures += failed
            for failure in failed:
                print(failure, flush=True)
    seconds = time.monotonic() - began_at
    print(f"{number} histories in {seconds:.0f} s, {number / seconds:.0f} a second; {len(failures)} failed")
    print(dict(sorted(counts.items())))
    return bool(failures)


def mutants(names: list[str]) -> int:
    num_missed = 0
    for name in names or MUTANTS:
        if name in NAMED:
            print(f"{name:32} {NAMED[name]}", flush=True)
            continue
        found = seeds_to_find(name)
        num_missed += found is None
        print(f"{name:32} {'not found' if found is None else f'{found[0]:4}  {found[1]}'}", flush=True)
    return bool(num_missed)


def crashes() -> int:
    for victim in VICTIMS:
        print(f"{victim}: killed before each of {crash_everywhere(victim)} steps", flush=True)
    return 0


def main() -> int:
    match sys.argv[1:]:
        case ["run", seed, *rest]:
            return run(int(seed), has_trace="--trace" in rest)
        case ["many", number, *rest]:
            return many(int(number), int(rest[0]) if rest else 0)
        case ["mutants", *names]:
            return mutants(names)
        case ["crashes"]:
            return crashes()
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main())
