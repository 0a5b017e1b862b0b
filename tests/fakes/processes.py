"""Child processes of tests: forked from a server that has loaded what takes seconds to load, so that a child
starts at once.

The server is started with the first child and ends with the test process. It has run no computation and
opened no transport, so a child inherits no thread pool without its threads. A child sees the environment that
the server was started with; `call_with` changes it before the child loads a transport, which may read it
then.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

LOADED = (
    "cluster.model.language",
    "kv_transfer.agents.collective_agent",
    "kv_transfer.lease.transfer_engine",
)


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context


def call_with(environment: dict[str, str], module: str, name: str, *arguments: Any) -> None:
    """In a child: a function of a module that is imported after the environment has changed."""
    os.environ.update(environment)
    getattr(importlib.import_module(module), name)(*arguments)


def import_without(missing: Collection[str], modules: Iterable[str]) -> None:
    """In a child: as if `missing` were not installed. Of a module that needs a GPU, all imports come before
    it says so."""
    assert not {*missing} & {*sys.modules}, "loaded before the child was forked"
    sys.modules |= dict.fromkeys(missing)  # type: ignore[arg-type]
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            if "there is no GPU here" not in str(error):
                raise


def results_of_ranks(
    run_rank: Callable[..., None], names: Iterable[str], meeting: Path, *given: Any,
    num_ranks: int = 2, deadline_s: float = 120.0,
) -> list[list[Any]]:  # fmt: skip
    """By rank: what it has sent before it sent None, in a group that meets at the file `meeting`.

    Each rank is `run_rank(rank, num_ranks, meeting, *given, calls, results)`. calls: by name, the ends of
    rank 0's pipes to the others, or that of the rank's own pipe; it closes them when the case of that name
    is over. results: takes what it sends. Fails if a rank sends nothing for `deadline_s`, or does not end
    well, which is known at once."""
    context = fork_server()
    pipes = {name: [Pipe() for _ in range(1, num_ranks)] for name in names}
    ours, theirs = zip(*(Pipe() for _ in range(num_ranks)), strict=True)
    processes = []
    try:
        for rank in range(num_ranks):
            calls = {
                name: [end for end, _ in pairs] if rank == 0 else [pairs[rank - 1][1]]
                for name, pairs in pipes.items()
            }
            args = (rank, num_ranks, meeting, *given, calls, theirs[rank])
            processes.append(context.Process(target=run_rank, args=args, daemon=True))
            processes[-1].start()
        for end in chain(theirs, *chain.from_iterable(pipes.values())):
            end.close()  # or the other side would not see that a rank has closed its own, or is lost
        sent: list[list[Any]] = []
        for results in ours:
            sent.append([])
            with suppress(EOFError):
                while results.poll(deadline_s) and (result := results.recv()) is not None:
                    sent[-1].append(result)
        for process in processes:
            process.join(deadline_s)
        exits = [process.exitcode for process in processes]
        assert exits == [0] * num_ranks, f"ranks ended with {exits} after {list(map(len, sent))} results"
        return sent
    finally:
        for process in processes:
            process.kill()
