"""One encoder worker process: builds the engine and answers doors."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from cluster.clock import SystemClock
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, Cancel, EncodeTarget, StartEncode
from cluster.worker.loop import StepLoop
from cluster.worker.outbox import DoorId, Outbox
from cluster.worker.setup import set_up
from cluster.worker.shell import WorkerShell
from encoder_service.cache import EmbeddingCache
from encoder_service.engine import EncoderEngine
from encoder_service.runner import EncoderRunner
from kv_transfer.agents import make_agent
from kv_transfer.mover import Mover, MoverEvent, MoverFailed

MAX_BATCH_ROWS = 16_384  # embedding rows in one encoder call; bounds its activation memory
NUM_PREPARE_THREADS = 2  # decoding and preprocessing beside the encoder itself
STOP_TIMEOUT_S = 5.0


class EncoderService:
    def __init__(self, args: ClusterArgs, replica_id: str):
        """Loads the encoder half of the model. Blocks for as long as that takes; raises ConfigError."""
        setup = set_up(args, replica_id)
        clock = SystemClock()
        self.replica_id = replica_id
        processor = MediaProcessor.load(args.model)
        if processor is None:
            raise ConfigError(f"{args.model} is a text model; it needs no encoder pool")
        self._model = EncoderModel.load(args.model, dtype=setup.dtype, device=setup.device)
        self._layout = feature_layout(self._model.feature_width, args.block_size, setup.dtype)
        self._num_blocks = max(1, args.encode.cache_bytes // self._layout.block_bytes)
        memory = BlockMemory(self._layout, self._num_blocks, setup.device)
        agent = make_agent(args.transport, replica_id)
        self._executor = ThreadPoolExecutor(NUM_PREPARE_THREADS, thread_name_prefix="prepare")
        self._outbox = Outbox(self._deliver)
        self._mover = Mover(agent, clock, self._on_transfer, outgoing=memory)
        self._engine = EncoderEngine(
            EncoderRunner(self._model, processor),
            EmbeddingCache(memory, BlockPool(self._num_blocks, args.block_size)),
            self._mover,
            self._outbox,
            clock,
            self._executor,
            MAX_BATCH_ROWS,
            args.encode.max_batch_items,
        )
        self._loop = StepLoop("encoder-engine", self._engine)
        self._engine.attach(self._loop)
        self._shell = WorkerShell(
            setup.address, replica_id, setup.secret, self._outbox, self._loop, self._engine, self._on_message
        )

    async def start(self) -> Member:
        """Listen and run; called once, on the replica's event loop."""
        address = await self._shell.start()
        self._mover.start()
        self._loop.start()
        return Member(
            self.replica_id, Role.ENCODE, address, self._model.fingerprint, self._layout.fingerprint, self._num_blocks,
            tuple(modality.value for modality in self._model.modalities),
        )  # fmt: skip

    async def stop(self) -> None:
        await self._shell.aclose()
        await asyncio.to_thread(self._loop.stop, STOP_TIMEOUT_S)
        await asyncio.to_thread(self._mover.close, STOP_TIMEOUT_S)
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check_health(self) -> None:
        self._loop.check_health()

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        match message:
            case StartEncode():
                self._loop.call(self._engine.start, door, message)
            case EncodeTarget():
                self._loop.call(self._engine.set_target, message)
            case Cancel():
                self._loop.call(self._engine.cancel, message.request_id)

    def _on_transfer(self, event: MoverEvent) -> None:
        if not isinstance(
            event, MoverFailed
        ):  # logged by the mover; leases still end, by their time at the latest
            self._loop.call(self._engine.on_transfer, event)

    def _deliver(self, batch: list[tuple[DoorId, AnyMessage]]) -> None:
        self._shell.deliver_from_thread(batch)
