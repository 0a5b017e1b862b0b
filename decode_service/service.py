"""One decode worker process: builds the engine, passes the doors' messages to it, and keeps one Serve call
per request open.

`run` is the Serve call. It returns when the request has left the engine, for whatever reason, so that Serve's
drain, limits and load include every generation. It may arrive before or after the request itself, which comes
by the side channel.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from cluster.config.checkpoint import placeholder_ids, read_config
from cluster.config.settings import ClusterArgs
from cluster.errors import UnavailableError
from cluster.kvcache.blocks import BlockPool
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.language import LanguageModel
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, Cancel, GrantPassed, ReturnGrant, StartDecode
from cluster.worker.language import LanguageSizes
from cluster.worker.outbox import DoorId
from cluster.worker.process import LEASE_MARGIN_S, WorkerProcess
from cluster.worker.ranks import load_with_ranks
from cluster.worker.service import PhaseService
from cluster.worker.setup import check_device_transport, set_up
from decode_service.engine import DecodeEngine
from decode_service.local_prefill import MAX_LOCAL_PREFILL_TOKENS
from decode_service.runner import DecodeRunner
from decode_service.speculation import DraftModelProposer, NgramProposer, Speculator
from decode_service.warm_up import warm_up

MAX_REMEMBERED_ENDS = 100_000  # request ids that have ended, for Serve calls that arrive late
START_TIMEOUT_S = 30.0  # between a Serve call and its request; normally milliseconds


class DecodeService(PhaseService):
    def __init__(self, args: ClusterArgs, replica_id: str, *, lease_margin_s: float = LEASE_MARGIN_S):
        """Loads the language half of the model. Blocks until it is loaded. Raises ConfigError."""
        setup = set_up(args, replica_id)
        check_device_transport(args, setup)
        num_blocks = args.decode.kv_blocks
        sizes = LanguageSizes(
            num_kv_blocks=num_blocks,
            feature_bytes=0,
            max_step_tokens=max(args.decode.max_batch_sequences, MAX_LOCAL_PREFILL_TOKENS),
            max_step_sequences=args.decode.max_batch_sequences,
        )
        language, ranks = load_with_ranks(args, setup, Role.DECODE, sizes, lease_margin_s)
        model = language.model
        process = WorkerProcess(
            setup,
            args.transport,
            model.fingerprint,
            incoming=language.kv,
            incoming_wire=language.wire,
            lease_margin_s=lease_margin_s,
            ranks=ranks,
        )
        runner = DecodeRunner(language.steps, language.kv, _speculator(args, model))
        blocks = BlockPool(num_blocks, args.block_size)
        self._engine = DecodeEngine(
            runner,
            blocks,
            process.kv_transfer_engine,
            process.outbox,
            process.clock,
            SchedulingPolicy(**args.scheduling.model_dump()),
            args.decode.max_batch_sequences,
            self._on_ended,
            process.cpu_slots,
            model.sliding_window,
            allows_recompute=args.transfer.recompute == "auto",
        )
        warm_up(
            runner,
            blocks,
            self._engine.fit,
            process.cpu_slots,
            args.decode.max_batch_sequences,
            model.max_model_len,
        )
        self._engine.warm_up()
        process.attach(self._engine, self._on_message)
        member = process.member(
            Role.DECODE,
            model.kv_layout,
            num_blocks,
            block_bytes=model.kv_layout.block_bytes,
            num_layers=model.num_layers,
        )
        super().__init__(process, member)
        self._runs: dict[str, asyncio.Future[None]] = {}
        self._started: set[str] = set()  # requests that have started and not ended
        self._ended: OrderedDict[str, None] = OrderedDict()

    async def run(self, request_id: str, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the request has ended here. Cancelling this call does not cancel the request; doors do
        that.

        Raises UnavailableError if the request itself does not come: its door's connection was cut
        meanwhile."""
        if request_id in self._ended:
            return
        loop = asyncio.get_running_loop()
        run = self._runs.setdefault(request_id, loop.create_future())
        check = loop.call_later(start_timeout_s, self._check_started, request_id)
        try:
            await asyncio.shield(run)
        finally:
            check.cancel()

    def _check_started(self, request_id: str) -> None:
        if request_id not in self._started and (run := self._runs.pop(request_id, None)) is not None:
            run.set_exception(UnavailableError("the request did not reach this worker"))

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        match message:
            case StartDecode():
                self._started.add(message.request.request_id)
                self._process.loop.call(self._engine.start, door, message)
            case Cancel():
                self._process.loop.call(self._engine.cancel, message.request_id, message.choice_idx)
            # These two may send messages to other ranks, so they do not run on the event loop.
            case GrantPassed():
                note_writer = self._process.kv_transfer_engine.note_writer
                self._process.loop.call(note_writer, message.lease_id, message.processes)
            case ReturnGrant():
                revoke = self._process.kv_transfer_engine.revoke
                self._process.loop.call(revoke, message.lease_id, "no writer was given the grant")

    def _on_ended(self, request_id: str) -> None:
        self._process.shell.call_from_thread(self._finish_run, request_id)

    def _finish_run(self, request_id: str) -> None:
        self._started.discard(request_id)
        self._ended[request_id] = None
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        run = self._runs.pop(request_id, None)
        if run is not None and not run.done():
            run.set_result(None)


def _speculator(args: ClusterArgs, target: LanguageModel) -> Speculator | None:
    """Raises ConfigError if the draft model does not fit the target model."""
    speculation = args.decode.speculation
    if speculation.method == "off":
        return None
    placeholders = placeholder_ids(read_config(args.model)).values()
    if speculation.method == "ngram":
        return Speculator(NgramProposer(placeholders), speculation.max_draft_tokens)
    draft = LanguageModel.load(
        speculation.draft_model, dtype=target.dtype, device=target.device, block_size=args.block_size,
        weight_cache=WeightCache(args.weight_cache.path, args.weight_cache.max_bytes),
    )  # fmt: skip
    proposer = DraftModelProposer(draft, target, speculation.draft_kv_blocks, placeholders)
    return Speculator(proposer, speculation.max_draft_tokens)
