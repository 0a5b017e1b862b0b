"""One encoder worker process: builds the engine and answers doors."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Member, Role
from cluster.types.messages import AnyMessage, Cancel, EncodeTarget, StartEncode
from cluster.worker.memory_plan import MemoryPlan, available_bytes, encoder_step_bytes
from cluster.worker.outbox import DoorId
from cluster.worker.process import WorkerProcess
from cluster.worker.setup import check_device_lane, set_up
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import EncoderRunner
from encoder_service.warm_up import warm_up

logger = logging.getLogger(__name__)

MAX_BATCH_ROWS = 16_384  # embedding rows in one encoder call; bounds its activation memory
MAX_PIECE_ROWS = (
    1024  # of a long item in one call: enough to keep a device busy, and a short wait for who comes meanwhile
)
NUM_PREPARE_THREADS = 2  # decoding and preprocessing beside the encoder itself


class EncoderService:
    def __init__(self, args: ClusterArgs, replica_id: str):
        """Loads the encoder half of the model. Blocks for as long as that takes; raises ConfigError."""
        setup = set_up(args, replica_id)
        check_device_lane(args, setup)
        self.replica_id = replica_id
        processor = MediaProcessor.load(args.model)
        if processor is None:
            raise ConfigError(f"{args.model} is a text model; it needs no encoder pool")
        self._model = EncoderModel.load(args.model, dtype=setup.dtype, device=setup.device)
        self._layout = feature_layout(self._model.feature_width, args.block_size, setup.dtype)
        self._num_blocks = max(1, args.encode.cache_bytes // self._layout.block_bytes)
        row_bytes = encoder_step_bytes(1, self._model.config, setup.dtype.itemsize)
        plan = MemoryPlan(
            weights=self._model.weight_bytes,
            step=MAX_PIECE_ROWS * row_bytes,
            features=self._num_blocks * self._layout.block_bytes,
            inputs=args.encode.max_prepared_bytes,
        )
        available = available_bytes(setup.device)
        plan.check(available)
        logger.info("%s: memory\n%s", replica_id, plan.describe(available))
        memory = BlockMemory(self._layout, self._num_blocks, setup.device)
        self._executor = ThreadPoolExecutor(NUM_PREPARE_THREADS, thread_name_prefix="prepare")
        self._process = WorkerProcess(setup, args.transport, self._model.fingerprint, outgoing=memory)
        runner = EncoderRunner(self._model, processor)
        self._engine = EncoderEngine(
            runner,
            EmbeddingCache(memory, BlockPool(self._num_blocks, args.block_size)),
            self._process.transfer_engine,
            self._process.outbox,
            self._process.clock,
            self._executor,
            EncoderLimits(
                max_batch_items=args.encode.max_batch_items,
                max_batch_rows=MAX_BATCH_ROWS,
                max_piece_rows=MAX_PIECE_ROWS,
                max_call_bytes=min(MAX_BATCH_ROWS * row_bytes, available - plan.wanted + plan.step),
                row_bytes=row_bytes,
                max_prepared_bytes=args.encode.max_prepared_bytes,
                max_queued_rows=args.encode.max_queued_rows,
                num_prepare_threads=NUM_PREPARE_THREADS,
            ),
            SchedulingPolicy(**args.scheduling.model_dump()),
            self._process.cpu_slots,
        )
        warm_up(
            runner,
            self._model.modalities,
            self._engine.fits,
            self._process.cpu_slots,
            self._process.clock,
        )
        self._process.attach(self._engine, self._on_message)
        self._engine.attach(self._process.loop)
        self._model.on_block(self._process.cpu_slots.yield_between_layers)

    async def start(self) -> Member:
        """Listen and run; called once, on the replica's event loop."""
        address = await self._process.start()
        return Member(
            self.replica_id, Role.ENCODE, address, self._model.fingerprint, self._layout.fingerprint, self._num_blocks,
            tuple(modality.value for modality in self._model.modalities), self._process.hardware,
            processes=self._process.processes,
        )  # fmt: skip

    async def drain(self, timeout_s: float) -> None:
        """`WorkerProcess.drain`."""
        await self._process.drain(timeout_s)

    async def stop(self) -> None:
        await self._process.stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def check_health(self) -> None:
        self._process.check_health()

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        match message:
            case StartEncode():
                came_at = self._process.clock.now()
                self._process.loop.call(self._engine.start, door, message, came_at)
            case EncodeTarget():
                received = message.grant.received(self._process.clock.now())
                self._process.loop.call(
                    self._engine.set_target, message.request_id, message.item_idx, received
                )
            case Cancel():
                self._process.loop.call(self._engine.cancel, message.request_id, message.item_idx)
