from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key
from cluster.scheduling.queue import MIN_DEAD_ENTRIES, WaitingQueue
from tests.fakes.watched import Watch

POLICY = SchedulingPolicy(aging_s=1, tokens_per_s=4, text_share=0.5)


def waiting_queue(*tickets: Ticket) -> WaitingQueue:
    queue = WaitingQueue(POLICY)
    for ticket in tickets:
        queue.push(ticket)
    return queue


def test_the_most_urgent_comes_out_first_and_equals_in_order_of_arrival():
    queue = waiting_queue(
        Ticket("large", 0, 100), Ticket("late", 1, 4), Ticket("first", 0, 8), Ticket("second", 0, 8)
    )
    assert [queue.pop().request_id for _ in range(len(queue))] == ["first", "second", "late", "large"]


def test_a_request_that_was_removed_never_comes_out_even_when_it_returns():
    queue = waiting_queue(Ticket("a", 0, 1), Ticket("b", 1, 1))
    queue.remove("a")
    assert "a" not in queue and len(queue) == 1
    queue.push(Ticket("a", 2, 1))
    assert [queue.pop().request_id for _ in range(len(queue))] == ["b", "a"]


def test_an_empty_queue_has_no_next_request():
    queue = waiting_queue(Ticket("a", 0, 1))
    queue.remove("a")
    queue.remove("a")
    assert not queue
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(IndexError):
        queue.pop()


def test_a_request_waits_once():
    with pytest.raises(ValueError, match="waits already"):
        waiting_queue(Ticket("a", 0, 1), Ticket("a", 5, 1))


operations = st.lists(
    st.tuples(
        st.sampled_from(["push", "pop", "remove"]), st.integers(0, 9), st.integers(0, 4), st.integers(0, 12)
    ),
    max_size=60,
)


@given(operations)
def test_the_queue_behaves_like_a_sorted_list(operations: list[tuple[str, int, int, int]]):
    queue, model = WaitingQueue(POLICY), list[Ticket]()
    for operation, number, arrived_at, num_tokens in operations:
        request_id = str(number)
        known = any(ticket.request_id == request_id for ticket in model)
        if operation == "push" and not known:
            ticket = Ticket(request_id, arrived_at, num_tokens)
            queue.push(ticket)
            model.append(ticket)
            model.sort(key=lambda ticket: order_key(ticket, POLICY))
        elif operation == "pop" and model:
            assert queue.pop() == model.pop(0)
        elif operation == "remove":
            queue.remove(request_id)
            model = [ticket for ticket in model if ticket.request_id != request_id]
        assert len(queue) == len(model)
        assert (request_id in queue) == any(ticket.request_id == request_id for ticket in model)
        assert not model or queue.peek() == model[0]


def test_removed_requests_do_not_pile_up():
    queue, watch = waiting_queue(Ticket("stays", -1, 0)), Watch()
    for number in range(1000):
        queue.push(Ticket(watch.name(str(number)), number, 1))
        queue.remove(str(number))
        assert len(watch.held) <= 2 * len(queue) + MIN_DEAD_ENTRIES + 1
    assert queue.pop().request_id == "stays"


def test_the_order_survives_when_most_requests_leave():
    queue = waiting_queue(*(Ticket(str(number), number * 7919 % 1000, 0) for number in range(1000)))
    for number in range(1000):
        if number % 5:
            queue.remove(str(number))
    arrivals = [queue.pop().arrived_at for _ in range(len(queue))]
    assert len(arrivals) == 200 and arrivals == sorted(arrivals)
