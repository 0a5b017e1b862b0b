"""Three engines and a door in every order of events that hypothesis thinks of: starts, messages in flight,
steps, transfers, cancels, time. Then everything is let go, and nothing may be left; meanwhile no model may
read foreign bytes.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engines import MARGIN_S, TIMEOUT_S, Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request, make_video
from tests.faults import stress

NAMES = ("encoder", "prefill", "decode")
ITEMS = {name: make_item(name, num_rows) for name, num_rows in (("a", 3), ("b", 4), ("c", 9), ("bad", 5))}
ITEMS["long"] = make_video("long", 6)  # in two pieces

starts = st.tuples(
    st.just("start"),
    st.integers(1, 14),
    st.lists(st.sampled_from(sorted(ITEMS)), max_size=3),
    st.integers(1, 5),
    st.integers(1, 3),  # choices
    st.sampled_from([0, 0, 5]),  # tokens of a companion
    st.booleans(),  # decode computes the prompt, where that can be
)
cuts = st.sampled_from([0, 1, 2, 100])  # blocks of a prompt that travel; decode computes the end
on_worker = st.tuples(st.sampled_from(["send", "hear", "step", "move"]), st.sampled_from(NAMES))
cancels = st.tuples(st.just("cancel"), st.integers(0, 5))
others = st.one_of(
    st.tuples(st.just("prepare")),
    cancels,
    st.tuples(st.just("play"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 4.0, TIMEOUT_S])),
    st.tuples(st.just("drop"), st.sampled_from(NAMES)),
)


def act(rig: Rig, relay: Relay, event: tuple) -> None:
    match event:
        case ("start", num_tokens, names, max_tokens, num_choices, negative, prefills_locally):
            items = [ITEMS[name] for name in names]
            name = f"r{len(relay.stories)}"
            request = make_request(name, num_tokens, items, max_tokens, (), num_choices, negative)
            relay.start(request, items, prefills_locally=prefills_locally and not items and not negative)
        case ("send", name):
            relay.send_one(name)
        case ("hear", name):
            relay.hear_one(name)
        case ("step", name):
            rig.workers[name].step()
        case ("move", name):
            rig.workers[name].transfer_engine.step()
        case ("prepare",):
            rig.executor.run_one()
        case ("cancel", nth):
            if nth < len(relay.stories):
                relay.land(list(relay.stories)[nth])
        case ("play", rounds):
            relay.play(rounds)
        case ("wait", seconds):
            rig.clock.at += seconds
        case ("drop", name):
            relay.lose(name, dies=False)


def let_everything_end(rig: Rig, relay: Relay) -> None:
    for request_id in list(relay.stories):
        relay.land(request_id)
    relay.play(10)
    for _ in range(3):
        rig.clock.at += TIMEOUT_S + MARGIN_S
        relay.play(5)


@settings(max_examples=250)
@given(st.lists(st.one_of(starts, on_worker, on_worker, others), max_size=80), st.integers(0, 3), cuts)
def test_whatever_the_order_of_events_everything_returns(events, post_polls, cut):
    rig = Rig()
    rig.network.faults.post_polls = post_polls
    rig.bad_items.add("bad")
    relay = Relay(rig)
    rig.mid_step = lambda: relay.send_one("prefill")
    with rig.cut_ends(cut):
        for event in events:
            act(rig, relay, event)
        let_everything_end(rig, relay)
    rig.audit()
    assert sorted(rig.ended) == sorted(set(rig.ended))


@settings(max_examples=100)
@given(st.lists(st.one_of(starts, on_worker, cancels), max_size=60), st.integers(0, 3), cuts)
def test_whatever_the_order_of_messages_every_good_request_is_answered(events, post_polls, cut):
    """Also those whose embeddings were to come for a request that is cancelled."""
    rig = Rig()
    rig.network.faults.post_polls = post_polls
    relay = Relay(rig)
    rig.mid_step = lambda: relay.send_one("prefill")
    with rig.cut_ends(cut):
        for event in events:
            act(rig, relay, event)
        wanted = [story for story in relay.stories.values() if story.is_open]
        relay.play(400)
    for story in wanted:
        for line in story.lines:
            assert story.error is None and line.finish_reason is not None
            assert line.tokens == list(range(50, 50 + len(line.tokens)))
    let_everything_end(rig, relay)
    rig.audit()


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_nothing_is_wrong_or_lost_whatever_breaks_whenever(first_seed):
    """`python -m tests.faults.stress 1000` runs more of them."""
    counts = sum((stress.run(seed) for seed in range(first_seed, first_seed + 25)), Counter())
    for kind in ("right", "failed", "cancelled", "deaths", "cuts", "pauses", "transport faults"):
        assert counts[kind] > 0, kind
