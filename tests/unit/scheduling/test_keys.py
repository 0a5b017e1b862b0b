from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key, virtual_deadline

POLICY = SchedulingPolicy(aging_s=10, tokens_per_s=1000, text_share=0.5)
LOWEST_PRIORITY = -3

instants = st.integers(0, 1000).map(lambda eighths: eighths / 8)
tickets = st.builds(
    Ticket,
    request_id=st.just("any"),
    arrived_at=instants,
    num_tokens=st.integers(0, 100_000),
    is_text=st.booleans(),
    priority=st.integers(LOWEST_PRIORITY, 3),
)


def test_a_small_request_goes_before_a_large_one_of_the_same_instant():
    assert virtual_deadline(Ticket("small", 0, 10), POLICY) < virtual_deadline(Ticket("large", 0, 20), POLICY)


def test_one_class_is_worth_as_much_as_the_ageing_time():
    urgent = Ticket("urgent", 10, 5, priority=-1)
    assert virtual_deadline(urgent, POLICY) == virtual_deadline(Ticket("normal", 0, 5), POLICY)


def test_media_that_is_encoded_elsewhere_costs_nothing():
    assert order_key(Ticket("a", 1, 7, is_text=True), POLICY) == order_key(
        Ticket("b", 1, 7, is_text=False), POLICY
    )


def test_equal_deadlines_go_in_order_of_arrival():
    assert order_key(Ticket("early", 0, 2000), POLICY) < order_key(Ticket("late", 1, 1000), POLICY)


@given(tickets, tickets)
def test_only_requests_that_arrive_within_a_bounded_time_can_overtake(waiting: Ticket, later: Ticket):
    bound = virtual_deadline(waiting, POLICY) - LOWEST_PRIORITY * POLICY.aging_s
    if later.arrived_at > bound:
        assert order_key(waiting, POLICY) < order_key(later, POLICY)
