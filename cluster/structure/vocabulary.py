"""The tokens of a model, as grammars see them: each is a string of bytes, or special and then no text.

The model may have more ids than its tokenizer, because its logits are padded. No grammar allows such an id.
"""

from __future__ import annotations

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


class Vocabulary:
    """Any thread, once it is made."""

    def __init__(self, source: VocabularySource):
        """Blocks: up to a second for the largest vocabularies. Raises UnsupportedError."""
        from llguidance import LLTokenizer

        try:
            self.native: LLTokenizer = LLTokenizer(
                source.tokenizer,
                n_vocab=source.num_ids,
                eos_token=source.end_ids[0] if source.end_ids else None,
            )
        except ValueError as error:
            raise UnsupportedError(
                f"structures cannot be used with this model's tokenizer: {error}"
            ) from error
        self._ends: dict[tuple[int, ...], tuple[int, ...]] = {}

    @property
    def num_words(self) -> int:
        """Of 32 bits, in a mask."""
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
