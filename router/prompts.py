"""From a call to prompts: media looked at, text tokenised, placeholders expanded. Blocking work, run off the event loop."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import ContextLengthError, UnsupportedError
from cluster.kvcache.hashing import block_hashes
from cluster.media.hashing import media_hash
from cluster.media.probe import probe
from cluster.media.processor import MediaProcessor
from cluster.media.sources import MediaSource, read_source
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import MediaItem, MediaOptions, Modality
from cluster.types.request import Guidance, Prompt
from router.openai.protocol import MediaNote
from router.openai.translate import ChatCall, GuidanceRules


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt that can be routed. `items[i]` is what stands in `prompt.media[i]`."""

    prompt: Prompt
    items: tuple[MediaItem, ...]
    block_hashes: Sequence[bytes]
    guidance: Guidance | None = None
    media_notes: Sequence[MediaNote] = ()  # what was done to items that the client did not ask for

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)

    @property
    def num_audio_tokens(self) -> int:
        return sum(item.geometry.num_tokens for item in self.items if item.modality is Modality.AUDIO)


class PromptBuilder:
    """Thread-safe after construction."""

    def __init__(
        self, text: TextProcessor, media: MediaProcessor | None, block_size: int, max_model_len: int
    ):
        self._text = text
        self._media = media
        self._block_size = block_size
        self._max_model_len = max_model_len

    def chat(self, call: ChatCall) -> PreparedPrompt:
        """Raises RequestError and its kin. Blocks: decodes headers, hashes bytes, tokenises."""
        items = [self._item(source, item_idx) for item_idx, source in enumerate(call.media)]
        token_ids = self._text.chat_prompt(call.messages)
        prompt = self._text.expand(token_ids, [(i.modality, i.media_hash, i.geometry) for i in items])
        by_hash = {item.media_hash: item for item in items}
        items_in_order = tuple(by_hash[span.media_hash] for span in prompt.media)
        return self._prepared(prompt, items_in_order, call.guidance)

    def completion(
        self, prompt: str | tuple[int, ...], guidance: GuidanceRules | None = None
    ) -> PreparedPrompt:
        if isinstance(prompt, str):
            token_ids = self._text.text_prompt(prompt)
        else:
            token_ids = self._text.checked_prompt(prompt)
        return self._prepared(Prompt(tuple(token_ids)), (), guidance)

    def _prepared(
        self, prompt: Prompt, items: tuple[MediaItem, ...], rules: GuidanceRules | None
    ) -> PreparedPrompt:
        guidance = None if rules is None else Guidance(rules.scale, self._negative(prompt, rules))
        self._check_length(len(prompt.token_ids))
        if guidance is not None:
            self._check_length(len(guidance.negative_prompt.token_ids))
        return PreparedPrompt(prompt, items, block_hashes(prompt, self._block_size), guidance)

    def _negative(self, prompt: Prompt, rules: GuidanceRules) -> Prompt:
        if rules.negative is None:
            return Prompt(prompt.token_ids[-1:])
        if isinstance(rules.negative, str):
            return Prompt(tuple(self._text.text_prompt(rules.negative)))
        return Prompt(tuple(self._text.chat_prompt(rules.negative)))

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens >= self._max_model_len:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens; this model's context is {self._max_model_len}, including the answer",
                param="messages",
            )

    def _item(self, source: MediaSource, item_idx: int) -> MediaItem:
        if self._media is None:
            raise UnsupportedError(f"this model takes no {source.modality} input", param=source.param)
        settings = self._media.settings
        data, _ = read_source(source, settings.limits.max_bytes, item_idx)
        geometry = self._media.geometry(
            probe(source.modality, data, settings, item_idx=item_idx), item_idx=item_idx
        )
        digest = hashlib.sha256(data).digest()
        name = media_hash(source.modality, digest, self._media.fingerprint, MediaOptions(), tenant="")
        return MediaItem(source.modality, data, name, geometry)
