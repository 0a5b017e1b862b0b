"""One encoder worker process: builds the engine, and passes the doors' messages to it."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.media.processor import MediaProcessor
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.encoder import EncoderModel
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, Cancel, EncodeTarget, StartEncode
from cluster.worker.memory_plan import MemoryPlan, available_bytes, encoder_step_bytes
from cluster.worker.outbox import DoorId
from cluster.worker.process import WorkerProcess
from cluster.worker.service import PhaseService
from cluster.worker.setup import check_device_transport, set_up
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import EncoderRunner
from encoder_service.warm_up import warm_up

logger = logging.getLogger(__name__)

MAX_BATCH_ROWS = 16_384  # embedding rows in one encoder call; bounds its activation memory
# Rows of a long item in one call: enough to keep a device busy, short enough for items that arrive meanwhile.
MAX_PIECE_ROWS = 1024
NUM_PREPARE_THREADS = 2  # threads that decode and preprocess beside the encoder


class EncoderService(PhaseService):
    def __init__(self, args: ClusterArgs, replica_id: str):
        """Loads the encoder half of the model. Blocks until it is loaded. Raises ConfigError."""
        setup = set_up(args, replica_id)
        check_device_transport(args, setup)
        processor = MediaProcessor.load(args.model)
        if processor is None:
            raise ConfigError(f"{args.model} is a text model; it needs no encoder pool")
        model = EncoderModel.load(
            args.model,
            dtype=setup.dtype,
            device=setup.device,
            weight_cache=WeightCache(args.weight_cache.path, args.weight_cache.max_bytes),
        )
        layout = feature_layout(model.feature_width, args.block_size, setup.dtype)
        num_blocks = max(1, args.encode.cache_bytes // layout.block_bytes)
        row_bytes = encoder_step_bytes(1, model.config, setup.dtype.itemsize)
        plan = MemoryPlan(
            weights=model.weight_bytes,
            step=MAX_PIECE_ROWS * row_bytes,
            features=num_blocks * layout.block_bytes,
            inputs=args.encode.max_prepared_bytes,
        )
        available = available_bytes(setup.device, model.evictable_bytes)
        plan.check(available)
        logger.info("%s: memory\n%s", replica_id, plan.describe(available))
        memory = BlockMemory(layout, num_blocks, setup.device)
        self._executor = ThreadPoolExecutor(NUM_PREPARE_THREADS, thread_name_prefix="prepare")
        process = WorkerProcess(setup, args.transport, model.fingerprint, outgoing=memory)
        runner = EncoderRunner(model, processor)
        self._engine = EncoderEngine(
            runner,
            EmbeddingCache(memory, BlockPool(num_blocks, args.block_size)),
            process.transfer_engine,
            process.outbox,
            process.clock,
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
            process.cpu_slots,
        )
        warm_up(runner, model.modalities, self._engine.fits, process.cpu_slots, process.clock)
        process.attach(self._engine, self._on_message)
        self._engine.attach(process.loop)
        model.on_block(process.cpu_slots.yield_between_layers)
        modalities = tuple(modality.value for modality in model.modalities)
        super().__init__(process, process.member(Role.ENCODE, layout, num_blocks, modalities=modalities))

    async def stop(self) -> None:
        await super().stop()
        self._executor.shutdown(wait=False, cancel_futures=True)

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
