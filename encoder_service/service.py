"""The encoder of a worker process (`Encoder`): builds the engine, and passes the doors' messages to it. And
the service of workers that do nothing else."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.media.decoders import Decoders
from cluster.media.preprocessors import Preprocessors, preprocessor_server
from cluster.media.processor import MediaProcessor
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.encoder import EncoderModel
from cluster.model.half_files import HalfSizes
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, Cancel, EncodeTarget, StartEncode
from cluster.worker.memory_plan import (
    MemoryPlan,
    available_bytes,
    encoder_step_bytes,
    gpu_bytes,
    library_bytes,
)
from cluster.worker.outbox import DoorId
from cluster.worker.process import WorkerProcess
from cluster.worker.service import PhaseService
from cluster.worker.setup import WorkerSetup, check_device_transport
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.runner import EncoderRunner
from encoder_service.warm_up import warm_up

if TYPE_CHECKING:
    from cluster.engine.inbox import OwnEmbeddings

logger = logging.getLogger(__name__)

MAX_BATCH_ROWS = 16_384  # embedding rows in one encoder call; bounds its activation memory
CALL_PART = 32  # of a GPU's memory, for one call: 2.5 GiB of 80
# Rows of a long item in one call: enough to keep a device busy, short enough for items that arrive meanwhile.
MAX_PIECE_ROWS = 1024
# Threads that preprocess while the encoder runs, unless there are processes for it. More would wait for one
# interpreter lock.
NUM_PREPARE_THREADS = 2


class Encoder:
    """Order: loaded, with its memory → `attach`, to the worker's process → `on_message` → `close`.

    call_bytes: that its calls will take beside what it has allocated.
    """

    def __init__(self, args: ClusterArgs, setup: WorkerSetup, processor: MediaProcessor):
        """Loads the encoder half of the model. Blocks until it is loaded. Raises ConfigError."""
        self._args, self._processor = args, processor
        # first: they start while the model is read
        num_processes = args.encode.num_prepare_processes
        self._num_prepared = num_processes or NUM_PREPARE_THREADS  # items at once
        self._decoders = Decoders(self._num_prepared)
        self.preprocessors = (
            Preprocessors(
                preprocessor_server(args.model), self._num_prepared, processor.settings.limits.max_decode_s
            )
            if num_processes
            else None
        )
        self.model = EncoderModel.load(
            args.model,
            dtype=setup.dtype,
            device=setup.device,
            weight_cache=WeightCache(args.weight_cache.path, args.weight_cache.max_bytes),
            check_room=partial(_check_room, args, setup),
        )
        layout = feature_layout(self.model.feature_width, args.block_size, setup.dtype)
        num_blocks = max(1, args.encode.cache_bytes // layout.block_bytes)
        self.row_bytes = layout.block_bytes // args.block_size
        self.modalities = tuple(modality.value for modality in self.model.modalities)
        step_row_bytes = encoder_step_bytes(1, self.model.config, setup.dtype.itemsize)
        plan = MemoryPlan(
            weights=self.model.weight_bytes,
            step=_step_bytes(setup, step_row_bytes),
            features=num_blocks * layout.block_bytes,
            inputs=args.encode.max_prepared_bytes,
            graphs=self.model.recorded_bytes(step_row_bytes),
            libraries=library_bytes(setup.device),
        )
        with setup.late_memory.granting() as promised:
            available = available_bytes(setup.device, self.model.evictable_bytes) - promised
            plan.check(available)
            setup.late_memory.promise(plan.late)
        self.call_bytes = plan.step + plan.inputs + plan.graphs
        # On a GPU, KV may take the rest of what is available
        is_on_gpu = setup.device.type == "cuda"
        spare = 0 if is_on_gpu else available - plan.wanted
        logger.info("%s: memory of the encoder\n%s", setup.replica_id, plan.describe(available))
        self.memory = BlockMemory(layout, num_blocks, setup.device)
        self.limits = EncoderLimits(
            max_batch_items=args.encode.max_batch_items,
            max_batch_rows=MAX_BATCH_ROWS,
            max_piece_rows=MAX_PIECE_ROWS,
            max_call_bytes=min(MAX_BATCH_ROWS * step_row_bytes, plan.step + spare),
            row_bytes=step_row_bytes,
            max_prepared_bytes=args.encode.max_prepared_bytes,
            max_queued_rows=args.encode.max_queued_rows,
            num_prepare_threads=self._num_prepared,
        )

    @classmethod
    def load(cls, args: ClusterArgs, setup: WorkerSetup) -> Encoder | None:
        """None: the model takes no media. Otherwise as the constructor."""
        processor = MediaProcessor.load(args.model)
        return None if processor is None else cls(args, setup, processor)

    def attach(self, process: WorkerProcess, own_prompts: OwnEmbeddings | None = None) -> None:
        """Builds the engine and measures the encoder's speed. `own_prompts`: of a worker that computes
        prompts, too."""
        seat = process.encoder_seat
        self.executor = ThreadPoolExecutor(self._num_prepared, thread_name_prefix="prepare")
        runner = EncoderRunner(self.model, self._processor, self._decoders, self.preprocessors)
        self.engine = EncoderEngine(
            runner=runner,
            cache=EmbeddingCache(self.memory, BlockPool(self.memory.num_blocks, self._args.block_size)),
            transfer_engine=process.feature_transfer_engine,
            outbox=seat.outbox,
            clock=process.clock,
            executor=self.executor,
            limits=self.limits,
            policy=SchedulingPolicy(**self._args.scheduling.model_dump()),
            cpu_slots=seat.cpu_slots,
            own_prompts=own_prompts,
        )
        warm_up(runner, self.model.modalities, self.engine.fits, seat.cpu_slots, process.clock)
        self.model.on_block(seat.cpu_slots.yield_between_layers)
        seat.attach(self.engine)
        # Its calls, and the copies that it waits for, do not stand in line with steps of a language engine of
        # the same process.
        seat.loop.call(self.memory.use_own_stream)
        self.engine.attach(seat.loop)
        self._seat, self._clock = seat, process.clock

    def on_message(self, door: DoorId, message: AnyMessage) -> None:
        """Handles one message of a door. Called on the event loop."""
        call = self._seat.loop.call
        match message:
            case StartEncode():
                call(self.engine.start, door, message, self._clock.now())
            case EncodeTarget():
                received = message.grant.received(self._clock.now())
                call(self.engine.set_target, message.request_id, message.item_idx, received)
            case Cancel():
                call(self.engine.cancel, message.request_id, message.item_idx)

    def on_room(self, request_id: str, item_idx: int) -> None:
        """The worker's own prompts have room for the item's embeddings. Any thread."""
        self._seat.loop.call(self.engine.set_target, request_id, item_idx, None)

    def close(self) -> None:
        self.executor.shutdown(wait=False, cancel_futures=True)
        self._decoders.close()
        if self.preprocessors is not None:
            self.preprocessors.close()


def _step_bytes(setup: WorkerSetup, row_bytes: int) -> int:
    """What is planned for one call. row_bytes: for a row. On a GPU, which KV may fill, calls take no more."""
    least, most = MAX_PIECE_ROWS * row_bytes, MAX_BATCH_ROWS * row_bytes
    if setup.device.type != "cuda":
        return least
    return max(least, min(most, gpu_bytes(setup.device)[0] // CALL_PART))


def _check_room(args: ClusterArgs, setup: WorkerSetup, half: HalfSizes) -> None:
    """Raises ConfigError if the weights cannot fit with the least memory that the rest takes."""
    plan = MemoryPlan(
        weights=half.num_bytes,
        step=MAX_PIECE_ROWS * encoder_step_bytes(1, half.config, setup.dtype.itemsize),
        features=args.encode.cache_bytes,
        inputs=args.encode.max_prepared_bytes,
        is_loaded=False,
    )
    with setup.late_memory.granting() as promised:
        plan.check(available_bytes(setup.device) - promised)


class EncoderService(PhaseService):
    def __init__(self, args: ClusterArgs, setup: WorkerSetup):
        """Loads the encoder half of the model. Blocks until it is loaded. Raises ConfigError."""
        check_device_transport(setup)
        encoder = Encoder.load(args, setup)
        if encoder is None:
            raise ConfigError(f"{args.model} is a text model; it needs no encoder pool")
        process = WorkerProcess(setup, encoder.model.fingerprint, embeddings=encoder.memory)
        encoder.attach(process)
        process.attach(encoder.on_message)
        self.encoder = encoder
        super().__init__(
            process,
            process.member(
                Role.ENCODE,
                encoder.memory.layout,
                encoder.memory.num_blocks,
                modalities=encoder.modalities,
                row_bytes=encoder.row_bytes,
            ),
        )

    async def stop(self) -> None:
        await super().stop()
        self.encoder.close()
