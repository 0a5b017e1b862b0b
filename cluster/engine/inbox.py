"""Passes the doors' messages to the engines of a worker process: to its language engine, and to its encoder
if it has one (`EncoderPort`).

The encoder works beside the language engine, on a thread of its own. The two know each other only by
`OwnEmbeddings`.

Room for embeddings is requested on the event loop, as soon as the request arrives: an encoder must not wait
for a model step to learn where to send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cluster.engine.adapters import HeldAdapters
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.errors import RequestError, to_info
from cluster.kvcache.memory import BlockMemory
from cluster.types.members import Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeTarget,
    EncoderLost,
    EncodeTarget,
    Failed,
    GrantPassed,
    ReturnGrant,
    SetAdapters,
    StartDecode,
    StartEncode,
    StartPrefill,
)
from cluster.worker.outbox import DoorId
from cluster.worker.process import WorkerProcess
from kv_transfer.lease.transfer import BlockTransfer


class OwnEmbeddings:
    """What a worker's encoder makes for prompts of the same worker: copied into the room that they have
    reserved. Any thread."""

    def __init__(self, features: FeatureStore, engine: LanguageEngine, process: WorkerProcess):
        self._features, self._engine, self._process = features, engine, process

    def deposit(self, request_id: str, item_idx: int, blocks: Callable[[], Tensor]) -> bool:
        """`FeatureStore.deposit`. False: there is no room."""
        items = self._features.deposit((request_id, item_idx), blocks)
        if items is not None:
            self._process.loop.call(self._engine.on_items, items, self._process.clock.now())
        return items is not None

    def give_up(self, request_id: str, item_idx: int) -> None:
        """`FeatureStore.give_up`."""
        self._features.give_up((request_id, item_idx))


class EncoderPort(Protocol):
    """The encoder of a worker that encodes, too."""

    memory: BlockMemory  # embeddings are sent from here
    modalities: tuple[str, ...]
    row_bytes: int
    call_bytes: int  # that its calls will take beside what it has allocated

    def attach(self, process: WorkerProcess, own_prompts: OwnEmbeddings) -> None: ...

    def on_message(self, door: DoorId, message: AnyMessage) -> None: ...

    def on_room(self, request_id: str, item_idx: int) -> None:
        """A prompt of this worker has room for the embeddings of an item. Any thread; never waits."""
        ...

    def close(self) -> None: ...


class ServeCalls(Protocol):
    """The Serve calls of the requests whose answers are generated in this process. Event loop only."""

    def start(self, request_id: str) -> None:
        """The request has arrived."""
        ...

    def end(self, request_id: str) -> None:
        """The request has left the engine."""
        ...

    async def run(self, request_id: str) -> None:
        """Returns when the request has ended here."""
        ...


class Inbox:
    def __init__(
        self,
        role: Role,
        process: WorkerProcess,
        engine: LanguageEngine,
        features: FeatureStore,
        encoder: EncoderPort | None = None,
        calls: ServeCalls | None = None,
        adapters: HeldAdapters | None = None,
    ):
        """Attaches the engine and the encoder to the process, and itself to its sockets. Messages come on the
        event loop, after the process has started."""
        self._process, self._engine, self._features = process, engine, features
        self._encoder, self._calls, self._adapters = encoder, calls, adapters
        self._granting_engines: list[BlockTransfer] = [
            *([process.kv_transfer_engine] if role.decodes else []),
            process.feature_transfer_engine,
        ]
        process.seat.attach(engine)
        if encoder is not None:
            encoder.attach(process, OwnEmbeddings(features, engine, process))
        # As in this worker's grants for embeddings: its own encoder does not write to these.
        self._own_metadata = process.feature_transfer_engine.agent.metadata()
        process.attach(self._on_message)

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        if self._encoder is not None and isinstance(message, StartEncode | EncodeTarget | Cancel):
            self._tell_encoder(self._encoder, door, message)
        if self._calls is not None and isinstance(message, StartDecode):
            self._calls.start(message.request.request_id)
        call = self._process.loop.call
        match message:
            case StartPrefill() | StartDecode():
                self._start(door, message)
            case DecodeTarget():
                received = message.grant.received(self._process.clock.now())
                self._engine.offer_target(message.request_id, received)
                call(self._engine.take_targets)
            case Cancel() if message.item_idx is None:
                call(self._engine.cancel, message.request_id, message.choice_idx)
            case SetAdapters() if self._adapters is not None:
                call(self._adapters.want, message.wanted)
            case EncoderLost():
                self._features.renew((message.request_id, message.item_idx), message.lease_id)
            # These two may send messages to other ranks, so they do not run on the event loop.
            case GrantPassed():
                for engine in self._granting_engines:
                    call(engine.note_writer, message.lease_id, message.processes)
            case ReturnGrant():
                for engine in self._granting_engines:
                    call(engine.revoke, message.lease_id, "no writer was given the grant")

    def _tell_encoder(
        self, encoder: EncoderPort, door: DoorId, message: StartEncode | EncodeTarget | Cancel
    ) -> None:
        """Its part of a message."""
        if isinstance(message, EncodeTarget) and message.grant.agent_metadata == self._own_metadata:
            # behind the encoder's earlier messages: one may call the item off
            self._process.encoder_seat.loop.call(self._features.fill_here, message.grant.lease_id)
            encoder.on_room(message.request_id, message.item_idx)
        elif not (isinstance(message, Cancel) and message.choice_idx is not None):
            encoder.on_message(door, message)

    def _start(self, door: DoorId, message: StartPrefill | StartDecode) -> None:
        came_at = self._process.clock.now()
        computes = isinstance(message, StartPrefill) or message.prefills
        if computes and not self._reserve(door, message):
            if self._calls is not None and isinstance(message, StartDecode):
                self._calls.end(message.request.request_id)
            return
        self._process.loop.call(self._engine.start, door, message, came_at)

    def _reserve(self, door: DoorId, message: StartPrefill | StartDecode) -> bool:
        """Asks for room for the request's embeddings. False: an item can never fit; the door is told."""
        request, features = message.request, self._features
        for item_idx, item in enumerate(request.prompt.media):
            num_rows = item.geometry.num_tokens
            if num_rows > features.max_rows:
                error = RequestError(
                    f"media item {item_idx} has {num_rows} embedding rows; a worker holds {features.max_rows}"
                )
                self._process.shell.send(door, Failed(request.request_id, to_info(error)))
                return False
        send = functools.partial(self._process.shell.call_from_thread, self._process.shell.send, door)
        for item_idx, item in enumerate(request.prompt.media):
            key, on_room = (request.request_id, item_idx), None
            if self._encoder is not None and item_idx in message.encodes:
                on_room = functools.partial(self._encoder.on_room, *key)
            num_rows, is_wanted = item.geometry.num_tokens, item_idx not in message.cached
            features.reserve(
                key, item.media_hash, num_rows, message.timeout_s, send, on_room, is_wanted=is_wanted
            )
        return True
