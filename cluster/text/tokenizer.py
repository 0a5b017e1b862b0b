"""Conversations and raw text to token ids, and media placeholders to ranges.

Owns the model's tokenizer and chat template (both from transformers). Thread safe: encoding changes the tokenizer's
state for a moment, so it holds a lock; detokenizers share a copy of their own, which nothing ever changes.

Policy for special tokens typed by a client: in a chat they are encoded as ordinary text (transformers'
`sanitize_control_tokens`), so "<|im_end|>" or an image placeholder in a message is only letters to the model. In a raw
completion the prompt belongs to the client, so special tokens count, but media placeholders are refused: a completion
carries no media. `expand` checks once more that placeholders and items are equally many.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from cluster.errors import ConfigError, RequestError
from cluster.text.chat import ChatMessage, TextPart, media_order
from cluster.text.detokenizer import Detokenizer
from cluster.types.media import MediaGeometry, MediaSpan, Modality
from cluster.types.request import Prompt


class TextProcessor:
    def __init__(self, tokenizer: Any, placeholder_ids: dict[Modality, int], vocab_size: int):
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()
        self.placeholder_ids = placeholder_ids
        self.vocab_size = vocab_size
        self._modality_of = {token_id: modality for modality, token_id in placeholder_ids.items()}
        self._special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._decode = _decoder(tokenizer)

    @classmethod
    def load(cls, path: str | Path) -> TextProcessor:
        """Read tokenizer, template and placeholder ids from a model folder. Raises ConfigError."""
        from transformers import AutoTokenizer

        try:
            config = json.loads((Path(path) / "config.json").read_text())
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable tokenizer in {path}: {error}") from error
        vocab_size = (
            config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or len(tokenizer)
        )
        return cls(tokenizer, placeholder_ids(config), vocab_size)

    def chat_prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids with one placeholder token per media item, ready for the assistant's answer.

        Raises RequestError when the template refuses the conversation or has no place for one of its media items.
        """
        unknown = [modality for modality in media_order(messages) if modality not in self.placeholder_ids]
        if unknown:
            raise RequestError(f"this model takes no {unknown[0]} input", param="messages")
        if self._tokenizer.chat_template is None:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        try:
            with self._encoding:
                token_ids = self._tokenizer.apply_chat_template(
                    [self._template_message(message) for message in messages],
                    add_generation_prompt=True,
                    tokenize=True,
                    return_dict=False,
                    sanitize_control_tokens=True,
                )
        except TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error}", param="messages"
            ) from error
        except Exception as error:  # templates are programs
            raise RequestError("the chat template cannot render these messages", param="messages") from error
        self._check_counts(token_ids, Counter(media_order(messages)))
        return list(token_ids)

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of a raw completion prompt, with whatever tokens the tokenizer adds at its start."""
        with self._encoding:
            token_ids = self._tokenizer.encode(text)
        return self.checked_prompt(token_ids)

    def checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """A raw prompt that is already token ids. Raises RequestError for ids that the model does not have."""
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise RequestError(f"token ids must be between 0 and {self.vocab_size - 1}", param="prompt")
        self._check_counts(token_ids, Counter())
        return list(token_ids)

    def expand(
        self, token_ids: Sequence[int], items: Sequence[tuple[Modality, str, MediaGeometry]]
    ) -> Prompt:
        """Replace each placeholder token by as many as its item has embeddings.

        `items` are (modality, media hash, geometry) in the client's order; the k-th placeholder of a modality belongs
        to the k-th item of that modality. The prompt's media come in prompt order, whatever order the template chose.
        """
        self._check_counts(token_ids, Counter(modality for modality, _, _ in items))
        waiting = {modality: deque(item for item in items if item[0] == modality) for modality in Modality}
        expanded: list[int] = []
        spans: list[MediaSpan] = []
        for token_id in token_ids:
            modality = self._modality_of.get(token_id)
            if modality is None:
                expanded.append(token_id)
                continue
            _, media_hash, geometry = waiting[modality].popleft()
            spans.append(MediaSpan(modality, media_hash, len(expanded), geometry))
            expanded.extend([token_id] * geometry.num_tokens)
        return Prompt(tuple(expanded), tuple(spans))

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._decode, self._special_ids)

    def _template_message(self, message: ChatMessage) -> dict[str, Any]:
        if isinstance(message.content, str):
            return {"role": message.role, "content": message.content}
        if not self.placeholder_ids:  # templates of text-only models expect a string
            texts = [part.text for part in message.content if isinstance(part, TextPart)]
            return {"role": message.role, "content": "\n".join(texts)}
        parts = [
            {"type": "text", "text": part.text}
            if isinstance(part, TextPart)
            else {"type": part.modality.value}
            for part in message.content
        ]
        return {"role": message.role, "content": parts}

    def _check_counts(self, token_ids: Sequence[int], expected: Counter[Modality]) -> None:
        found = Counter(
            self._modality_of[token_id] for token_id in token_ids if token_id in self._modality_of
        )
        for modality in Modality:
            if found[modality] != expected[modality]:
                raise RequestError(
                    f"the prompt has {found[modality]} {modality} placeholders for {expected[modality]} {modality} "
                    "items; media go into content parts, placeholder tokens must not be written by hand",
                    param="messages" if expected else None,
                )


def placeholder_ids(config: dict[str, Any]) -> dict[Modality, int]:
    """Token ids that stand for media, from a model's config.json."""
    ids = {
        modality: config.get(f"{modality}_token_id", config.get(f"{modality}_token_index"))
        for modality in Modality
    }
    return {modality: token_id for modality, token_id in ids.items() if token_id is not None}


def _decoder(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        own = type(backend).from_str(backend.to_str())
        return lambda token_ids: own.decode(token_ids, skip_special_tokens=False)
    return lambda token_ids: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
