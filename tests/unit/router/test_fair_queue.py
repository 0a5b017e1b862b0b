"""Shares of tenants and classes, against the theorem and against a queue that is written down plainly."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.fair_queue import AdmissionTicket, ClassQueue, FairQueue

WEIGHTS = {"high": 4.0, "low": 1.0}


def ticket(name: str, tenant: str = "a", work_s: float = 1.0, class_name: str = "high", is_text: bool = True):
    return AdmissionTicket(name, tenant, class_name, is_text, work_s, 0, 0.0, 0.0)


def drain(queue: FairQueue, number: int | None = None) -> list[AdmissionTicket]:
    """Take them in order."""
    taken: list[AdmissionTicket] = []
    while (head := queue.head()) is not None and (number is None or len(taken) < number):
        taken.append(queue.take(head.ticket.request_id).ticket)
    return taken


works = st.lists(st.floats(0.01, 5.0), min_size=1, max_size=25)


@given(works, works)
def test_while_two_tenants_wait_what_they_got_differs_by_one_request_of_each_at_most(first, second):
    queue = FairQueue(WEIGHTS)
    for tenant, costs in (("a", first), ("b", second)):
        for idx, work_s in enumerate(costs):
            queue.push(ticket(f"{tenant}{idx}", tenant, work_s), float(idx), work_s)
    got, left = {"a": 0.0, "b": 0.0}, {"a": len(first), "b": len(second)}
    for taken in drain(queue):
        if not left["a"] or not left["b"]:
            break
        got[taken.tenant] += taken.work_s
        left[taken.tenant] -= 1
        assert abs(got["a"] - got["b"]) <= max(first) + max(second) + 1e-9


@given(works, works)
def test_while_two_classes_wait_what_they_got_follows_their_weights(high, low):
    queue = FairQueue(WEIGHTS)
    for name, costs in (("high", high), ("low", low)):
        for idx, work_s in enumerate(costs):
            queue.push(ticket(f"{name}{idx}", work_s=work_s, class_name=name), float(idx), work_s)
    got, left = {"high": 0.0, "low": 0.0}, {"high": len(high), "low": len(low)}
    for taken in drain(queue):
        if not left["high"] or not left["low"]:
            break
        got[taken.class_name] += taken.work_s / WEIGHTS[taken.class_name]
        left[taken.class_name] -= 1
        assert abs(got["high"] - got["low"]) <= max(high) / 4 + max(low) + 1e-9


def test_a_tenant_that_comes_back_at_once_gets_no_more_than_its_share():
    queue = FairQueue(WEIGHTS)
    for tenant in "xyz":
        for idx in range(20):
            queue.push(ticket(f"{tenant}{idx}", tenant), float(idx), 1.0)
    num_served = 0
    for round_ in range(40):
        if f"again{num_served}" not in queue:
            queue.push(ticket(f"again{num_served}", "one by one"), float(round_), 1.0)
        num_served += drain(queue, 1)[0].tenant == "one by one"
    assert num_served == 10


@pytest.mark.parametrize("late", [{"tenant": "b"}, {"class_name": "low"}])
def test_a_tenant_or_class_gets_nothing_for_the_time_it_did_not_ask(late: dict[str, Any]):
    queue = FairQueue({"high": 1.0, "low": 1.0})
    for idx in range(20):
        queue.push(ticket(f"early{idx}"), float(idx), 1.0)
    drain(queue, 10)
    for idx in range(10):
        queue.push(ticket(f"late{idx}", **late), float(idx), 1.0)
    assert ["late" in each.request_id for each in drain(queue, 8)].count(True) == 4


def test_the_work_before_a_newcomer_is_its_own_and_as_much_of_each_other_tenant():
    queue = ClassQueue(1.0)
    whole = FairQueue({"high": 1.0})
    for idx in range(10):
        whole.push(ticket(f"a{idx}", "a"), float(idx), 1.0)
    queue = whole.of_class("high")
    assert queue.cost_ahead_s("a", True, 1.0) == 10.0
    assert queue.cost_ahead_s("b", True, 1.0) == 1.0
    whole.push(ticket("b0", "b"), 0.0, 1.0)
    assert queue.cost_ahead_s("b", True, 1.0) == 3.0 and queue.cost_ahead_s("b", False, 1.0) == 0.0


moves = st.lists(
    st.tuples(
        st.sampled_from(["push", "push", "take", "take text", "remove"]), st.sampled_from("abc"),
        st.sampled_from(list(WEIGHTS)), st.booleans(), st.integers(1, 8), st.integers(0, 9),
    ),
    max_size=60,
)  # fmt: skip


class PlainQueue:
    """The same by looking at everything each time."""

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, AdmissionTicket]] = []  # deadline, number, ticket
        self.virtual = {"": 0.0, **dict.fromkeys(WEIGHTS, 0.0)}
        self.tags: dict[tuple[str, ...], float] = {}
        self.since: dict[tuple[str, ...], int] = {}

    def push(self, deadline: int, number: int, new: AdmissionTicket) -> None:
        for flow, level in (((new.class_name,), ""), ((new.class_name, new.tenant), new.class_name)):
            if not any(self.flow(each, len(flow)) == flow for _, _, each in self.waiting):
                self.tags[flow] = max(self.virtual[level], self.tags.get(flow, 0.0))
                self.since[flow] = number
        self.waiting.append((deadline, number, new))

    @staticmethod
    def flow(each: AdmissionTicket, depth: int) -> tuple[str, ...]:
        return (each.class_name, each.tenant)[:depth]

    def head(self, text_only: bool) -> AdmissionTicket | None:
        left = [entry for entry in self.waiting if entry[2].is_text or not text_only]
        names = list(WEIGHTS)

        def order(entry: tuple[int, int, AdmissionTicket]):
            both = self.flow(entry[2], 2)
            return (
                self.tags[both[:1]], names.index(both[0]), self.tags[both], self.since[both], both[1], entry[:2],
            )  # fmt: skip

        return min(left, key=order)[2] if left else None

    def take(self, head: AdmissionTicket) -> None:
        for depth, level, weight in ((1, "", WEIGHTS[head.class_name]), (2, head.class_name, 1.0)):
            flow = self.flow(head, depth)
            self.virtual[level] = max(self.virtual[level], self.tags[flow])
            self.tags[flow] += head.work_s / weight
        self.remove(head)

    def remove(self, gone: AdmissionTicket) -> None:
        self.waiting = [entry for entry in self.waiting if entry[2] is not gone]


@given(moves)
def test_the_queue_chooses_as_one_that_looks_at_everything(steps):
    queue, plain = FairQueue(WEIGHTS), PlainQueue()
    for number, (move, tenant, class_name, is_text, work_s, deadline) in enumerate(steps, 1):
        if move == "push":
            new = ticket(f"r{number}", tenant, float(work_s), class_name, is_text)
            queue.push(new, deadline, new.work_s)
            plain.push(deadline, number, new)
            continue
        text_only = move == "take text"
        expected, head = plain.head(text_only), queue.head(text_only=text_only)
        assert (head and head.ticket) is expected
        if expected is not None:
            (queue.remove if move == "remove" else queue.take)(expected.request_id)
            (plain.remove if move == "remove" else plain.take)(expected)
        assert len(queue) == len(plain.waiting)
        for name in WEIGHTS:
            waiting = [each for _, _, each in plain.waiting if each.class_name == name]
            assert queue.of_class(name).cost_s == [
                sum(each.work_s for each in waiting if each.is_text == is_text) for is_text in (False, True)
            ]
