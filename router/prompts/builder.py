"""From a call to prompts: media laid out, text tokenised, placeholders expanded. Blocking work, run off the event loop; no file is
opened."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import msgspec

from cluster.errors import ContextLengthError, MediaError, RequestError
from cluster.kvcache.hashing import block_hashes
from cluster.text.chat import ChatMedia, ChatMessage, LaidOutMedia
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import MediaItem, Modality
from cluster.types.request import Guidance, Prompt
from router.openai.protocol import MediaNote
from router.openai.translate import ChatCall, GuidanceRules
from router.prompts.media import Content, Look, MediaPlanner
from router.prompts.media_budget import Reason

MIN_ANSWER_TOKENS = 256  # that media leave room for, where the client does not say how many it wants


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that can be routed. `items[i]` is what stands in `prompt.media[i]`."""

    prompt: Prompt
    items: tuple[MediaItem, ...]
    block_hashes: Sequence[bytes]
    guidance: Guidance | None = None
    media_notes: Sequence[MediaNote] = ()  # what was done to items that the client did not ask for
    release: Callable[[], None] = lambda: None  # to be called when its request has ended

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_audio_tokens(self) -> int:
        return sum(item.geometry.num_tokens for item in self.items if item.modality is Modality.AUDIO)


@dataclass(frozen=True)
class MediaCaps:
    """What the operator allows one request."""

    max_items: int
    max_tokens: int  # of all items; 0: as many as the context has room for
    max_picture_rows: int = (
        16_384  # that an encoder computes for one image, or for frames that are seen together
    )
    max_rows: int = 65_536  # … and for all items


class PromptBuilder:
    """Thread-safe after construction."""

    def __init__(
        self, text: TextProcessor, media: MediaPlanner, caps: MediaCaps, block_size: int, max_model_len: int
    ):
        self._text = text
        self._media = media
        self._caps = caps
        self._block_size = block_size
        self._max_model_len = max_model_len

    def check_count(self, call: ChatCall) -> None:
        """Before anything is fetched. Raises RequestError."""
        if len(call.media) > self._caps.max_items:
            raise RequestError(
                f"the request has {len(call.media)} media items; at most {self._caps.max_items} are accepted",
                param="messages",
            )

    def chat(
        self, call: ChatCall, contents: Sequence[Content | MediaError], share: float = 1.0
    ) -> PreparedPrompt:
        """`contents`: of each of the call's items, in order. `share`: of its tokens that new media keeps, because encoders are behind.

        Raises RequestError and its kin. Blocks: lays out, tokenises."""
        rules = call.media_rules
        tenant = call.cache_salt
        looks, notes = self._media.look(call.media, contents, rules)
        messages = without_items(call.messages, {note.item for note in notes})
        if share < 1.0 and not rules.is_exact:
            looks, relieved = self._media.relieve(looks, share, tenant)
            notes += relieved
        earlier = items_of_earlier_turns(call.messages)
        prompt, items = self._expanded(messages, looks, tenant, earlier)
        room = self._media_room(call, prompt, looks)
        if looks and sum(look.num_tokens for look in looks) > room:
            looks, reduced = self._media.reduce(looks, room, rules, Reason.BUDGET)
            notes = [note for note in notes if note.item not in {new.item for new in reduced}] + reduced
            prompt, items = self._expanded(messages, looks, tenant, earlier)
        self._media.check_rows(looks, self._caps.max_picture_rows, self._caps.max_rows)
        notes.sort(key=lambda note: note.item)
        return self._prepared(prompt, items, call.guidance, call.cache_salt, notes)

    def completion(
        self,
        prompt: str | tuple[int, ...],
        guidance: GuidanceRules | None = None,
        cache_salt: str = "",
    ) -> PreparedPrompt:
        if isinstance(prompt, str):
            token_ids = self._text.text_prompt(prompt)
        else:
            token_ids = self._text.checked_prompt(prompt)
        return self._prepared(Prompt(tuple(token_ids)), (), guidance, cache_salt)

    def _expanded(
        self, messages: Sequence[ChatMessage], looks: Sequence[Look], tenant: str, earlier: Collection[int]
    ) -> tuple[Prompt, tuple[MediaItem, ...]]:
        """The prompt, and what stands in each of its media; `earlier`: items that an earlier turn showed."""
        items = [self._media.items(look, tenant) for look in looks]
        laid_out = [
            LaidOutMedia(look.layout, tuple(item.media_hash for item in own))
            for look, own in zip(looks, items, strict=True)
        ]
        prompt = self._text.chat_prompt(messages, laid_out)
        pairs = [(look, item) for look, own in zip(looks, items, strict=True) for item in own]
        by_hash = {item.media_hash: item for _, item in pairs}
        returning = {item.media_hash for look, item in pairs if look.item_idx in earlier}
        return prompt, tuple(
            msgspec.structs.replace(by_hash[name], is_returning=name in returning)
            for name in (placed.media_hash for placed in prompt.media)
        )

    def _media_room(self, call: ChatCall, prompt: Prompt, looks: Sequence[Look]) -> int:
        """Embedding rows that all items together may have."""
        least = 1 if call.media_rules.is_exact else min(MIN_ANSWER_TOKENS, self._max_model_len // 4)
        num_text_tokens = len(prompt.token_ids) - sum(look.num_tokens for look in looks)
        room = self._max_model_len - num_text_tokens - (call.stop.max_tokens or least)
        caps = (self._caps.max_tokens or room, call.media_rules.max_tokens or room)
        return min(room, *caps)

    def _prepared(
        self,
        prompt: Prompt,
        items: tuple[MediaItem, ...],
        rules: GuidanceRules | None,
        cache_salt: str,
        notes: Sequence[MediaNote] = (),
    ) -> PreparedPrompt:
        prompt = msgspec.structs.replace(prompt, cache_salt=cache_salt)
        guidance = None if rules is None else Guidance(rules.scale, self._negative(prompt, rules))
        self._check_length(len(prompt.token_ids))
        if guidance is not None:
            self._check_length(len(guidance.negative_prompt.token_ids))
        return PreparedPrompt(prompt, items, block_hashes(prompt, self._block_size), guidance, notes)

    def _negative(self, prompt: Prompt, rules: GuidanceRules) -> Prompt:
        if rules.negative is None:
            negative = Prompt(prompt.token_ids[-1:])
        elif isinstance(rules.negative, str):
            negative = Prompt(tuple(self._text.text_prompt(rules.negative)))
        else:
            negative = self._text.chat_prompt(rules.negative)
        return msgspec.structs.replace(negative, cache_salt=prompt.cache_salt)

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; this model's context is {self._max_model_len}, including the answer",
                param="messages",
            )


def without_items(messages: Sequence[ChatMessage], left_out: Collection[int]) -> tuple[ChatMessage, ...]:
    """The conversation without some of its media items, which are numbered in order."""
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
    """Media items that stand before an answer of the assistant: the conversation goes on, and will show them again."""
    found: set[int] = set()
    num_items = 0
    for message in messages:
        if message.role == "assistant":
            found = set(range(num_items))
        num_items += len(message.modalities())
    return found
