"""One prefill worker process: builds the engine, and passes the doors' messages to it.

Room for embeddings is requested on the event loop, as soon as the request arrives: an encoder must not wait
for a model step to learn where to send.
"""

from __future__ import annotations

import functools

from cluster.config.settings import ClusterArgs
from cluster.errors import RequestError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.scheduling.budget import StepBudget
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeTarget,
    EncoderLost,
    Failed,
    GrantPassed,
    ReturnGrant,
    StartPrefill,
)
from cluster.worker.language import LanguageSizes
from cluster.worker.outbox import DoorId
from cluster.worker.process import LEASE_MARGIN_S, WorkerProcess
from cluster.worker.ranks import load_with_ranks
from cluster.worker.service import PhaseService
from cluster.worker.setup import check_device_transport, set_up
from prefill_service.engine import PrefillEngine
from prefill_service.features import FeatureStore
from prefill_service.runner import PrefillRunner
from prefill_service.warm_up import warm_up


class PrefillService(PhaseService):
    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        """Loads the language half of the model. Blocks until it is loaded. Raises ConfigError."""
        setup = set_up(args, replica_id)
        check_device_transport(args, setup)
        num_blocks = args.prefill.kv_blocks
        max_batch_tokens = max(args.block_size, args.prefill.max_batch_tokens)
        sizes = LanguageSizes(
            num_kv_blocks=num_blocks,
            feature_bytes=args.prefill.feature_bytes,
            max_step_tokens=max_batch_tokens,
            max_step_sequences=max_batch_tokens // args.block_size,
        )
        language, ranks = load_with_ranks(args, setup, Role.PREFILL, sizes, lease_margin_s)
        model = language.model
        layout = feature_layout(model.feature_width, args.block_size, setup.dtype)
        num_feature_blocks = max(1, args.prefill.feature_bytes // layout.block_bytes)
        feature_memory = BlockMemory(layout, num_feature_blocks, setup.device)
        process = WorkerProcess(
            setup,
            args.transport,
            model.fingerprint,
            outgoing=language.kv,
            incoming=feature_memory,
            outgoing_wire=language.wire,
            lease_margin_s=lease_margin_s,
            ranks=ranks,
        )
        self._features = FeatureStore(
            feature_memory, BlockPool(num_feature_blocks, args.block_size), process.transfer_engine
        )
        runner = PrefillRunner(model, language.steps, language.kv, self._features)
        blocks = BlockPool(num_blocks, args.block_size)
        budget = StepBudget(args.prefill.step_target_s, args.block_size, max_batch_tokens)
        self._engine = PrefillEngine(
            model,
            runner,
            blocks,
            self._features,
            process.kv_transfer_engine,
            process.outbox,
            process.clock,
            SchedulingPolicy(**args.scheduling.model_dump()),
            budget,
            process.cpu_slots,
        )
        warm_up(runner, blocks, budget, process.cpu_slots, model.max_model_len)
        process.attach(self._engine, self._on_message)
        member = process.member(
            Role.PREFILL,
            model.kv_layout,
            num_blocks,
            block_bytes=model.kv_layout.block_bytes,
            num_layers=model.num_layers,
        )
        super().__init__(process, member)

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        match message:
            case StartPrefill():
                self._start(door, message)
            case DecodeTarget():
                received = message.grant.received(self._process.clock.now())
                self._engine.offer_target(message.request_id, received)
                self._process.loop.call(self._engine.take_targets)
            case Cancel():
                self._process.loop.call(self._engine.cancel, message.request_id)
            case EncoderLost():
                self._features.renew((message.request_id, message.item_idx), message.lease_id)
            case GrantPassed():
                self._process.transfer_engine.note_writer(message.lease_id, message.processes)
            case ReturnGrant():
                self._process.transfer_engine.revoke(message.lease_id, "no writer was given the grant")

    def _start(self, door: DoorId, message: StartPrefill) -> None:
        came_at = self._process.clock.now()
        request = message.request
        for item_idx, item in enumerate(request.prompt.media):
            num_rows = item.geometry.num_tokens
            if num_rows > self._features.max_rows:
                error = RequestError(
                    f"media item {item_idx} has {num_rows} embedding rows; a prefill worker holds "
                    f"{self._features.max_rows}"
                )
                return self._process.shell.send(door, Failed(request.request_id, to_info(error)))
        send = functools.partial(self._process.shell.call_from_thread, self._process.shell.send, door)
        for item_idx, item in enumerate(request.prompt.media):
            key = (request.request_id, item_idx)
            self._features.reserve(key, item.media_hash, item.geometry.num_tokens, message.timeout_s, send)
        self._process.loop.call(self._engine.start, door, message, came_at)
