"""Ranks of a worker load an adapter each for itself; rank 0 waits for all of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import pytest

from cluster.errors import ConfigError, UnavailableError
from cluster.types.adapters import AdapterEntry
from cluster.worker.adapter_loading import LoadAdapter, RankedLoader, follow_loads

ENTRY = AdapterEntry("mine", "digest")
Orders = list[tuple[str, int]]


def loading(orders: Orders, error: str = "") -> LoadAdapter:
    def load(entry: AdapterEntry, slot: int) -> None:
        orders.append((entry.digest, slot))
        if error:
            raise ConfigError(error)

    return load


@contextmanager
def other_rank(load: LoadAdapter) -> Iterator[Connection]:
    ours, theirs = Pipe()
    thread = threading.Thread(target=follow_loads, args=(theirs, load))
    thread.start()
    yield ours
    ours.close()
    thread.join(60)
    assert not thread.is_alive()


def test_all_ranks_load_it_before_any_request_may_have_it() -> None:
    own: Orders = []
    theirs: Orders = []
    with other_rank(loading(theirs)) as pipe:
        load = RankedLoader(loading(own), [pipe])
        for slot in (2, 1):
            load(ENTRY, slot)
            assert own == theirs
    assert own == [("digest", 2), ("digest", 1)]


def test_the_error_of_a_rank_is_that_of_the_worker_and_the_next_order_is_answered() -> None:
    errors = ["its folder is gone", ""]
    with other_rank(lambda *_: loading([], errors.pop(0))(ENTRY, 1)) as pipe:
        load = RankedLoader(loading([]), [pipe])
        with pytest.raises(ConfigError, match="its folder is gone"):
            load(ENTRY, 1)
        load(ENTRY, 1)


class TwoOrders:
    """A rank's end of a pipe that ends after the second order."""

    def __init__(self, pipe: Connection):
        self._pipe, self._left = pipe, 2

    def recv_bytes(self) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise EOFError
        return self._pipe.recv_bytes()

    def send_bytes(self, data: bytes) -> None:
        self._pipe.send_bytes(data)


def test_a_rank_is_waited_for_until_a_time_and_its_late_answer_is_no_other_orders() -> None:
    ours, theirs = Pipe()
    errors, answers = ["too late", ""], [lambda: None, lambda: follow_loads(both, load)]
    both: Any = TwoOrders(theirs)

    def load(entry: AdapterEntry, slot: int) -> None:
        loading([], errors.pop(0))(entry, slot)

    ranked = RankedLoader(lambda *_: answers.pop(0)(), [ours], timeout_s=0.0)
    with pytest.raises(UnavailableError, match="in time"):
        ranked(ENTRY, 1)
    ranked(ENTRY, 1)
    assert errors == []


def test_a_rank_that_is_gone_is_named() -> None:
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(UnavailableError, match="gone"):
        RankedLoader(loading([]), [ours])(ENTRY, 1)
