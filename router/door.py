"""The door: what one HTTP replica is, without HTTP and without Ray.

Owns the text and media rooms, the members' connections, the dispatcher and the metrics. Everything lives on one event loop;
media headers, hashing and tokenising run in its thread pool.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cluster.clock import SystemClock
from cluster.config.environment import read_environment
from cluster.config.settings import ClusterArgs
from cluster.errors import ContextLengthError
from cluster.ids import new_request_id
from cluster.media.processor import MediaProcessor
from cluster.text.defaults import GenerationDefaults, context_length
from cluster.text.stop import StopStrings
from cluster.text.tokenizer import TextProcessor
from cluster.types.members import Member, Role
from cluster.types.request import GenerateRequest, StopParams
from router.dispatch import CallDecode, Dispatcher
from router.generation import Choice
from router.members import MemberTable, Peer
from router.metrics import DoorMetrics
from router.openai.translate import ChatCall, CompletionCall, StopRules
from router.policy import LeastWorkPolicy
from router.prompts import PreparedPrompt, PromptBuilder

T = TypeVar("T")
NUM_THREADS = 2  # for headers, hashing and tokenising, beside the event loop


class Door:
    def __init__(self, args: ClusterArgs, call_decode: CallDecode):
        """Loads tokenizer and processor; blocks. Raises ConfigError."""
        self.model_id = args.model_id
        self.created = int(time.time())
        self.defaults = GenerationDefaults.load(args.model)
        self._clock = SystemClock()
        self._text = TextProcessor.load(args.model)
        media = MediaProcessor.load(args.model)
        self._needs_encoder = media is not None
        self._max_model_len = args.max_model_len or context_length(args.model)
        self._prompts = PromptBuilder(self._text, media, args.block_size, self._max_model_len)
        self._dispatcher = Dispatcher(LeastWorkPolicy(), call_decode, args.door, args.block_size)
        self._members = MemberTable("door", self._dispatcher, read_environment().cluster_secret)
        self._dispatcher.members = self._members
        self._metrics = DoorMetrics(
            self.model_id, self._members.all_peers, lambda: self._dispatcher.num_flights
        )
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="door")

    def update_members(self, role: Role, members: list[Member]) -> None:
        """Serve's current list for one pool. Event loop only."""
        self._members.update(role, members)

    async def aclose(self) -> None:
        await self._members.aclose()
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def num_flights(self) -> int:
        """Choices on their way."""
        return self._dispatcher.num_flights

    @property
    def peers(self) -> list[Peer]:
        """Every worker this door is connected to."""
        return self._members.all_peers()

    def is_ready(self) -> bool:
        needed = (
            (Role.ENCODE, Role.PREFILL, Role.DECODE) if self._needs_encoder else (Role.PREFILL, Role.DECODE)
        )
        return all(self._members.candidates(role) for role in needed)

    def metrics(self) -> bytes:
        return self._metrics.render()

    async def chat(self, call: ChatCall) -> list[Choice]:
        arrived_at = self._clock.now()
        prompt = await self._off_loop(self._prompts.chat, call)
        return self._generate(prompt, call, arrived_at)

    async def complete(self, call: CompletionCall) -> list[Choice]:
        arrived_at = self._clock.now()
        prompts = [
            await self._off_loop(self._prompts.completion, prompt, call.guidance) for prompt in call.prompts
        ]
        return [choice for prompt in prompts for choice in self._generate(prompt, call, arrived_at)]

    def _generate(
        self, prompt: PreparedPrompt, call: ChatCall | CompletionCall, arrived_at: float
    ) -> list[Choice]:
        """One request with all choices of a prompt: they share its computation and its KV."""
        rules = call.stop
        max_tokens = self._max_tokens(prompt, rules)
        stop = StopParams(max_tokens, rules.token_ids, min(rules.min_tokens, max_tokens))
        request = GenerateRequest(
            new_request_id(), prompt.prompt, call.sampling, stop, prompt.guidance, call.priority
        )
        return [
            Choice(
                prompt,
                tokens,
                self._text.detokenizer(),
                StopStrings(rules.strings),
                self._metrics,
                self._clock,
                arrived_at,
            )
            for tokens in self._dispatcher.generate(request, prompt.items, prompt.block_hashes)
        ]

    def _max_tokens(self, prompt: PreparedPrompt, rules: StopRules) -> int:
        longest = prompt.num_tokens
        if prompt.guidance is not None:
            longest = max(longest, len(prompt.guidance.negative_prompt.token_ids))
        room = self._max_model_len - longest
        if rules.max_tokens is None:
            return min(self.defaults.max_tokens or room, room)
        if rules.max_tokens > room:
            raise ContextLengthError(
                f"{prompt.num_tokens} prompt tokens and {rules.max_tokens} answer tokens exceed this model's context of "
                f"{self._max_model_len}",
                param="max_tokens",
            )
        return rules.max_tokens

    async def _off_loop(self, function: Callable[..., T], *args: object) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, functools.partial(function, *args))
