"""The doors' messages at a worker: what the event loop answers itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.engine.inbox import Inbox
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.members import Role
from cluster.types.messages import Failed, StartDecode
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.fakes.clock import ManualClock


class Calls:
    """`num_open` counts Serve calls that wait for their request's end."""

    num_open = 0

    def start(self, request_id: str) -> None:
        self.num_open += 1

    def end(self, request_id: str) -> None:
        self.num_open -= 1

    async def run(self, request_id: str) -> None: ...


def test_an_item_that_never_fits_fails_its_request_and_ends_the_serve_call() -> None:
    sent, calls, started = [], Calls(), []
    process: Any = SimpleNamespace(
        clock=ManualClock(),
        seat=SimpleNamespace(attach=lambda engine: None),
        loop=SimpleNamespace(call=lambda *args: started.append(args)),
        shell=SimpleNamespace(send=lambda door, message: sent.append(message)),
        kv_transfer_engine=None,
        feature_transfer_engine=SimpleNamespace(agent=SimpleNamespace(metadata=lambda: b"")),
        attach=lambda on_message: setattr(process, "on_message", on_message),
    )
    features: Any = SimpleNamespace(max_rows=8)
    engine: Any = SimpleNamespace(start=None)
    Inbox(Role.LANGUAGE, process, engine, features, calls=calls)
    item = PlacedMedia(Modality.IMAGE, "image", ((0, 9),), MediaGeometry(9))
    prompt = Prompt(tuple(range(10)), (item,))
    request = GenerateRequest("r", prompt, (SamplingParams(),), StopParams(4))
    process.on_message(1, StartDecode(request, 1.0, prefills=True))
    assert [type(message) for message in sent] == [Failed] and not started
    assert calls.num_open == 0
