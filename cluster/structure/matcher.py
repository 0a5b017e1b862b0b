"""Where one answer is in its grammar.

An answer ends in one of three ways:
* the grammar is complete and nothing may follow (`is_complete`): no end token is drawn;
* the grammar is complete, more may follow, and the model draws one of its end tokens. They are allowed here
  only;
* `max_tokens`.

A matcher that runs into a limit of llguidance would allow the end token from then on, and nothing else. So it
is asked for errors whenever it has done something, and the request fails by name (`StructureError`).

Owned by the engine's thread; between `MaskFiller.start` and `take`, by the thread that fills masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from cluster.structure.vocabulary import Vocabulary


MAX_FORCED = 8  # tokens of one choice in one step


class StructureError(RequestError):
    """The structure cannot be held, or no answer can."""

    code = "invalid_structure"


class Matcher:
    def __init__(
        self, native: LLMatcher, vocabulary: Vocabulary, ends: tuple[int, ...] = (), param: str = ""
    ):
        """`ends`: the tokens that may end a complete answer, in place of the vocabulary's `end_id`. `param`:
        field of the request, for errors."""
        self.native = native
        self.is_complete = False
        self.mask: np.ndarray | None = None  # [num_words] int32 of the tokens that may come, if it is known
        self._vocabulary = vocabulary
        self._end_id = vocabulary.end_id
        self._ends = ends
        self._param = param

    def copy(self, ends: tuple[int, ...] | None = None, param: str | None = None) -> Matcher:
        """One that goes its own way from here. `ends`, `param`: other ones."""
        copied = Matcher(
            self.native.deep_copy(),
            self._vocabulary,
            self._ends if ends is None else ends,
            self._param if param is None else param,
        )
        copied.is_complete, copied.mask = self.is_complete, self.mask
        return copied

    def accept(self, token_id: int) -> None:
        """The answer has got this token. Raises StructureError."""
        self.mask = None
        if token_id == self._end_id or token_id in self._ends:
            self.is_complete = True
            return
        if not self.native.consume_token(token_id):
            raise StructureError(
                f"the answer cannot go on under its structure: {one_line(self.native.get_error())}",
                param=self._param,
            )
        self.is_complete = self.native.is_stopped()
        self.check()

    def completes(self, token_id: int) -> bool:
        """Whether the answer is complete with this token. Changes nothing."""
        copied = self.copy()
        copied.accept(token_id)
        return copied.is_complete

    def allowed(self) -> np.ndarray:
        """[n] int64: the tokens that may come next. Raises StructureError."""
        if self.mask is None:
            self.make_mask()
        return np.flatnonzero(np.unpackbits(np.asarray(self.mask).view(np.uint8), bitorder="little"))

    def drafts(self, guessed: Sequence[int], limit: int) -> list[int]:
        """The tokens that follow for certain, if there are any: at most `limit`, and not more than a step
        should have. Otherwise the longest prefix of the guessed ones that the grammar allows."""
        forced = self.native.compute_ff_tokens()[: min(limit, MAX_FORCED)] if limit > 0 else []
        return forced or self.legal(guessed)

    def legal(self, drafts: Sequence[int]) -> list[int]:
        """The longest prefix of the drafts that the grammar allows."""
        drafts = list(drafts)
        return drafts[: self.native.validate_tokens(drafts)] if drafts else drafts

    def check(self) -> None:
        """Raises StructureError if a limit was reached."""
        if self.native.is_error():
            raise StructureError(
                f"the structure is too complex: {one_line(self.native.get_error())}", param=self._param
            )

    def make_mask(self) -> None:
        """Sets `mask`, on the caller's thread. Raises StructureError."""
        mask = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        self.native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()
        self.put_ends(mask)
        self.mask = mask

    def put_ends(self, mask: np.ndarray) -> None:
        """mask: [num_words] int32 as llguidance filled it. Its end token becomes those of the request. If
        there are none, an answer that may end or go on goes on; one that can only end gets llguidance's."""
        words = mask.view(np.uint32)
        if not _has(words, self._end_id):
            return
        if self._end_id not in self._ends:
            _flip(words, self._end_id)
        for token_id in self._ends:
            if not _has(words, token_id):
                _flip(words, token_id)
        if not words.any():
            _flip(words, self._end_id)


def one_line(message: str) -> str:
    """What llguidance says about an error, without the state of its parser."""
    return " ".join(message.partition("<non")[0].split())[:300] or "cannot be compiled"


def _has(words: np.ndarray, token_id: int) -> bool:
    return token_id < 32 * len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _flip(words: np.ndarray, token_id: int) -> None:
    words[token_id >> 5] ^= np.uint32(1 << (token_id & 31))
