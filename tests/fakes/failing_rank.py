"""A rank of a worker that fails in its start: run in place of `cluster.worker.follower`.

`FAILING_RANK` says which rank, and `FAILING_PLACE` where; the others are as they always are.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from cluster.model import language_parts
from cluster.worker import follower, language

BEFORE_IT_MEETS, WITHOUT_NOTICE, KILLED = "before it meets the others", "without notice", "killed"
MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


def main(*pipes: int) -> None:
    rank, place = int(os.environ["FAILING_RANK"]), os.environ["FAILING_PLACE"]
    join = follower.join_group

    def joining(own_rank: int, *arguments: object) -> object:
        if own_rank != rank:
            return join(own_rank, *arguments)  # type: ignore[arg-type]
        if place == BEFORE_IT_MEETS:
            fail()
        if place == WITHOUT_NOTICE:  # while it loads, and the others come to a collective
            language_parts.settle_linears = then(lambda: keep_connections(pipes[-1]), fail)
        if place == KILLED:
            language.library_bytes = then(lambda: os.kill(os.getpid(), signal.SIGKILL))
        return join(own_rank, *arguments)  # type: ignore[arg-type]

    follower.join_group = joining  # type: ignore[assignment]
    follower.main(*pipes)


def fail() -> NoReturn:
    raise torch.OutOfMemoryError(MESSAGE)


def then(*acts: Callable[[], object]) -> Callable[..., object]:
    return lambda *_: [act() for act in acts]


def keep_connections(pipe: int) -> None:
    """Until the pipe ends: the other ranks do not see that this one has ended, as with NCCL."""
    if os.fork() == 0:
        os.read(pipe, 1)
        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
