"""A worker process with a language engine: loads the language half of the model and builds the engine with
the ports of the worker's role. `Inbox` passes the doors' messages to it.

One class serves every role that prefills or decodes. What the roles differ in is given to it:

    load_encoder   of a role that encodes, too: the encoder that runs beside the engine
    calls          of a role that decodes: the Serve calls that stay open while requests generate

`prefill_service`, `decode_service` and `deploy.whole` say how the workers of each role are composed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from cluster.clock import Clock
from cluster.config.checkpoint import placeholder_ids, read_config, takes_media
from cluster.config.combinations import check_combination
from cluster.config.settings import HEAD_METHODS, ClusterArgs
from cluster.engine.adapters import HeldAdapters
from cluster.engine.ahead import may_run_ahead
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.head_drafts import HeadProposer
from cluster.engine.inbox import EncoderPort, Inbox, ServeCalls
from cluster.engine.limits import StepLimits, limits_of, sizes_of
from cluster.engine.runner import LanguageRunner
from cluster.engine.speculation import MAX_CHUNK_TOKENS, DraftModelProposer, NgramProposer, Speculator
from cluster.engine.warm_up import MAX_PROMPT_TOKENS, MIN_PROMPT_TOKENS, warm_up_answers, warm_up_prompts
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
from cluster.types.adapters import AdapterSet
from cluster.types.members import Member, Role
from cluster.worker.adapter_loading import AdapterLoader, RankedLoader
from cluster.worker.cpu_slots import CpuSlots
from cluster.worker.draft_heads import load_head
from cluster.worker.kv_tier import open_tier
from cluster.worker.language import Language
from cluster.worker.process import LEASE_MARGIN_S, STOP_TIMEOUT_S, WorkerProcess
from cluster.worker.ranks import Ranks, load_with_ranks
from cluster.worker.service import PhaseService
from cluster.worker.setup import WorkerSetup, check_device_transport

LoadEncoder = Callable[[ClusterArgs, WorkerSetup], EncoderPort | None]  # None: the model takes no media


class LanguageWorker(PhaseService):
    """`features`: where embeddings arrive. `encoder`: None unless the role encodes."""

    def __init__(
        self,
        role: Role,
        args: ClusterArgs,
        setup: WorkerSetup,
        *,
        load_encoder: LoadEncoder | None = None,
        calls: ServeCalls | None = None,
        lease_margin_s: float = LEASE_MARGIN_S,
    ):
        """Blocks until the model is loaded. Raises ConfigError."""
        check_combination(args)
        check_device_transport(setup)
        limits = limits_of(role, args)
        sizes = sizes_of(role, args, limits, setup.device.type)
        if not takes_media(read_config(args.model)):
            sizes = dataclasses.replace(sizes, feature_bytes=0)
        # first, because `memory_share` is for both
        self.encoder = encoder = None if load_encoder is None else load_encoder(args, setup)
        if encoder is not None:
            sizes = dataclasses.replace(sizes, encoder_bytes=encoder.call_bytes)
        language, ranks = load_with_ranks(args, setup, role, sizes, lease_margin_s)
        model = language.model
        # before the threads of the process: it may record steps
        speculator = _speculator(args, model) if role.decodes else None
        feature_memory = _feature_memory(args, setup, model, sizes.feature_bytes)
        process = _process(role, setup, language, ranks, feature_memory, encoder, lease_margin_s)
        feature_blocks = BlockPool(feature_memory.num_blocks, args.block_size)
        self.features = FeatureStore(feature_memory, feature_blocks, process.feature_transfer_engine)
        masks = self._constraints = _constraints(args, model.vocab_size, process.clock)
        runner = LanguageRunner(model, language.steps, language.kv, self.features, speculator, masks)
        blocks = BlockPool(language.num_kv_blocks, args.block_size)
        self._adapter_loading = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._adapters = self._held_adapters(args, model, ranks, process)
        self._tier = open_tier(args, language, blocks, process.clock)
        self.engine = LanguageEngine(
            model=model,
            runner=runner,
            blocks=blocks,
            transfer_engine=process.kv_transfer_engine,
            outbox=process.seat.outbox,
            clock=process.clock,
            policy=SchedulingPolicy(**args.scheduling.model_dump()),
            limits=limits,
            cpu_slots=process.seat.cpu_slots,
            features=self.features,
            tier=self._tier,
            constraints=masks,
            adapters=self._adapters,
            # what a state has taken in, it cannot give back or compute from the middle
            allows_recompute=args.transfer.recompute == "auto" and not model.state_blocks,
            runs_ahead=speculator is None and ranks is None and may_run_ahead(model.device),
            on_ended=functools.partial(_on_ended, process, calls),
        )
        self._calls = calls
        _warm_up(
            ranks, role, self.engine, runner, blocks, limits, process.seat.cpu_slots, model.max_model_len
        )
        self._inbox = Inbox(role, process, self.engine, self.features, encoder, calls, self._adapters)
        super().__init__(process, _member(role, process, language, encoder))

    def _held_adapters(
        self, args: ClusterArgs, model: LanguageModel, ranks: Ranks | None, process: WorkerProcess
    ) -> HeldAdapters | None:
        """None: the model has no room for adapters."""
        if not model.num_adapter_slots:
            return None
        begins_with = AdapterSet.of_settings({adapter.name: adapter.digest for adapter in model.adapters})
        load = AdapterLoader(args, model)
        load = load if ranks is None else RankedLoader(load, ranks.adapters)
        return HeldAdapters(model, begins_with, load, process.seat.outbox, self._adapter_loading)

    async def start(self) -> Member:
        if self._tier is not None:
            self._tier.start(self.process.loop.call)
        self._constraints.attach(self.process.loop.call)
        if self._adapters is not None:
            self._adapters.attach(self.process.loop.call)
        return await super().start()

    async def run(self, request_id: str) -> None:
        """`ServeCalls.run`, in a worker that generates answers."""
        assert self._calls is not None, f"{self.replica_id} generates no answers"
        await self._calls.run(request_id)

    async def stop(self) -> None:
        await super().stop()
        self._adapter_loading.shutdown(wait=False, cancel_futures=True)
        if self.encoder is not None:
            self.encoder.close()
        self._constraints.close()
        if self._tier is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(self._tier.close()), STOP_TIMEOUT_S)


def _process(
    role: Role,
    setup: WorkerSetup,
    language: Language,
    ranks: Ranks | None,
    features: BlockMemory,
    encoder: EncoderPort | None,
    lease_margin_s: float,
) -> WorkerProcess:
    return WorkerProcess(
        setup,
        language.model.fingerprint,
        outgoing=language.kv if role.prefills else None,
        outgoing_wire=language.wire if role.prefills else None,
        incoming=language.kv if role.decodes else None,
        incoming_wire=language.wire if role.decodes else None,
        features=features,
        embeddings=None if encoder is None else encoder.memory,
        lease_margin_s=lease_margin_s,
        ranks=ranks,
    )


def _member(role: Role, process: WorkerProcess, language: Language, encoder: EncoderPort | None) -> Member:
    layout = language.model.kv_layout
    return process.member(
        role,
        layout,
        language.num_kv_blocks,
        modalities=() if encoder is None else encoder.modalities,
        block_bytes=layout.block_bytes,
        state_blocks=language.model.state_blocks,
        num_layers=language.model.num_layers,
        row_bytes=0 if encoder is None else encoder.row_bytes,
    )


def _warm_up(
    ranks: Ranks | None, role: Role, engine: LanguageEngine, runner: LanguageRunner, blocks: BlockPool,
    limits: StepLimits, cpu_slots: CpuSlots, max_model_len: int,
) -> None:  # fmt: skip
    def run_steps() -> None:
        if role.decodes:
            warm_up_answers(runner, blocks, engine.fit, cpu_slots, limits.max_sequences, max_model_len)
        max_tokens = min(MAX_PROMPT_TOKENS if role.prefills else MIN_PROMPT_TOKENS, max_model_len)
        warm_up_prompts(runner, blocks, engine.planner.budget, cpu_slots, max_tokens)

    run_steps() if ranks is None else ranks.run(run_steps)


def _on_ended(process: WorkerProcess, calls: ServeCalls | None, request_id: str) -> None:
    """A request whose answer was to be generated here has left the engine. Engine thread."""
    if calls is not None:
        process.shell.call_from_thread(calls.end, request_id)


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
    """Raises ConfigError if the draft model or the head does not fit the target model."""
    speculation = args.decode.speculation
    if speculation.method == "off":
        return None
    placeholders = placeholder_ids(read_config(args.model)).values()
    if speculation.method == "ngram":
        return Speculator(NgramProposer(placeholders), speculation.num_speculative_tokens)
    if speculation.method in HEAD_METHODS:
        assert target.hidden_rows is not None, "the model keeps no hidden rows"
        head = load_head(args, target)
        heads = HeadProposer(head, target.hidden_rows, speculation.draft_kv_blocks, placeholders)
        return Speculator(heads, speculation.num_speculative_tokens, heads)
    draft = LanguageModel.load(
        speculation.model, dtype=target.dtype, device=target.device, block_size=args.block_size,
        weight_cache=WeightCache(args.weight_cache.path, args.weight_cache.max_bytes),
    )  # fmt: skip
    recorded = RecordedSizes.up_to(args.decode.max_batch_sequences, MAX_CHUNK_TOKENS)
    proposer = DraftModelProposer(
        draft, target, speculation.draft_kv_blocks, placeholders, recording_of(draft, recorded)
    )
    return Speculator(proposer, speculation.num_speculative_tokens)
