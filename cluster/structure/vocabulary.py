"""The tokens of a model, as grammars see them: each is a string of bytes, or special and then no text.

The model may have more ids than its tokenizer, because its logits are padded. No grammar allows such an id.

Where a grammar forces a text, llguidance spells it with the model's tokenizer. Those tokens must decode to
the text byte for byte, so llguidance gets a tokenizer that changes no text (`_literal`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.errors import UnsupportedError

if TYPE_CHECKING:
    from llguidance import LLTokenizer


class VocabularySource(msgspec.Struct, frozen=True):
    """What a vocabulary is made of."""

    tokenizer: str  # the content of tokenizer.json
    num_ids: int  # the width of the model's logits
    end_ids: tuple[int, ...]  # the model's end-of-sequence tokens

    @classmethod
    def load(cls, folder: str, num_ids: int, end_ids: tuple[int, ...]) -> VocabularySource:
        """Blocks for as long as transformers takes to read a tokenizer. Raises UnsupportedError."""
        from transformers import AutoTokenizer

        return cls.of(AutoTokenizer.from_pretrained(folder, mistral_format=False), num_ids, end_ids)

    @classmethod
    def of(cls, tokenizer: Any, num_ids: int, end_ids: tuple[int, ...]) -> VocabularySource:
        """`tokenizer`: of transformers. Raises UnsupportedError if grammars cannot read it."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UnsupportedError(
                "structures need a tokenizer that has a tokenizer.json; this model has none"
            )
        return cls(backend.to_str(), num_ids, end_ids)


# Of models that name no end token. llguidance knows them, too, but not by these names (`_literal`).
_USUAL_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>")
_SPACE = "\u2581"  # how SentencePiece writes a space
_NOWHERE = "\U0010fffe"  # a noncharacter, which no text has


class Vocabulary:
    """Any thread, once it is made."""

    def __init__(self, source: VocabularySource):
        """Blocks: up to a second for the largest vocabularies. Raises UnsupportedError."""
        from llguidance import LLTokenizer

        tokenizer = json.loads(source.tokenizer)
        self.special_ids: dict[str, int] = {
            added["content"]: added["id"]
            for added in tokenizer.get("added_tokens", ())
            if _stands_alone(added)
        }
        end_ids = [*source.end_ids, *(id_ for name, id_ in self.special_ids.items() if name in _USUAL_ENDS)]
        try:
            self.native: LLTokenizer = LLTokenizer(
                _literal(tokenizer),
                n_vocab=source.num_ids,
                eos_token=end_ids[0] if end_ids else None,
            )
        except ValueError as error:
            raise UnsupportedError(
                f"structures cannot be used with this model's tokenizer: {error}"
            ) from error
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def num_words(self) -> int:
        """The number of words of 32 bits in a mask."""
        return -(-self.native.vocab_size // 32)

    @cached_property
    def end_id(self) -> int:
        """The token that llguidance's masks have wherever the answer may end. For a model that names none:
        one that its tokenizer has by a usual name."""
        return self.native.eos_token

    def ends(self, stop_token_ids: Iterable[int]) -> tuple[int, ...]:
        """Those of a request's stop tokens that may end a complete answer: end tokens, which no grammar
        allows as text."""
        native = self.native
        return tuple(i for i in stop_token_ids if i == self.end_id or native.is_special_token(i))


def is_special(name: str, *, is_marked: bool) -> bool:
    """Whether llguidance takes an added token as special: it stands for itself in a grammar, and never for
    its text. Other added tokens are text. `is_marked`: the tokenizer says so."""
    return is_marked or (name.startswith("<") and name.endswith(">"))


def _stands_alone(added: dict[str, Any]) -> bool:
    return is_special(added["content"], is_marked=added["special"])


def _literal(tokenizer: dict[str, Any]) -> str:
    """A tokenizer.json without what makes an encoded text decode to another one: Unicode normal forms, lower
    case, stripped white space, a space in front, special tokens whose name is in the text, and a character
    that decodes to a space. Changes `tokenizer`."""
    tokenizer["normalizer"] = _spelling(tokenizer.get("normalizer"))
    for step in _steps(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
    for added in tokenizer.get("added_tokens", ()):
        if _stands_alone(added):
            added["content"] = f"<{_NOWHERE}{added['id']}>"
        added["lstrip"] = added["rstrip"] = False
    text = json.dumps(tokenizer, ensure_ascii=False)
    writes_spaces = any(
        step["type"] == "Replace" and step["pattern"] == {"String": _SPACE}
        for step in _steps(tokenizer.get("decoder"), "decoders")
    )
    return text.replace(_SPACE, _NOWHERE) if writes_spaces else text


def _spelling(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """What of a normalizer only says how a space is written in the vocabulary."""
    kept = [
        step
        for step in _steps(normalizer, "normalizers")
        if step["type"] == "ByteLevel" or (step["type"] == "Replace" and step["content"] == _SPACE)
    ]
    return {"type": "Sequence", "normalizers": kept} if kept else None


def _steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a list: those in a sequence, or the one."""
    if step is None:
        return []
    return (
        [part for each in step[key] for part in _steps(each, key)] if step["type"] == "Sequence" else [step]
    )
