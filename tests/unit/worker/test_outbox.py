from cluster.types.messages import LoadReport, TokenEvent, Tokens
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
