from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.running import choose_victim, select_batch


@dataclass(eq=False)
class Row:
    request_id: str
    priority: int = 0
    arrived_at: float = 0
    num_sequences: int = 1
    num_blocks: int = field(default=0)


def ids(rows: list[Row]) -> str:
    return "".join(row.request_id for row in rows)


def test_all_requests_run_while_they_fit():
    running = deque([Row("a"), Row("b")])
    assert ids(select_batch(running, 2)) == "ab" == ids(select_batch(running, 2))


def test_when_more_run_than_fit_they_rotate():
    running = deque(Row(name) for name in "abcde")
    assert [ids(select_batch(running, 2)) for _ in range(5)] == ["ab", "cd", "ea", "bc", "de"]


def test_those_that_wait_keep_their_turn():
    running = deque(Row(name) for name in "abcd")
    assert ids(select_batch(running, 2, {"a"})) == "bc"
    assert ids(select_batch(running, 2, {"a"})) == "db"
    assert ids(select_batch(running, 2)) == "ac"
    assert ids(select_batch(running, 4, {"a", "b"})) == "dc"


def test_a_group_runs_whole_or_not_at_all():
    running = deque([Row("a"), Row("b", num_sequences=2), Row("c")])
    assert [ids(select_batch(running, 2)) for _ in range(3)] == ["a", "b", "ca"]


def test_a_group_larger_than_the_batch_runs_alone_rather_than_never():
    running = deque([Row("a"), Row("b", num_sequences=9), Row("c")])
    assert [ids(select_batch(running, 4)) for _ in range(3)] == ["a", "b", "ca"]


def test_without_requests_the_batch_is_empty():
    assert select_batch(deque[Row](), 4) == []


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12), st.integers(1, 8))
def test_every_request_runs_once_before_another_runs_twice_more(sizes: list[int], max_batch_requests: int):
    running = deque(Row(str(i), num_sequences=size) for i, size in enumerate(sizes))
    num_runs = dict.fromkeys(running, 0)
    for _ in range(3 * len(sizes)):
        batch = select_batch(running, max_batch_requests)
        assert batch and (len(batch) == 1 or sum(row.num_sequences for row in batch) <= max_batch_requests)
        for row in batch:
            num_runs[row] += 1
        assert max(num_runs.values()) - min(num_runs.values()) <= 1
    assert set(running) == set(num_runs) and len(running) == len(sizes)


def test_the_newest_of_the_lowest_class_is_the_victim():
    rows = [Row("old low", 1, 0), Row("new low", 1, 5), Row("new high", 0, 9)]
    assert choose_victim(rows).request_id == "new low"
    assert choose_victim(rows[2:]).request_id == "new high"


def test_without_requests_there_is_no_victim():
    with pytest.raises(ValueError):
        choose_victim(list[Row]())


class Memory:
    """A decode worker in miniature: a block per step and request, a victim where none is free, recompute on
    return."""

    def __init__(self, num_blocks: int, max_batch_requests: int):
        self.num_free = num_blocks
        self.max_batch_requests = max_batch_requests
        self.running = deque[Row]()
        self.waiting = list[Row]()
        self.finished = set[str]()

    def step(self, num_blocks_needed: int) -> None:
        while self.waiting and self.num_free:
            row = self.waiting.pop(0)
            row.num_blocks, self.num_free = 1, self.num_free - 1
            self.running.append(row)
        for row in select_batch(self.running, self.max_batch_requests):
            if row in self.running and self._grow(row) and row.num_blocks >= num_blocks_needed:
                self._leave(row)
                self.finished.add(row.request_id)

    def _grow(self, row: Row) -> bool:
        while not self.num_free:
            victim = choose_victim(self.running)
            self._leave(victim)
            self.waiting.append(victim)
            if victim is row:
                return False
        row.num_blocks, self.num_free = row.num_blocks + 1, self.num_free - 1
        return True

    def _leave(self, row: Row) -> None:
        self.running.remove(row)
        row.num_blocks, self.num_free = 0, self.num_free + row.num_blocks


rows = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8)


@given(rows, st.integers(2, 6), st.integers(0, 8), st.integers(1, 4))
def test_the_oldest_of_the_best_class_always_finishes_while_newer_ones_keep_coming(
    cases: list[tuple[int, int]], num_needed: int, num_spare: int, max_batch_requests: int
):
    memory = Memory(num_needed + num_spare, max_batch_requests)
    memory.waiting = [Row(f"{i}", priority, arrived_at) for i, (priority, arrived_at) in enumerate(cases)]
    ranked = sorted(memory.waiting, key=lambda row: (row.priority, row.arrived_at, row.request_id))
    worst_class = ranked[-1].priority
    for number in range(40 * (len(cases) + 1) * num_needed):
        if number % 3 == 0 and len(memory.waiting) + len(memory.running) < 20:
            memory.waiting.append(Row(f"new {number}", worst_class, 10 + number))
        unfinished = [row for row in ranked if row.request_id not in memory.finished]
        if not unfinished:
            break
        head = unfinished[0]
        was_running = head in memory.running
        memory.step(num_needed)
        assert not was_running or head in memory.running or head.request_id in memory.finished
    assert {row.request_id for row in ranked} <= memory.finished
