"""Bugs that histories have found, each with its seed and, where it says more, a small case of its own."""

from __future__ import annotations

from tests.fakes.engines import Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request


def test_room_of_an_item_in_the_cached_prefix_is_given_back_at_once() -> None:
    """The second item needs it. Before, nothing could be computed until the deadline, here and behind."""
    rig = Rig(feature_blocks=6, kv_blocks=40)
    relay = Relay(rig)
    first, second = make_item("a", 15), make_item("b", 15)  # four blocks of embeddings each
    relay.start(make_request("alone", 1, [first]), [first])
    relay.play()
    both = relay.start(make_request("both", 1, [first, second]), [first, second])
    behind = relay.start(make_request("behind", 4, [second]), [second])
    relay.play()
    assert both.error is None and both.is_over and behind.is_over
    relay.finish()
