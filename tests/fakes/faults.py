"""Calls of engines that fail, and requests of every kind that meet them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes.relay import Relay, Story
from tests.fakes.requests import make_item, make_request, make_video

MAX_TOKENS = 6


class Fault(Exception):
    """A bug that one request meets."""


def poison(owner: Any, name: str, is_poisoned: Callable[..., bool]) -> None:
    function = getattr(owner, name)

    def call(*args: Any) -> Any:
        if is_poisoned(*args):
            raise Fault
        return function(*args)

    setattr(owner, name, call)


def start_all(relay: Relay) -> list[Story]:
    """Requests of every kind."""
    a, b, c = make_item("a", 3), make_item("b", 4), make_video("c", 6)
    return [
        relay.start(make_request("text", 9, max_tokens=MAX_TOKENS)),
        relay.start(make_request("choices", 6, max_tokens=MAX_TOKENS, num_choices=2)),
        relay.start(make_request("guided", 5, max_tokens=MAX_TOKENS, negative=6)),
        relay.start(make_request("media", 4, [a, b], max_tokens=MAX_TOKENS), [a, b]),
        relay.start(make_request("video", 3, [c], max_tokens=MAX_TOKENS), [c]),
        relay.start(make_request("stays", 10, max_tokens=MAX_TOKENS, num_choices=2), prefills_locally=True),
        relay.start(make_request("same", 9, max_tokens=MAX_TOKENS)),
    ]


def play_until_over(relay: Relay) -> None:
    for _ in range(200):
        relay.play(1)
        if not any(story.is_open for story in relay.stories.values()):
            return


def has_answer(story: Story) -> bool:
    wanted = list(range(50, 50 + MAX_TOKENS))
    return all(line.token_ids == wanted and line.finish_reason is not None for line in story.lines)


def errors(relay: Relay) -> list[str]:
    return [story.error for story in relay.stories.values() if story.error is not None]


def finish(relay: Relay) -> None:
    """Nobody has died: one more request is served. Then nothing is held."""
    item = make_item("last", 3)
    last = relay.start(make_request("last", 5, [item], max_tokens=MAX_TOKENS), [item])
    play_until_over(relay)
    assert has_answer(last), last
    relay.finish()
