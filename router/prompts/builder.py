"""Builds prompts from a call: lays out media, tokenises text, expands placeholders. Blocks, so it runs off
the event loop. Opens no file."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import msgspec

from cluster.config.settings import MediaArgs
from cluster.errors import MediaError, RequestError
from cluster.kvcache.hashing import block_hashes
from cluster.text.chat import NO_OPTIONS, ChatMedia, ChatMessage, ChatOptions, LaidOutMedia
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import MediaItem, Modality
from cluster.types.request import Guidance, Prompt
from router.calls import ChatCall, CompletionCall, GuidanceRules, MediaNote
from router.overlong import too_long_prompt
from router.prompts.media import Content, MeasuredItem, MediaPlanner
from router.prompts.media_budget import ReductionReason

MIN_ANSWER_TOKENS = 256  # room that media leave for the answer if the client sets no length


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that can be routed. `items[i]` is the item of `prompt.media[i]`."""

    prompt: Prompt
    items: tuple[MediaItem, ...]
    block_hashes: Sequence[bytes]
    guidance: Guidance | None
    media_notes: Sequence[MediaNote] = ()  # changes to items that the client did not ask for
    audio_s: float = 0.0  # seconds of sound in all items
    release: Callable[[], None] = lambda: None  # to be called when the request has ended

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_audio_tokens(self) -> int:
        return sum(item.geometry.num_tokens for item in self.items if item.modality is Modality.AUDIO)


class PromptBuilder:
    """Thread-safe after construction."""

    def __init__(
        self, text: TextProcessor, media: MediaPlanner, caps: MediaArgs, block_size: int, max_model_len: int
    ):
        self._text = text
        self._media = media
        self._caps = caps
        self._block_size = block_size
        self._max_model_len = max_model_len

    def check_count(self, call: ChatCall) -> None:
        """Checks the number of items before anything is fetched. Raises RequestError."""
        if len(call.media) > self._caps.max_items:
            raise RequestError(
                f"the request has {len(call.media)} media items; at most {self._caps.max_items} are accepted",
                param=call.media[self._caps.max_items].param,
            )

    def chat(
        self, call: ChatCall, contents: Sequence[Content | MediaError], share: float = 1.0
    ) -> PreparedPrompt:
        """Builds the prompt of a chat. `contents`: those of the call's items, in order. `share`: the share of
        its tokens that new media keeps, because encoders are overloaded.

        Raises RequestError and its subclasses. Blocks: lays out, tokenises."""
        rules = call.media_rules
        tenant = call.cache_salt
        measured, notes = self._media.measure(call.media, contents, rules)
        messages = without_items(call.messages, {note.item for note in notes})
        if share < 1.0 and not rules.is_exact:
            measured, relieved = self._media.relieve(measured, share, tenant)
            notes += relieved
        earlier = items_of_earlier_turns(call.messages)
        prompt, items = self._expanded(messages, measured, tenant, earlier, call.options)
        room = self._media_room(call, prompt, measured)
        if measured and sum(each.num_tokens for each in measured) > room:
            measured, reduced = self._media.reduce(measured, room, rules, ReductionReason.BUDGET)
            notes = [note for note in notes if note.item not in {new.item for new in reduced}] + reduced
            prompt, items = self._expanded(messages, measured, tenant, earlier, call.options)
        self._media.check_rows(measured, self._caps.max_picture_rows, self._caps.max_rows)
        notes.sort(key=lambda note: note.item)
        prompt = msgspec.structs.replace(prompt, cache_salt=call.cache_salt, adapter=call.adapter)
        prepared = self._prepared(prompt, items, call.guidance, notes, call.options)
        return replace(prepared, audio_s=self._media.audio_s(measured))

    def completion(self, call: CompletionCall, prompt: str | tuple[int, ...]) -> PreparedPrompt:
        """Builds one of the call's prompts. Raises as `chat` does. Blocks: tokenises."""
        if isinstance(prompt, str):
            token_ids = self._text.text_prompt(prompt)
        else:
            token_ids = self._text.checked_prompt(prompt)
        found = Prompt(tuple(token_ids), cache_salt=call.cache_salt, adapter=call.adapter)
        return self._prepared(found, (), call.guidance)

    def _expanded(
        self,
        messages: Sequence[ChatMessage],
        measured: Sequence[MeasuredItem],
        tenant: str,
        earlier: Collection[int],
        options: ChatOptions,
    ) -> tuple[Prompt, tuple[MediaItem, ...]]:
        """Returns the prompt and the item of each of its media. `earlier`: items of an earlier turn."""
        items = [self._media.items(each, tenant) for each in measured]
        laid_out = [
            LaidOutMedia(each.layout, tuple(item.media_hash for item in own))
            for each, own in zip(measured, items, strict=True)
        ]
        prompt = self._text.chat_prompt(messages, laid_out, options)
        pairs = [(each, item) for each, own in zip(measured, items, strict=True) for item in own]
        by_hash = {item.media_hash: item for _, item in pairs}
        returning = {item.media_hash for each, item in pairs if each.item_idx in earlier}
        return prompt, tuple(
            msgspec.structs.replace(by_hash[name], is_returning=name in returning)
            for name in (placed.media_hash for placed in prompt.media)
        )

    def _media_room(self, call: ChatCall, prompt: Prompt, measured: Sequence[MeasuredItem]) -> int:
        """Returns the embedding rows that all items together may have."""
        least = 1 if call.media_rules.is_exact else min(MIN_ANSWER_TOKENS, self._max_model_len // 4)
        num_text_tokens = len(prompt.token_ids) - sum(each.num_tokens for each in measured)
        room = self._max_model_len - num_text_tokens - (call.stop.max_tokens or least)
        caps = (self._caps.max_tokens or room, call.media_rules.max_tokens or room)
        return min(room, *caps)

    def _prepared(
        self,
        prompt: Prompt,
        items: tuple[MediaItem, ...],
        rules: GuidanceRules | None,
        notes: Sequence[MediaNote] = (),
        options: ChatOptions = NO_OPTIONS,
    ) -> PreparedPrompt:
        guidance = None if rules is None else Guidance(rules.scale, self._negative(prompt, rules, options))
        self._check_length(len(prompt.token_ids))
        if guidance is not None:
            self._check_length(len(guidance.negative_prompt.token_ids))
        return PreparedPrompt(prompt, items, block_hashes(prompt, self._block_size), guidance, notes)

    def _negative(self, prompt: Prompt, rules: GuidanceRules, options: ChatOptions) -> Prompt:
        if rules.negative is None:
            negative = Prompt(prompt.token_ids[-1:])
        elif isinstance(rules.negative, str):
            negative = Prompt(tuple(self._text.text_prompt(rules.negative)))
        else:
            negative = self._text.chat_prompt(rules.negative, options=options)
        return msgspec.structs.replace(negative, cache_salt=prompt.cache_salt, adapter=prompt.adapter)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise too_long_prompt(num_tokens, self._max_model_len, param="messages")


def without_items(messages: Sequence[ChatMessage], left_out: Collection[int]) -> tuple[ChatMessage, ...]:
    """Returns the conversation without some of its media items, given by their order."""
    item_idx = -1
    kept: list[ChatMessage] = []
    for message in messages:
        if isinstance(message.content, str):
            kept.append(message)
            continue
        parts = []
        for part in message.content:
            item_idx += isinstance(part, ChatMedia)
            if not (isinstance(part, ChatMedia) and item_idx in left_out):
                parts.append(part)
        kept.append(msgspec.structs.replace(message, content=tuple(parts)))
    return tuple(kept)


def items_of_earlier_turns(messages: Sequence[ChatMessage]) -> set[int]:
    """Returns the media items before an answer of the assistant. Later requests of the conversation repeat
    them."""
    found: set[int] = set()
    num_items = 0
    for message in messages:
        if message.role == "assistant":
            found = set(range(num_items))
        num_items += len(message.modalities())
    return found
