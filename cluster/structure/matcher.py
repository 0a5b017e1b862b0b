"""Where one answer is in its grammar.

An answer ends in one of three ways:
* the grammar is complete and nothing may follow (`is_complete`): no end token is drawn;
* the grammar is complete, more may follow, and the model draws one of its end tokens. They are allowed here
  only;
* `max_tokens`.

A matcher that runs into a limit of llguidance would allow the end token from then on, and nothing else. So it
is asked for errors whenever it has done something, and the request fails by name (`StructureError`). So it
does if its grammar takes too much processor time (`Effort`).

Owned by the engine's thread; between `MaskFiller.start` and `take`, and while it `is_busy`, by the thread
that fills masks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.errors import StructureError

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from cluster.structure.vocabulary import Vocabulary


# more than this is slow. Masks of ordinary structures take 0.02 to 1.5 ms, tokens 0.4 ms at most
SLOW_S = 0.002
MAX_MASK_S = 0.1  # of one mask
MAX_ASIDE_S = 10.0  # of all masks of a request that steps do not wait for
MAX_IN_STEPS_S = 0.25  # of all that was slow and that steps had to wait for: tokens taken in, forced text
MAX_FORCED = 8  # tokens of one choice in one step
_OVERLAPS = (  # a client has no such option
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"
)


class Effort:
    """Processor time spent on the structures of one request, all its choices together, and how much it may
    take. llguidance limits the items and the fuel of one mask (`grammar`), which does not limit time: a row
    of an ambiguous grammar takes time with the third power of its items, and every token makes the rows
    longer. Thread time is counted, so that other work on the machine does not count. A method is called by
    one thread at a time."""

    def __init__(self, timer: Callable[[], float] = time.thread_time):
        self.timer = timer
        self._aside_s = 0.0
        self._in_steps_s = 0.0

    def spend_aside(self, began: float) -> bool:
        """A mask was begun at this time and is filled now. Returns whether that was slow."""
        took_s = self.timer() - began
        self._aside_s += took_s
        if took_s > MAX_MASK_S:
            self._aside_s = MAX_ASIDE_S + took_s
        return took_s > SLOW_S

    def spend_in_step(self, began: float) -> bool:
        """The same for what is done on the engine's thread."""
        took_s = self.timer() - began
        if took_s > SLOW_S:
            self._in_steps_s += took_s
        return took_s > SLOW_S

    @property
    def is_spent(self) -> bool:
        """The request must end."""
        return self._aside_s > MAX_ASIDE_S or self._in_steps_s > MAX_IN_STEPS_S

    def forgive(self) -> None:
        """What was spent is not the request's fault: its tokens were matched again."""
        self._aside_s = self._in_steps_s = 0.0


class Matcher:
    def __init__(
        self,
        native: LLMatcher,
        vocabulary: Vocabulary,
        ends: tuple[int, ...] = (),
        param: str = "",
        effort: Effort | None = None,
    ):
        """`ends`: the tokens that may end a complete answer, in place of the vocabulary's `end_id`. `param`:
        field of the request, for errors. `effort`: of the request."""
        self.native = native
        self.effort = effort or Effort()
        self.is_complete = False
        self.mask: np.ndarray | None = None  # [num_words] int32 of the tokens that may come, if it is known
        self.is_slow = False  # no step waits for its next mask
        self.is_busy = False  # its next mask is being filled, and no step waits for it
        self.error: Exception | None = None  # why it has no next mask
        self._vocabulary = vocabulary
        self.end_id = vocabulary.end_id
        self._ends = ends
        self._param = param

    def copy(
        self, ends: tuple[int, ...] | None = None, param: str | None = None, effort: Effort | None = None
    ) -> Matcher:
        """One that goes its own way from here. `ends`, `param`, `effort`: other ones."""
        copied = Matcher(
            self.native.deep_copy(),
            self._vocabulary,
            self._ends if ends is None else ends,
            self._param if param is None else param,
            effort or self.effort,
        )
        copied.is_complete, copied.mask, copied.is_slow = self.is_complete, self.mask, self.is_slow
        return copied

    def accept(self, token_id: int) -> None:
        """The answer has got this token. Raises StructureError."""
        self.mask = None
        if token_id == self.end_id or token_id in self._ends:
            self.is_complete = True
            return
        began = self.effort.timer()
        if not self.native.consume_token(token_id):
            raise StructureError(
                f"the answer cannot go on under its structure: {one_line(self.native.get_error())}",
                param=self._param,
            )
        self.is_complete = self.native.is_stopped()
        self.is_slow |= self.effort.spend_in_step(began)
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
        should have. Otherwise the longest prefix of the guessed ones that the grammar allows. None if that is
        slow: no step waits for it."""
        if self.is_slow:
            return []
        began = self.effort.timer()
        forced = self.native.compute_ff_tokens()[: min(limit, MAX_FORCED)] if limit > 0 else []
        drafts = forced or self.legal(guessed)
        self.is_slow |= self.effort.spend_in_step(began)
        return drafts

    def legal(self, drafts: Sequence[int]) -> list[int]:
        """The longest prefix of the drafts that the grammar allows."""
        drafts = list(drafts)
        return drafts[: self.native.validate_tokens(drafts)] if drafts else drafts

    def check(self) -> None:
        """Raises StructureError if a limit was reached."""
        if self.effort.is_spent:
            raise StructureError(
                "the structure is too complex: it takes too much processor time", param=self._param
            )
        if self.native.is_error():
            raise StructureError(
                f"the structure is too complex: {one_line(self.native.get_error())}", param=self._param
            )

    def make_mask(self) -> None:
        """Sets `mask`, on the caller's thread. Raises StructureError."""
        mask = np.zeros(self._vocabulary.num_words, dtype=np.int32)
        began = self.effort.timer()
        self.native.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.is_slow = self.effort.spend_aside(began)
        self.check()
        self.put_ends(mask)
        self.mask = mask

    def put_ends(self, mask: np.ndarray) -> None:
        """mask: [num_words] int32 as llguidance filled it. Its end token becomes those of the request. If
        there are none, an answer that may end or go on goes on; one that can only end gets llguidance's."""
        words = mask.view(np.uint32)
        if not _has(words, self.end_id):
            return
        if self.end_id not in self._ends:
            _flip(words, self.end_id)
        for token_id in self._ends:
            if not _has(words, token_id):
                _flip(words, token_id)
        if not words.any():
            _flip(words, self.end_id)


def one_line(message: str) -> str:
    """What llguidance says about an error, without the state of its parser."""
    said = " ".join(message.partition("<non")[0].split())
    return (
        said.replace(_OVERLAPS, "oneOf whose branches may overlap; send anyOf")[:300] or "cannot be compiled"
    )


def _has(words: np.ndarray, token_id: int) -> bool:
    return token_id < 32 * len(words) and bool(words[token_id >> 5] >> (token_id & 31) & 1)


def _flip(words: np.ndarray, token_id: int) -> None:
    words[token_id >> 5] ^= np.uint32(1 << (token_id & 31))
