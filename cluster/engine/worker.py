"""A worker process with a language engine: loads the language half of the model, builds the engine with the
ports of the worker's role, and passes the doors' messages to it.

A worker whose role is to encode, too, has an encoder beside the engine (`EncoderPort`), with a thread of its
own. The two know each other only by `OwnEmbeddings`.

Room for embeddings is requested on the event loop, as soon as the request arrives: an encoder must not wait
for a model step to learn where to send.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from cluster.clock import Clock
from cluster.config.checkpoint import placeholder_ids, read_config, takes_media
from cluster.config.settings import ClusterArgs
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.limits import StepLimits, limits_of, sizes_of
from cluster.engine.runner import LanguageRunner
from cluster.engine.speculation import MAX_CHUNK_TOKENS, DraftModelProposer, NgramProposer, Speculator
from cluster.engine.warm_up import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, warm_up_answers, warm_up_prompts
from cluster.errors import RequestError, to_info
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, feature_layout
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.language import LanguageModel
from cluster.scheduling.keys import SchedulingPolicy
from cluster.structure.compiler import GrammarCompiler
from cluster.structure.constraints import Constraints
from cluster.structure.vocabulary import VocabularySource
from cluster.text.defaults import GenerationDefaults
from cluster.types.members import Member, Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeTarget,
    EncoderLost,
    EncodeTarget,
    Failed,
    GrantPassed,
    ReturnGrant,
    StartDecode,
    StartEncode,
    StartPrefill,
)
from cluster.worker.kv_tier import open_tier
from cluster.worker.outbox import DoorId
from cluster.worker.process import LEASE_MARGIN_S, STOP_TIMEOUT_S, WorkerProcess
from cluster.worker.ranks import load_with_ranks
from cluster.worker.service import PhaseService
from cluster.worker.setup import WorkerSetup, check_device_transport
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

    def attach(self, process: WorkerProcess, own_prompts: OwnEmbeddings) -> None: ...

    def on_message(self, door: DoorId, message: AnyMessage) -> None: ...

    def on_room(self, request_id: str, item_idx: int) -> None:
        """A prompt of this worker has room for the embeddings of an item. Any thread; never waits."""
        ...

    def close(self) -> None: ...


LoadEncoder = Callable[[ClusterArgs, WorkerSetup], EncoderPort | None]  # None: the model takes no media


class LanguageWorker(PhaseService):
    role: Role
    load_encoder: LoadEncoder | None = None  # of a role that encodes and prefills

    def __init__(self, args: ClusterArgs, setup: WorkerSetup, *, lease_margin_s: float = LEASE_MARGIN_S):
        """Blocks until the model is loaded. Raises ConfigError."""
        role = self.role
        check_device_transport(setup)
        limits = limits_of(role, args)
        sizes = sizes_of(role, args, limits, setup.device.type)
        if not takes_media(read_config(args.model)):
            sizes = dataclasses.replace(sizes, feature_bytes=0)
        # first, because `memory_share` is for both
        self._encoder = encoder = None if self.load_encoder is None else self.load_encoder(args, setup)
        language, ranks = load_with_ranks(args, setup, role, sizes, lease_margin_s)
        model = language.model
        # before the threads of the process: it may record steps
        speculator = _speculator(args, model) if role.decodes else None
        feature_memory = _feature_memory(args, setup, model, sizes.feature_bytes)
        process = WorkerProcess(
            setup,
            model.fingerprint,
            outgoing=language.kv if role.prefills else None,
            outgoing_wire=language.wire if role.prefills else None,
            incoming=language.kv if role.decodes else None,
            incoming_wire=language.wire if role.decodes else None,
            features=feature_memory,
            embeddings=None if encoder is None else encoder.memory,
            lease_margin_s=lease_margin_s,
            ranks=ranks,
        )
        feature_blocks = BlockPool(feature_memory.num_blocks, args.block_size)
        self._features = FeatureStore(feature_memory, feature_blocks, process.feature_transfer_engine)
        masks = self._constraints = _constraints(args, model.vocab_size, process.clock)
        runner = LanguageRunner(model, language.steps, language.kv, self._features, speculator, masks)
        blocks = BlockPool(language.num_kv_blocks, args.block_size)
        self._tier = open_tier(args, language, blocks, process.clock)
        self._engine = LanguageEngine(
            model=model,
            runner=runner,
            blocks=blocks,
            transfer_engine=process.kv_transfer_engine,
            outbox=process.seat.outbox,
            clock=process.clock,
            policy=SchedulingPolicy(**args.scheduling.model_dump()),
            limits=limits,
            cpu_slots=process.seat.cpu_slots,
            features=self._features,
            tier=self._tier,
            constraints=masks,
            allows_recompute=args.transfer.recompute == "auto",
            on_ended=self._on_ended,
        )
        self._process, self._model = process, model
        self._warm_up(runner, blocks, limits)
        self._take_seats(process)
        super().__init__(process, self._own_member(language.num_kv_blocks))

    def _take_seats(self, process: WorkerProcess) -> None:
        self._granting_engines: list[BlockTransfer] = [
            *([process.kv_transfer_engine] if self.role.decodes else []),
            process.feature_transfer_engine,
        ]
        process.seat.attach(self._engine)
        if self._encoder is not None:
            self._encoder.attach(process, OwnEmbeddings(self._features, self._engine, process))
        # As in this worker's grants for embeddings: its own encoder does not write to these.
        self._own_metadata = process.feature_transfer_engine.agent.metadata()
        process.attach(self._on_message)

    def _own_member(self, num_blocks: int) -> Member:
        layout, encoder = self._model.kv_layout, self._encoder
        return self._process.member(
            self.role,
            layout,
            num_blocks,
            modalities=() if encoder is None else encoder.modalities,
            block_bytes=layout.block_bytes,
            num_layers=self._model.num_layers,
            row_bytes=0 if encoder is None else encoder.row_bytes,
        )

    async def start(self) -> Member:
        if self._tier is not None:
            self._tier.start(self._process.loop.call)
        self._constraints.attach(self._process.loop.call)
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._encoder is not None:
            self._encoder.close()
        self._constraints.close()
        if self._tier is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._tier.close()), STOP_TIMEOUT_S)

    def _warm_up(self, runner: LanguageRunner, blocks: BlockPool, limits: StepLimits) -> None:
        max_model_len, cpu_slots = self._model.max_model_len, self._process.seat.cpu_slots
        if self.role.decodes:
            fit = self._engine.fit
            warm_up_answers(runner, blocks, fit, cpu_slots, limits.max_sequences, max_model_len)
        max_tokens = min(MAX_PROMPT_TOKENS if self.role.prefills else MIN_PROMPT_TOKENS, max_model_len)
        warm_up_prompts(runner, blocks, self._engine.planner.budget, cpu_slots, max_tokens)

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        if self._encoder is not None and isinstance(message, StartEncode | EncodeTarget | Cancel):
            self._tell_encoder(self._encoder, door, message)
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

    def _on_ended(self, request_id: str) -> None:
        """A request whose answer was to be generated here has left the engine. Engine thread."""


def _feature_memory(
    args: ClusterArgs, setup: WorkerSetup, model: LanguageModel, num_bytes: int
) -> BlockMemory:
    layout = feature_layout(model.feature_width, args.block_size, setup.dtype)
    return BlockMemory(layout, max(1, num_bytes // layout.block_bytes), setup.device)


def _constraints(args: ClusterArgs, vocab_size: int, clock: Clock) -> Constraints:
    """The tokenizer is read when the first request with a structure comes."""
    end_ids = GenerationDefaults.load(args.model).eos_token_ids
    return Constraints(GrammarCompiler(lambda: VocabularySource.load(args.model, vocab_size, end_ids), clock))


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
    recorded = RecordedSizes.up_to(args.decode.max_batch_sequences, MAX_CHUNK_TOKENS)
    proposer = DraftModelProposer(
        draft, target, speculation.draft_kv_blocks, placeholders, recording_of(draft, recorded)
    )
    return Speculator(proposer, speculation.max_draft_tokens)
