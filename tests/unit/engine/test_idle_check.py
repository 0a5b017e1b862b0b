"""What an idle engine does about the record of its KV blocks."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from cluster.engine.idle_check import IDLE_S
from cluster.errors import BookkeepingError
from cluster.types.messages import FinishReason
from tests.fakes.engines import Rig
from tests.fakes.requests import make_item, make_request


@pytest.fixture
def rig():
    return Rig()


@pytest.fixture
def checks(rig, monkeypatch):
    """The pools that are checked, by name, in order."""
    checked: list[str] = []
    for name in ("prefill", "decode"):
        pool = rig.pools[name]
        check = pool.check_integrity
        monkeypatch.setattr(
            pool, "check_integrity", lambda name=name, check=check: (checked.append(name), check())
        )
    return checked


def finish(rig, relay, name):
    story = relay.start(make_request(name, 12), [])
    relay.play()
    assert story.finish_reason is FinishReason.LENGTH
    become_idle(rig)


def become_idle(rig):
    rig.turn(3)
    rig.clock.at += IDLE_S
    rig.turn(3)


def test_the_pool_is_checked_once_for_each_idle_time(rig, relay, checks):
    rig.turn(5)
    assert checks == [], "nothing has come yet"
    for name in ("first", "second"):
        checks.clear()
        finish(rig, relay, name)
        rig.turn(5)
        assert sorted(checks) == ["decode", "prefill"]
    assert rig.prefill.engine.load().num_pool_faults == 0


def test_a_busy_engine_is_not_checked(rig, relay, checks):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    while relay.to_worker["prefill"]:
        relay.send_one("prefill")
    rig.turn(3)
    rig.clock.at += IDLE_S
    rig.turn(3)
    assert not rig.prefill.engine.load().is_idle and checks == [], "it waits for the item"
    relay.play()
    rig.turn(3)
    assert checks == [], "a next request must not wait for it"
    become_idle(rig)
    assert sorted(checks) == ["decode", "prefill"]


@pytest.mark.parametrize("fault", ["leak", "two states"])
def test_an_idle_engine_with_wrong_blocks_empties_them_and_goes_on(rig, relay, caplog, monkeypatch, fault):
    """It counts and logs the fault, and the next request gets every block."""
    pool = rig.pools["prefill"]
    with monkeypatch.context() as patched:
        if fault == "leak":
            pool.allocate(1)
        else:
            check = Mock(side_effect=BookkeepingError("a block has two states"))
            patched.setattr(pool, "check_integrity", check)
        finish(rig, relay, "first")
    assert rig.prefill.engine.load().num_pool_faults == 1
    assert "not in order" in caplog.text
    assert (pool.num_free, pool.num_cached) == (pool.num_blocks, 0)
    finish(rig, relay, "second")
    load = rig.prefill.engine.load()
    assert load.num_pool_faults == 1 and load.is_idle and pool.num_cached > 0
