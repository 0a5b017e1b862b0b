"""One prefill worker process: builds the engine and answers doors.

Room for embeddings is asked for on the event loop, as soon as the request arrives: an encoder must not wait for a model
step to know where to send.
"""

from __future__ import annotations

import asyncio
import functools

from cluster.clock import SystemClock
from cluster.config.settings import ClusterArgs
from cluster.errors import RequestError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.model.language import LanguageModel
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, Cancel, DecodeTarget, Failed, ReturnGrant, StartPrefill
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.setup import set_up
from cluster.worker.shell import WorkerShell
from kv_transfer.agents import make_agent
from kv_transfer.mover import Mover, MoverEvent, MoverFailed
from prefill_service.engine import PrefillEngine
from prefill_service.features import FeatureStore
from prefill_service.runner import PrefillRunner

STOP_TIMEOUT_S = 5.0
LEASE_MARGIN_S = 5.0  # how much longer than its writer an owner waits: see kv_transfer.receiver


class PrefillService:
    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        """Loads the language half of the model. Blocks for as long as that takes; raises ConfigError."""
        setup = set_up(args, replica_id)
        clock = SystemClock()
        self.replica_id = replica_id
        self._num_blocks = args.prefill.kv_blocks
        self._model = LanguageModel.load(
            args.model, dtype=setup.dtype, device=setup.device, block_size=args.block_size
        )
        kv = BlockMemory(self._model.kv_layout, self._num_blocks, setup.device)
        layout = feature_layout(self._model.feature_width, args.block_size, setup.dtype)
        num_feature_blocks = max(1, args.prefill.feature_bytes // layout.block_bytes)
        feature_memory = BlockMemory(layout, num_feature_blocks, setup.device)
        agent = make_agent(args.transport, replica_id)
        self._outbox = Outbox(self._deliver)
        self._mover = Mover(
            agent, clock, self._on_transfer, outgoing=kv, incoming=feature_memory, margin_s=lease_margin_s
        )
        self._features = FeatureStore(
            feature_memory, BlockPool(num_feature_blocks, args.block_size), self._mover
        )
        self._engine = PrefillEngine(
            self._model,
            PrefillRunner(self._model, kv, self._features),
            BlockPool(self._num_blocks, args.block_size),
            self._features,
            self._mover,
            self._outbox,
            clock,
            args.prefill.max_batch_tokens,
        )
        self._loop = StepLoop("prefill-engine", self._engine)
        self._shell = WorkerShell(
            setup.address, replica_id, setup.secret, self._outbox, self._loop, self._engine, self._on_message
        )

    async def start(self) -> Member:
        """Listen and run; called once, on the replica's event loop."""
        address = await self._shell.start()
        self._mover.start()
        self._loop.start()
        return Member(
            self.replica_id,
            Role.PREFILL,
            address,
            self._model.fingerprint,
            self._model.kv_layout.fingerprint,
            self._num_blocks,
        )

    async def stop(self) -> None:
        await self._shell.aclose()
        await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S)
        await asyncio.to_thread(self._mover.close, STOP_TIMEOUT_S)

    def check_health(self) -> None:
        self._loop.check_health()

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        match message:
            case StartPrefill():
                self._start(door, message)
            case DecodeTarget():
                self._loop.call(self._engine.set_target, message.request_id, message.grant)
            case Cancel():
                self._loop.call(self._engine.cancel, message.request_id)
            case ReturnGrant():
                self._mover.revoke(message.lease_id, "no writer was given the grant")

    def _start(self, door: DoorId, message: StartPrefill) -> None:
        request = message.request
        for item_idx, span in enumerate(request.prompt.media):
            num_rows = span.geometry.num_tokens
            if num_rows > self._features.max_rows:
                error = RequestError(
                    f"media item {item_idx} has {num_rows} embedding rows; a prefill worker holds {self._features.max_rows}"
                )
                return self._shell.send(door, Failed(request.request_id, to_info(error)))
        send = functools.partial(self._shell.call_from_thread, self._shell.send, door)
        for item_idx, span in enumerate(request.prompt.media):
            self._features.reserve(
                (request.request_id, item_idx), span.geometry.num_tokens, message.timeout_s, send
            )
        self._loop.call(self._engine.start, door, message)

    def _on_transfer(self, event: MoverEvent) -> None:
        if not isinstance(
            event, MoverFailed
        ):  # logged by the mover; leases still end, by their time at the latest
            self._loop.call(self._engine.on_transfer, event)

    def _deliver(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        self._shell.deliver_from_thread(batch)
