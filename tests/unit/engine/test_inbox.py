"""The doors' messages at a worker: what the event loop answers itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from cluster.engine.inbox import Inbox
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.members import Role
from cluster.types.messages import EncoderLost, Failed, StartDecode
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


class Process:
    """Of a worker. Keeps what is sent to doors, and what is called on the engine's thread."""

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.called: list[object] = []
        self.clock = ManualClock()
        self.seat = SimpleNamespace(attach=lambda engine: None)
        self.loop = SimpleNamespace(call=lambda *args: self.called.append(args))
        self.shell = SimpleNamespace(send=lambda door, message: self.sent.append(message))
        self.kv_transfer_engine = None
        self.feature_transfer_engine = SimpleNamespace(agent=SimpleNamespace(metadata=lambda: b""))

    def attach(self, on_message: Any) -> None:
        self.on_message = on_message


def inbox_of(process: Process, features: object, calls: Calls | None = None) -> None:
    own: Any = process, SimpleNamespace(start=None), features
    Inbox(Role.LANGUAGE, *own, calls=calls)


def test_an_item_that_never_fits_fails_its_request_and_ends_the_serve_call() -> None:
    process, calls = Process(), Calls()
    inbox_of(process, SimpleNamespace(max_rows=8), calls)
    item = PlacedMedia(Modality.IMAGE, "image", ((0, 9),), MediaGeometry(9))
    prompt = Prompt(tuple(range(10)), (item,))
    request = GenerateRequest("r", prompt, (SamplingParams(),), StopParams(4))
    process.on_message(1, StartDecode(request, 1.0, prefills=True))
    assert [type(message) for message in process.sent] == [Failed] and not process.called
    assert calls.num_open == 0


def test_the_loss_of_an_encoder_reaches_the_room_of_its_item() -> None:
    process, renewed = Process(), []
    inbox_of(process, SimpleNamespace(renew=lambda *args: renewed.append(args)))
    process.on_message(1, EncoderLost("r", 2, "lease"))
    assert renewed == [(("r", 2), "lease")]
