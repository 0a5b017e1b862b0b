"""The door: what one HTTP replica is, without HTTP and without Ray.

Owns the text and media rooms, the members' connections, the dispatcher and the metrics. Everything lives on
one event loop. Text is tokenised on threads of its own, beside which nothing else runs but arithmetic on
media; files are opened in processes of their own.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cluster.clock import Clock, SystemClock
from cluster.config.environment import read_environment
from cluster.config.settings import ClusterArgs, DoorArgs
from cluster.errors import RequestError
from cluster.ids import new_request_id
from cluster.media.fetch import Fetcher, FetchPolicy
from cluster.media.processor import MediaProcessor
from cluster.media.surveyors import SurveyorPool
from cluster.scheduling.keys import SchedulingPolicy
from cluster.structure.checker import StructureChecker
from cluster.structure.vocabulary import VocabularySource
from cluster.text.defaults import GenerationDefaults, context_length
from cluster.text.echo import echo_of
from cluster.text.stop import StopFilter
from cluster.text.tokenizer import TextProcessor
from cluster.types.members import Member, Phase, Role
from cluster.types.request import GenerateRequest, LogitChanges, StopParams
from router.adapters import DoorAdapters
from router.admission.controller import AdmissionController
from router.admission.queue import AdmissionQueue, Capacity
from router.answer_text import AnswerText
from router.calls import (
    ChatCall,
    CompletionCall,
    ServedModels,
    StopRules,
    TokenizeCall,
    Tokenized,
    num_scored,
    num_told,
)
from router.dispatcher import DecodeCaller, Dispatcher
from router.flow.placer import Placer
from router.flow.request_flow import RequestFlow, Timeouts
from router.flow.state import ClientRequest
from router.generation import Choice
from router.http.keys import Access
from router.http.limits import Limits
from router.members import Peer
from router.overlong import too_long_answer
from router.page.pools import pool_fields
from router.parsing.formats import AnswerFormats, needs_structure
from router.parsing.parser import ParsedAnswer
from router.policy import ClusterView, Policy, make_policy
from router.prompt_report import PromptReport
from router.prompts.builder import PreparedPrompt, PromptBuilder
from router.prompts.intake import MediaIntake
from router.prompts.media import MediaPlanner
from router.prompts.media_budget import load_share
from router.scaling import DoorReport
from router.scaling.report import door_report
from router.telemetry.metrics import DoorMetrics
from router.telemetry.timeline import RequestTimeline

if TYPE_CHECKING:
    from router.telemetry.tracing import Tracing

T = TypeVar("T")
NUM_TEXT_THREADS = 2  # for templates, layouts and tokenising, beside the event loop


class Door:
    def __init__(self, args: ClusterArgs, call_decode: DecodeCaller, policy: Policy | None = None):
        """Loads tokenizer and processor; blocks. Raises ConfigError. `policy`: None: as `args` says."""
        self.adapters = DoorAdapters(args)
        self.created = int(time.time())
        self.transcription_instruction = args.door.transcription_instruction
        self.translation_instruction = args.door.translation_instruction
        self.defaults = GenerationDefaults.load(args.model)
        self._clock = SystemClock()
        media = MediaProcessor.load(args.model)
        self._text = TextProcessor.load(args.model, media and media.transformers_processor)
        self._formats = AnswerFormats(self._text, args.door.answer_format)
        self._needs_encoder = media is not None
        self._roles = [role for role in args.roles if role is not Role.ENCODE or self._needs_encoder]
        self._max_model_len = context_length(args.model, args.max_model_len)
        self.limits = _limits(args.door, self._max_model_len, self._text)
        environment = read_environment()
        self.access = Access.load(args.door.access, environment)
        rules = args.door.media
        order = SchedulingPolicy(**args.scheduling.model_dump())
        self._cluster = ClusterView(order, kv_bytes_per_token=0.0, num_layers=1, codecs=args.transfer.codecs)
        self._reduce_from_rows = rules.reduce_from_queued_rows
        self._prompts = PromptBuilder(
            self._text,
            MediaPlanner(media, self._cluster.has_media),
            rules,
            args.block_size,
            self._max_model_len,
        )
        surveyors = SurveyorPool()
        if media is not None:
            surveyors.warm_up()
        self._intake = MediaIntake(
            Fetcher(FetchPolicy(**rules.fetch.model_dump()), self._clock),
            surveyors,
            media,
            rules,
            self._clock,
        )
        self._placer = Placer(policy or make_policy(args.door.policy), self._cluster, args.block_size)
        self._admission = AdmissionController(
            AdmissionQueue(args.door.admission, args.scheduling.text_share, Capacity(0, 0, 0))
        )
        timeouts = Timeouts(args.door.first_token_timeout_s, args.door.request_timeout_s)
        self._flow = RequestFlow(self._placer, self._admission, timeouts)
        secret, told = environment.cluster_secret, self.adapters.on_told
        self.dispatcher = Dispatcher(self._flow, call_decode, secret, self._clock, on_adapters=told)
        self._members = self.dispatcher.members
        self.adapters.attach(self._members)
        classes = [each.name for each in args.door.admission.classes]
        self._metrics = DoorMetrics(
            args.model_id, self._members.all_peers, self._flow, self._admission.totals, classes,
            adapters=lambda: self.models.adapters,
        )  # fmt: skip
        self._tracing = _tracing(args, self._clock)
        self._structures = StructureChecker(
            lambda: VocabularySource.load(args.model, self._text.vocab_size, self.defaults.eos_token_ids)
        )
        self._text_threads = ThreadPoolExecutor(NUM_TEXT_THREADS, thread_name_prefix="door-text")

    def update_members(self, role: Role, members: list[Member]) -> None:
        """Serve's current list for one pool. Event loop only."""
        self._members.update(role, members)

    async def aclose(self) -> None:
        await self._members.aclose()
        await self._intake.aclose()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        self._structures.close()
        self._text_threads.shutdown(wait=False, cancel_futures=True)

    @property
    def models(self) -> ServedModels:
        return self.adapters.models

    @property
    def num_running(self) -> int:
        """Requests that workers compute."""
        return self._flow.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that have not been admitted yet."""
        return self._flow.num_waiting

    @property
    def is_idle(self) -> bool:
        """No request is on its way, waits to be let in, counts as work somewhere or holds media."""
        return self.dispatcher.is_idle and not self._intake.num_held_bytes

    @property
    def peers(self) -> list[Peer]:
        """Every worker this door is connected to."""
        return self._members.all_peers()

    def is_ready(self) -> bool:
        """Whether every phase that this model needs has a worker."""
        needed = [phase for phase in Phase if phase is not Phase.ENCODE or self._needs_encoder]
        return all(map(self._members.has, needed))

    def pools(self) -> dict[str, Any]:
        """What the page shows."""
        shows_workers = self.limits.shows_workers
        return {
            "num_running": self._flow.num_running,
            "num_waiting": self._flow.num_waiting,
            "pools": pool_fields(self._roles, self.peers, self._flow.workers, shows_workers=shows_workers),
        }

    def metrics(self) -> bytes:
        return self._metrics.render()

    def scaling_report(self) -> tuple[DoorReport, dict[float, float]]:
        """For the scaling policy: what arrived and what waits here; and how many first tokens came within so
        many seconds."""
        within = self._metrics.first_tokens()
        return door_report(self._admission, self._placer, within[inf], 0.0), within

    async def chat(self, call: ChatCall) -> list[Choice]:
        timeline = RequestTimeline(self._clock.now(), call.trace_parent)
        self._formats.check(call)
        await self._check_structure(call)
        changes = await self._changes(call)
        prompt = await self.prepare(call, timeline)
        try:
            call = await self._with_calls(call, prompt)
            return self._ready(prompt, call, changes, timeline, self._report(prompt, call))()
        except BaseException:
            prompt.release()
            raise

    async def complete(self, call: CompletionCall) -> list[Choice]:
        """No prompt has a stream, which would have to be closed, before all of them can have one."""
        ready: list[Callable[[], list[Choice]]] = []
        num_scores, max_scores = 0, self.limits.max_prompt_scores
        arrived_at = self._clock.now()
        await self._check_structure(call)
        changes = await self._changes(call)
        for prompt in call.prompts:
            timeline = RequestTimeline(arrived_at, call.trace_parent)
            prepared = await self._off_loop(self._prompts.completion, call, prompt)
            timeline.prepared(arrived_at, self._clock.now())
            num_scores += prepared.num_tokens * num_told(call)
            if num_scores > max_scores:
                raise RequestError(
                    f"prompt: the answer would tell more than {max_scores} log-probabilities of prompts; "
                    "send fewer prompts at once, or ask for fewer at each token",
                    param="prompt",
                )
            report = await self._echo_report(call, prompt, prepared)
            ready.append(self._ready(prepared, call, changes, timeline, report))
        return [choice for generate in ready for choice in generate()]

    async def tokenize(self, call: TokenizeCall) -> Tokenized:
        """Raises ClusterError."""
        if isinstance(call.what, str):
            ids = await self._off_loop(self._text.tokens, call.what, call.adds_special)
        else:
            prepared = await self.prepare(call.what, RequestTimeline(self._clock.now()))
            prepared.release()
            ids = list(prepared.prompt.token_ids)
        return Tokenized(ids, await self._off_loop(self._text.names, ids) if call.names else None)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return await self._off_loop(self._text.text, token_ids)

    async def _check_structure(self, call: ChatCall | CompletionCall) -> None:
        """Raises ClusterError."""
        if call.structure is not None:
            await self._structures.check(call.structure, call.tenant)

    async def _with_calls(self, call: ChatCall, prompt: PreparedPrompt) -> ChatCall:
        """With the structure of its calls of tools, if they are constrained. Raises ClusterError."""
        if not needs_structure(call):
            return call
        held = await self._off_loop(self._formats.held, call)
        for idx, function in enumerate(held):
            checked = await self._structures.check(function.structure, call.tenant)
            held[idx] = msgspec.structs.replace(function, schema=checked.text)
        if not held:
            return call
        structure = await self._off_loop(self._formats.structure, call, held, prompt.prompt.token_ids)
        return msgspec.structs.replace(call, structure=await self._structures.check(structure, call.tenant))

    async def prepare(self, call: ChatCall, timeline: RequestTimeline) -> PreparedPrompt:
        """What `chat` generates from; to be released. Raises ClusterError."""
        self._prompts.check_count(call)
        media = await self._intake.take_in(call)
        # of its tokens that new media keeps while encoders lag
        share = load_share(self._cluster.num_queued_rows(), self._reduce_from_rows)
        try:
            prepared = await self._off_loop(self._prompts.chat, call, media.contents, share)
        except BaseException:
            media.release()
            raise
        timeline.prepared(media.read_at, self._clock.now())
        return replace(prepared, release=media.release)

    async def _changes(self, call: ChatCall | CompletionCall) -> LogitChanges | None:
        """Returns the changes with the tokens of bad words."""
        if not call.bad_words:
            return call.changes
        word_ids = await self._off_loop(self._text.word_ids, call.bad_words)
        return msgspec.structs.replace(call.changes or LogitChanges(), bad_words=word_ids)

    def _ready(
        self,
        prompt: PreparedPrompt,
        call: ChatCall | CompletionCall,
        changes: LogitChanges | None,
        timeline: RequestTimeline,
        report: PromptReport | None,
    ) -> Callable[[], list[Choice]]:
        """One request with all choices of a prompt: they share its computation and its KV. Raises
        ClusterError. What it returns generates them and raises nothing."""
        rules = call.stop
        max_tokens = self._max_tokens(prompt, rules)
        stop = StopParams(max_tokens, rules.token_ids, min(rules.min_tokens, max_tokens))
        request = GenerateRequest(
            new_request_id(),
            prompt.prompt,
            call.sampling,
            stop,
            prompt.guidance,
            call.priority,
            changes=changes,
            num_logprobs=call.num_logprobs,
            structure=call.structure,
            num_prompt_logprobs=num_scored(call),
        )
        client = ClientRequest(request, prompt.items, prompt.block_hashes, timeline, call.tenant)
        texts = [self._answer_text(call, prompt, report) for _ in call.sampling]

        def generate() -> list[Choice]:
            streams = self.dispatcher.generate(client)
            choice = functools.partial(Choice, report=report, tracing=self._tracing)
            shared = (self._metrics, self._clock, timeline)
            return [
                choice(prompt, tokens, text, *shared, keeps_timeline=idx == 0)
                for idx, (tokens, text) in enumerate(zip(streams, texts, strict=True))
            ]

        return generate

    def _report(
        self, prompt: PreparedPrompt, call: ChatCall | CompletionCall, **echoed: Any
    ) -> PromptReport | None:
        if call.num_prompt_logprobs is None and not echoed:
            return None
        return PromptReport(
            prompt.prompt, self._text.pieces, self._off_loop, num_told=call.num_prompt_logprobs, **echoed
        )

    async def _echo_report(
        self, call: CompletionCall, prompt: str | tuple[int, ...], prepared: PreparedPrompt
    ) -> PromptReport | None:
        if not call.echo:
            return self._report(prepared, call)
        echo = await self._off_loop(echo_of, self._text, prompt, prepared.prompt.token_ids)
        return self._report(prepared, call, echo=echo, num_echoed=call.num_logprobs, generates=call.generates)

    def _answer_text(
        self, call: ChatCall | CompletionCall, prompt: PreparedPrompt, report: PromptReport | None
    ) -> AnswerText | ParsedAnswer:
        shown_ids = self._formats.shown_ids(call)
        text = AnswerText(
            self._text.detokenizer(skips_special=call.skips_special, shown_ids=shown_ids),
            StopFilter(call.stop.matched, keeps_match=call.stop.shows_match),
            self._text.pieces,
            shows_stop_token=call.stop.shows_match,
            returns_token_ids=call.returns_token_ids,
            num_before=0 if report is None else report.num_chars,
        )
        return self._formats.answer(call, prompt.prompt.token_ids, text)

    def _max_tokens(self, prompt: PreparedPrompt, rules: StopRules) -> int:
        longest = prompt.num_tokens
        if prompt.guidance is not None:
            longest = max(longest, len(prompt.guidance.negative_prompt.token_ids))
        room = self._max_model_len - longest
        if rules.max_tokens is None:
            return min(self.defaults.max_tokens or room, room)
        if rules.max_tokens > room:
            raise too_long_answer(longest, rules.max_tokens, self._max_model_len, param="max_tokens")
        return rules.max_tokens

    async def _off_loop(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._text_threads, functools.partial(function, *args))


def _limits(args: DoorArgs, max_model_len: int, text: TextProcessor) -> Limits:
    return Limits(
        max_model_len,
        text.vocab_size,
        text.max_token_chars,
        args.min_priority,
        args.share_caches,
        args.show_workers,
        args.held_body_bytes,
        args.response_lifetime_s,
    )


def _tracing(args: ClusterArgs, clock: Clock) -> Tracing | None:
    """Imported where it is wanted: OpenTelemetry's exporter takes a quarter of a second."""
    if not args.door.otlp_traces_endpoint:
        return None
    from router.telemetry.tracing import tracing_to

    return tracing_to(args.door.otlp_traces_endpoint, args.model_id, clock)
