"""Which messages a peer has never read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.rpc.sent_log import MAX_SENT, SentLog


def log_of(*names: str) -> SentLog[str]:
    log: SentLog[str] = SentLog("peer")
    for name in names:
        log.sent(name, name)
    return log


def test_what_was_sent_behind_the_last_one_that_was_read_is_lost():
    assert log_of("a", "b", "c").take_unread("a") == ["b", "c"]
    assert log_of("a", "b", "c").take_unread("") == ["a", "b", "c"]
    assert log_of("a", "b", "c").take_unread("c") == []


def test_what_is_lost_is_said_once():
    log = log_of("a", "b")
    log.take_unread("a")
    log.sent("c", "c")
    assert log.take_unread("a") == ["c"], "b was taken before"


def test_of_a_process_that_does_not_know_this_one_nothing_is_known():
    log = log_of("a", "b")
    assert log.take_unread(None) == [] and log.take_unread("") == []


def test_a_repeated_message_that_was_read_is_the_last_one_with_its_name():
    assert log_of("a", "b", "a", "c").take_unread("a") == ["c"]


def test_a_log_that_is_full_forgets_the_oldest():
    log = log_of(*map(str, range(MAX_SENT + 2)))
    assert log.take_unread("") == [str(idx) for idx in range(2, MAX_SENT + 2)]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.booleans())))
def test_exactly_what_was_lost_is_found_however_often_connections_break(connections):
    """Over each connection some messages are sent and the first of them read. A greeting may be lost."""
    log, last_read, num_sent = log_of(), "", 0
    lost: list[str] = []
    for num_now, num_read, is_greeting_lost in connections:
        if is_greeting_lost:  # nothing is sent over this connection
            continue
        assert log.take_unread(last_read) == lost
        names = [str(num_sent + idx) for idx in range(num_now)]
        num_sent += num_now
        for name in names:
            log.sent(name, name)
        lost = names[num_read:]
        last_read = (["", last_read, *names[:num_read]])[-1]
    assert log.take_unread(last_read) == lost
