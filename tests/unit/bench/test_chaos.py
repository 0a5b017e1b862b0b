"""What `bench.chaos` takes for a complete answer, and what it sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from bench.chaos.calls import KINDS, endless, make_calls
from bench.chaos.client import Sending, judge, sending_of
from bench.chaos.run import when_lost
from bench.client import read_stream

DONE = b"data: [DONE]\n"


def event(index: int, text: str, reason: str | None = None) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n"


async def read(*lines: bytes) -> Sending:
    async def arriving() -> AsyncIterator[bytes]:
        for line in lines:
            yield line

    sending = sending_of(next(call for call in make_calls(1, len(KINDS)) if call.is_streamed))
    await read_stream(arriving(), sending, lambda: 0.0)
    judge(sending)
    return sending


async def test_a_stream_is_complete_with_its_last_line():
    sending = await read(event(1, "b"), event(0, "a"), event(0, "A", "stop"), event(1, "", "length"), DONE)
    assert not sending.failure and sending.choices == (("aA", "stop"), ("b", "length"))


async def test_what_ends_early_or_with_an_error_is_lost():
    assert (await read(event(0, "a", "stop"))).failure == "the stream ended early"
    error = b'data: {"error": {"message": "no worker"}}\n'
    assert (await read(event(0, "a"), error, DONE)).failure == "error event: no worker"


def test_every_call_is_sent_before_one_is_sent_again():
    calls = make_calls(1, len(KINDS))
    sent = endless(calls, 2)
    for _ in range(2):
        assert {next(sent).kind for _ in calls} == KINDS.keys()


@pytest.mark.parametrize(("started_at", "failure", "when"), [
    (1.0, "ClientConnectorError: refused", "open"),
    (3.0, "ClientConnectorError: refused", "refused"),
    (3.0, "HTTP 503: no worker", "later"),
])  # fmt: skip
def test_losses_are_told_apart(started_at: float, failure: str, when: str):
    (call,) = make_calls(1, 1)
    assert when_lost(Sending(call.kind, started_at, call=call, failure=failure), gone_at=2.0) == when
