from cluster.types.curves import ServiceCurves
from cluster.types.messages import CacheChanged, LoadReport, Measured, TokenEvent, Tokens
from cluster.worker.outbox import Outbox


def make() -> tuple[Outbox, list]:
    delivered: list = []
    return Outbox(delivered.append), delivered


def test_all_tokens_of_a_step_travel_in_one_frame_per_door():
    outbox, delivered = make()
    outbox.add_door(1)
    outbox.add_door(2)
    events = [TokenEvent("a", (5,)), TokenEvent("b", (6,))]
    outbox.token(1, events[0])
    outbox.token(2, TokenEvent("c", (7,)))
    outbox.token(1, events[1])
    outbox.flush(LoadReport(num_running=3))
    (batch,) = delivered
    assert (1, Tokens(tuple(events), LoadReport(num_running=3))) in batch and len(batch) == 2


def test_an_unchanged_load_is_not_repeated():
    outbox, delivered = make()
    outbox.add_door(1)
    outbox.flush(LoadReport())
    outbox.flush(LoadReport())
    assert len(delivered) == 1


def test_a_door_that_is_gone_is_told_nothing():
    outbox, delivered = make()
    outbox.add_door(1)
    outbox.token(1, TokenEvent("a", (5,)))
    outbox.remove_door(1)
    outbox.flush(LoadReport())
    assert delivered == []


def test_a_broadcast_reaches_every_door_that_is_connected():
    outbox, delivered = make()
    for door in (1, 2):
        outbox.add_door(door)
    outbox.flush(LoadReport())
    outbox.broadcast(CacheChanged(("a",), ()))
    outbox.add_door(3)
    outbox.flush(LoadReport())
    told = [door for door, message in delivered[-1] if isinstance(message, CacheChanged)]
    assert sorted(told) == [1, 2]


def test_a_new_door_is_greeted_first_with_what_is_true_then():
    outbox, delivered = make()
    content = ["a"]
    outbox.greet_with(lambda: CacheChanged(tuple(content), ()))
    outbox.greet_with(lambda: Measured(ServiceCurves(max_step_units=len(content))))
    content.append("b")
    outbox.add_door(1)
    content.append("c")
    outbox.broadcast(CacheChanged(("c",), ()))
    outbox.flush(LoadReport())
    assert [message for _, message in delivered[0]][:3] == [
        CacheChanged(("a", "b"), ()), Measured(ServiceCurves(max_step_units=2)), CacheChanged(("c",), ())
    ]  # fmt: skip


def test_a_load_that_is_not_told_is_told_with_the_next_flush():
    outbox, delivered = make()
    outbox.add_door(1)
    outbox.flush(LoadReport(num_running=1))
    delivered.clear()
    event = TokenEvent("r", (5,))
    outbox.token(1, event)
    outbox.flush()
    assert delivered == [[(1, Tokens((event,), None))]]
    outbox.flush()
    outbox.flush(LoadReport(num_running=1))
    assert len(delivered) == 1, "nothing has changed"
    outbox.flush(LoadReport(num_running=2))
    assert delivered[1:] == [[(1, Tokens((), LoadReport(num_running=2)))]]
