"""Conversations and raw text to token ids, and media items to the ranges of their embeddings.

Owns the model's tokenizer, from transformers, and its chat template. Thread safe: encoding changes the
tokenizer's state for a moment, so it holds a lock. Detokenizers share a copy that never changes.

A chat becomes a prompt in three steps, each as in the model's own processor:

1. The template writes text with one placeholder for each item.
2. The item's layout replaces its placeholder. A layout holds one token for each run of equal row tokens.
3. The whole is encoded. Then each row token is repeated as often as its run has rows, which gives the same
   ids at no cost.

Special tokens typed by a client:

* In a chat they are encoded as ordinary text (transformers' `sanitize_control_tokens`). "<|im_end|>" or an
  image placeholder in a message is only letters to the model, also where texts of several parts or fields
  form it together (`cluster.text.typed`).
* In a raw completion the client writes the whole prompt, so special tokens count. Media placeholders are
  refused, because a completion has no media.
"""

from __future__ import annotations

import re
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.config.checkpoint import check_tokenizer, placeholder_ids, read_config, text_config
from cluster.errors import ConfigError, RequestError
from cluster.text.answer_format import GENERIC, AnswerSyntax, Family
from cluster.text.chat import NO_OPTIONS, ChatMessage, ChatOptions, LaidOutMedia, media_order
from cluster.text.detokenizer import Detokenizer
from cluster.text.pieces import TokenPieces
from cluster.text.template import ChatTemplate
from cluster.types.media import Modality, PlacedMedia
from cluster.types.request import Prompt

Run = tuple[int, int, int]  # (item, part of its layout, rows)


class TextProcessor:
    def __init__(
        self, tokenizer: Any, placeholder_ids: Mapping[Modality, int], vocab_size: int, processor: Any = None
    ):
        """processor: transformers' own, for a model that takes media; `tokenizer` is its tokenizer."""
        self._tokenizer = tokenizer
        self._encoding = threading.Lock()
        self.placeholder_ids = placeholder_ids
        self.vocab_size = vocab_size
        self.max_token_chars = max(map(len, tokenizer.get_vocab()), default=1)
        self._row_ids = frozenset(placeholder_ids.values())
        self._placeholders = _placeholders(processor)
        self._placeholder = _unmarked("|".join(map(re.escape, self._placeholders)))
        self.template = ChatTemplate(tokenizer, processor, self._placeholders)
        self._added = ([], []) if processor is None else _added_ids(tokenizer)
        self.special_ids = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        self._decode = _decoder(tokenizer)
        (*_, plain) = tokenizer.encode("a", add_special_tokens=False) or [0]
        self.pieces = TokenPieces(self._decode, tokenizer.convert_ids_to_tokens, plain)

    @classmethod
    def load(cls, path: str | Path, processor: Any = None) -> TextProcessor:
        """Reads tokenizer, template and placeholder ids from a model folder. `processor`: transformers' own,
        for a model that takes media; it contains tokenizer and template. Raises ConfigError."""
        from transformers import AutoTokenizer

        config = read_config(path)
        check_tokenizer(Path(path))
        try:
            tokenizer = (
                AutoTokenizer.from_pretrained(str(path), mistral_format=False)
                if processor is None
                else processor.tokenizer
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable tokenizer in {path}: {error}", param="model") from error
        if not tokenizer.encode("a", add_special_tokens=False):
            raise ConfigError(f"the tokenizer in {path} makes nothing of the text 'a'", param="model")
        vocab_size = config.get("vocab_size") or text_config(config).get("vocab_size") or len(tokenizer)
        return cls(tokenizer, placeholder_ids(config), vocab_size, processor)

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        media: Sequence[LaidOutMedia] = (),
        options: ChatOptions = NO_OPTIONS,
    ) -> Prompt:
        """The prompt for the assistant's answer. `media`: one for each media part of the messages, in their
        order.

        Raises RequestError if the template refuses the conversation or has no place for one of its media
        items.
        """
        unknown = [kind for kind in media_order(messages) if kind not in self._placeholders.values()]
        if unknown:
            raise RequestError(f"this model takes no {unknown[0]} input", param="messages")
        if not self.template.exists:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        text, runs = self._with_media(self.template.render(messages, options), media)
        return _placed(self._encode(text), self._row_ids, runs, media)

    def text_prompt(self, text: str) -> list[int]:
        """Token ids of a raw completion prompt, with the tokens that the tokenizer adds at its start."""
        with self._encoding:
            token_ids = self._tokenizer.encode(text)
        return self.checked_prompt(token_ids)

    def checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        """A raw prompt of token ids. Raises RequestError for ids that the model does not have."""
        if not token_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if any(not 0 <= token_id < self.vocab_size for token_id in token_ids):
            raise RequestError(f"token ids must be between 0 and {self.vocab_size - 1}", param="prompt")
        if not self._row_ids.isdisjoint(token_ids):
            raise RequestError("media placeholder tokens must not be written by hand", param="prompt")
        return list(token_ids)

    def tokens(self, text: str, adds_special: bool) -> list[int]:
        """The token ids of any text; special tokens in it count. `adds_special`: with those that the
        tokenizer adds."""
        with self._encoding:
            return self._tokenizer.encode(text, add_special_tokens=adds_special)

    def names(self, token_ids: Sequence[int]) -> list[str]:
        """The tokens as the vocabulary writes them; empty for ids that it does not have."""
        return [name or "" for name in self._tokenizer.convert_ids_to_tokens(list(token_ids))]

    def text(self, token_ids: Sequence[int]) -> str:
        """Special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def detokenizer(self, *, skips_special: bool = True, shown_ids: Collection[int] = ()) -> Detokenizer:
        """`shown_ids`: special tokens that have text all the same."""
        return Detokenizer(self._decode, self.special_ids.difference(shown_ids) if skips_special else ())

    def answer_format(self, family: str) -> AnswerSyntax | None:
        """How the model writes reasoning and calls. None: unknown. `family`: the operator's choice. Reads
        files. Raises ConfigError."""
        if family:
            return AnswerSyntax(Family.load(family), self._tokenizer)
        return AnswerSyntax.of(self._tokenizer, self.template.source)

    def generic_format(self) -> AnswerSyntax:
        """A form of calls that can be held for any model."""
        can_reason = "<think>" in self.template.source
        return AnswerSyntax(Family.load(GENERIC), self._tokenizer, can_reason=can_reason)

    def word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write these words, at the beginning of a text and after a space. As in
        vLLM: after a space only if that is another sequence of the same length."""
        found: dict[tuple[int, ...], None] = {}
        with self._encoding:
            for word in words:
                bare = self._tokenizer.encode(word.lstrip(), add_special_tokens=False)
                spaced = self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
                found[tuple(bare)] = None
                if len(spaced) == len(bare) and spaced[:1] != bare[:1]:
                    found[tuple(spaced)] = None
        found.pop((), None)
        return tuple(found)

    def _with_media(self, text: str, media: Sequence[LaidOutMedia]) -> tuple[str, list[Run]]:
        """The k-th placeholder of a modality belongs to the k-th item of that modality, in any order that the
        template chooses."""
        found = Counter(
            self._placeholders[match[1]] for match in self._placeholder.finditer(text) if match[1]
        )
        expected = Counter(item.layout.modality for item in media)
        for modality in Modality:
            if found[modality] != expected[modality]:
                raise RequestError(
                    f"the prompt has {found[modality]} {modality} placeholders for {expected[modality]} "
                    f"{modality} items",
                    param="messages",
                )
        waiting = {
            modality: deque(i for i, item in enumerate(media) if item.layout.modality is modality)
            for modality in Modality
        }
        runs: list[Run] = []

        def replace(match: re.Match[str]) -> str:
            if not match[1]:
                return match[0]
            item_idx = waiting[self._placeholders[match[1]]].popleft()
            layout = media[item_idx].layout
            runs.extend((item_idx, part_idx, length) for part_idx, length in layout.runs)
            return layout.text

        return self._placeholder.sub(replace, text), runs

    def _encode(self, text: str) -> list[int]:
        """Ids of a rendered chat. As in transformers: if the template writes no beginning of sequence, a
        processor adds its tokenizer's own tokens; a tokenizer alone never does."""
        with self._encoding:
            encoded = self._tokenizer(text, add_special_tokens=False, sanitize_control_tokens=True)
        token_ids = encoded["input_ids"]
        bos = self._tokenizer.bos_token
        if bos is not None and text.startswith(bos):
            return token_ids
        before, after = self._added
        return [*before, *token_ids, *after]


def _placeholders(processor: Any) -> dict[str, Modality]:
    """The text that a chat template writes for an item, by modality; in some families not the row's token."""
    tokens = {
        modality: getattr(processor, f"{modality}_placeholder_token", None)
        or getattr(processor, f"{modality}_token", None)
        for modality in Modality
    }
    return {token: modality for modality, token in tokens.items() if token is not None}


def _unmarked(pattern: str) -> re.Pattern[str]:
    """Group 1: a match of the pattern outside the marks that transformers puts around a client's special
    tokens."""
    from transformers.utils.chat_template_utils import _CONTROL_TOKEN_END, _CONTROL_TOKEN_START

    start, end = _CONTROL_TOKEN_START, _CONTROL_TOKEN_END
    return re.compile(f"{start}[^{start}{end}]*{end}|({pattern or '(?!)'})")


def _added_ids(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and after any text."""
    bare, whole = tokenizer.encode("x", add_special_tokens=False), tokenizer.encode("x")
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    return whole[:start], whole[start + len(bare) :]


def _placed(
    token_ids: Sequence[int], row_ids: frozenset[int], runs: Iterable[Run], media: Sequence[LaidOutMedia]
) -> Prompt:
    """The prompt in which each row token is repeated as often as its run has rows."""
    left = deque(runs)
    if sum(token_id in row_ids for token_id in token_ids) != len(left):
        raise RequestError("the media of these messages do not fit the prompt", param="messages")
    expanded: list[int] = []
    ranges: dict[tuple[int, int], list[tuple[int, int]]] = {}  # of (item, part); in order of first ranges
    for token_id in token_ids:
        if token_id not in row_ids:
            expanded.append(token_id)
            continue
        item_idx, part_idx, length = left.popleft()
        ranges.setdefault((item_idx, part_idx), []).append((len(expanded), length))
        expanded.extend([token_id] * length)
    placed = []
    for (item_idx, part_idx), own in ranges.items():
        modality, geometry = media[item_idx].layout.parts[part_idx]
        placed.append(PlacedMedia(modality, media[item_idx].media_hashes[part_idx], tuple(own), geometry))
    return Prompt(tuple(expanded), tuple(placed))


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        private = type(backend).from_str(backend.to_str())
        return lambda token_ids: private.decode(token_ids, skip_special_tokens=False)
    return lambda token_ids: tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)
