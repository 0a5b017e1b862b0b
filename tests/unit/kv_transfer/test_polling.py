"""How often a transfer thread looks for news. Each look takes time from the threads that compute."""

from __future__ import annotations

import pytest

from kv_transfer.lease.transfer_engine import (
    MAX_POLL_INTERVAL_S,
    POLL_SHARE,
    WRITER_POLL_INTERVAL_S,
)

SHORT_S = 0.001  # the shortest pause, by default


def test_the_longer_a_lease_waits_the_less_often_it_is_polled(pair):
    pair.grant()
    assert pair.owner.pause_s() == SHORT_S
    pair.clock.at += 0.256
    assert pair.owner.pause_s() == pytest.approx(POLL_SHARE * 0.256)
    pair.clock.at += 10.0
    assert pair.owner.pause_s() == MAX_POLL_INTERVAL_S


def test_what_happens_to_a_lease_makes_polls_frequent_again(pair):
    grant = pair.grant()
    outgoing = pair.open(grant)
    pair.step()
    assert pair.writer.pause_s() == WRITER_POLL_INTERVAL_S
    pair.clock.at += 1.0
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3])
    assert pair.writer.pause_s() == SHORT_S
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.received and pair.owner.pause_s() == SHORT_S


def test_a_write_that_waits_for_its_bytes_is_polled_often(pair):
    is_ready = False
    outgoing = pair.open(pair.grant())
    outgoing.write([7, 6, 5, 4], [0, 1, 2, 3], ready=lambda: is_ready)
    pair.step()
    pair.clock.at += 1.0
    assert pair.writer.pause_s() == SHORT_S
    is_ready = True
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.received
