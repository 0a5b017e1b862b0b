"""The encoder of a simulated worker: the real engine, over a device of curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import torch

from cluster.engine.inbox import OwnEmbeddings
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.types.messages import StartEncode
from deploy.simulator.device import SimEncoderRunner
from deploy.simulator.process import SimProcess
from encoder_service.cache import EmbeddingCache
from encoder_service.calls import EncoderLimits
from encoder_service.engine import EncoderEngine
from encoder_service.service import MAX_PIECE_ROWS, Encoder

UNLIMITED = 1 << 60  # bytes, rows
WARM_UP_ROWS = (64, 1024)  # of an encoder's calls


class PrepareThreads(Executor):
    """The threads that prepare media: `Preparation` gives each of them one item at a time."""

    def __init__(self, process: SimProcess, runner: SimEncoderRunner):
        self._process, self._runner = process, runner
        self.ends_at: dict[str, float] = {}  # of the items that are being prepared, by media hash

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        media_hash, item, _ = args
        began_at = self._process.clock.now()
        ends_at = self.ends_at[media_hash] = began_at + self._runner.prepare_s(item)
        self._process.world.loop.at(ends_at, self._run, began_at, function, args)
        return Future()

    def _run(self, began_at: float, function: Callable[..., Any], args: Sequence[Any]) -> None:
        if not self._process.is_dead:
            del self.ends_at[args[0]]
            with self._process.clock.at(began_at):
                function(*args)


class SimEncoder(Encoder):
    """Its rows are one byte wide in memory; how many bytes travel is the worker's `bytes_per_row`."""

    def __init__(self, process: SimProcess):
        spec, size = process.spec, process.world.model.block_size
        num_blocks = max(1, spec.cache_bytes // (max(1, spec.bytes_per_row) * size))
        self.memory = BlockMemory(feature_layout(1, size, torch.int8), num_blocks)
        self.row_bytes = spec.bytes_per_row
        self.modalities = tuple(modality.value for modality in spec.encoder_curves.encode)

    def attach(self, process: Any, own_prompts: OwnEmbeddings | None = None) -> None:
        spec, seat, size = process.spec, process.encoder_seat, process.world.model.block_size
        self.runner: Any = SimEncoderRunner(process.device)
        self.threads = PrepareThreads(process, self.runner)
        self.cache = EmbeddingCache(self.memory, BlockPool(self.memory.num_blocks, size))
        self.engine = EncoderEngine(
            runner=self.runner,
            cache=self.cache,
            transfer_engine=process.feature_transfer_engine,
            outbox=seat.outbox,
            clock=process.clock,
            executor=self.threads,
            limits=EncoderLimits(
                max_batch_items=spec.max_items,
                max_batch_rows=spec.encoder_curves.max_step_units,
                max_piece_rows=MAX_PIECE_ROWS,
                max_call_bytes=UNLIMITED,
                row_bytes=1,
                max_prepared_bytes=UNLIMITED,
                max_queued_rows=UNLIMITED,
                num_prepare_threads=spec.num_prepare_threads,
            ),
            policy=process.policy,
            cpu_slots=seat.cpu_slots,
            own_prompts=own_prompts,
        )
        seat.attach(self.engine)
        self.engine.attach(seat.loop)
        self._seat, self._clock, self._process = seat, process.clock, process
        self.warm_up()

    def warm_up(self) -> None:
        """The engine learns what it would measure before its first request."""
        curves = self._process.spec.encoder_curves
        for known, fits in (
            (curves.encode, self.engine.fits.encode),
            (curves.prepare, self.engine.fits.prepare),
        ):
            for modality, curve in known.items():
                for num_rows in WARM_UP_ROWS:
                    fits[modality].observe(num_rows, 0.0, curve.seconds(num_rows))

    @property
    def num_queued_rows(self) -> int:
        return self.engine.load().num_queued_units

    @property
    def busy_until(self) -> float:
        """The call that runs ends then. The engine's records contain its results already."""
        return self._seat.loop.busy_until

    @property
    def asked(self) -> list[StartEncode]:
        """What has come during that call."""
        return [message for _, message, _ in self._seat.loop.asked(self.engine.start)]
