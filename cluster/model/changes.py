"""Changes of logits before a token is drawn. `cluster/engine/drawing.py` collects them.

Each touches only the rows and the token ids that it is given: no tensor of the size of the vocabulary is made
for a penalty. The CPU changes row by row, in place (`add_bias`, `penalize`, `forbid`, `allow`,
`apply_masks`). Another device changes all rows together: one copy to it for all changes of a step, which the
host does not wait for, and a few operations for each kind of change, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.model.cuda.uploads import upload_as_they_are
from cluster.types.request import LogitChanges

Ids = np.ndarray  # [n] int64: token ids, each once
Biased = tuple[int, Ids, np.ndarray]  # row, token ids, and what is added to each, [n] float32
# Row, token ids that it has seen, how often each was generated, [n] float32, and the penalties
Counted = tuple[int, Ids, np.ndarray, LogitChanges]
_NONE = float("-inf")


@dataclass(frozen=True)
class Changes:
    """What is changed in the rows of one step, in the order of the fields."""

    bias: Sequence[Biased] = ()
    counted: Sequence[Counted] = ()
    forbidden: Sequence[tuple[int, Sequence[int]]] = ()  # row, and token ids that it cannot draw
    allowed: Sequence[tuple[int, Ids]] = ()  # row, and the only token ids that it can draw
    masked: Sequence[int] = ()  # rows …
    masks: np.ndarray | None = None  # … and theirs, see `apply_masks`

    def apply(self, logits: Tensor) -> None:
        """logits: [R, V] float32, changed in place. On a GPU it is enqueued."""
        if logits.device.type != "cpu":
            return self.apply_together(logits)
        add_bias(logits, self.bias)
        penalize(logits, self.counted)
        forbid(logits, self.forbidden)
        allow(logits, self.allowed)
        if self.masks is not None:
            apply_masks(logits, self.masked, self.masks)

    def apply_together(self, logits: Tensor) -> None:
        """`apply` for a device where each copy and each operation costs."""
        num_rows, vocab_size = logits.shape
        work: list[tuple[Callable[..., None], Sequence[np.ndarray]]] = []
        if self.bias:
            rows, ids, added = zip(*self.bias, strict=True)
            work.append((_add, [*_places(rows, ids), np.concatenate(added)]))
        if self.counted:
            rows, ids, counts, changes = zip(*self.counted, strict=True)
            penalties = np.ones((3, num_rows), dtype=np.float32)
            penalties[:, rows] = np.transpose([each.penalties for each in changes])
            work.append((_penalize, [*_places(rows, ids), np.concatenate(counts), penalties]))
        kept = [(row, [i for i in ids if 0 <= i < vocab_size]) for row, ids in self.forbidden]
        if any(ids for _, ids in kept):
            rows, ids = zip(*kept, strict=True)
            work.append((_forbid, [*_places(rows, ids), np.array([_NONE], dtype=np.float32)]))
        if masks := self._masks_by_row(vocab_size):
            work.append((_mask, [np.array([*masks], dtype=np.int64), np.stack([*masks.values()])]))
        if not work:
            return
        sent = iter(upload_as_they_are([each for _, arrays in work for each in arrays], logits.device))
        for change, arrays in work:
            change(logits, *islice(sent, len(arrays)))

    def _masks_by_row(self, vocab_size: int) -> dict[int, np.ndarray]:
        """[words] int32 each, of all tokens: those that are allowed and in the mask, where a row has both."""
        found: dict[int, np.ndarray] = {}
        for row, ids in self.allowed:
            bits = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
            bits[ids] = True
            found[row] = np.packbits(bits, bitorder="little").view(np.int32)
        for row, mask in zip(self.masked, () if self.masks is None else self.masks, strict=True):
            words = np.zeros(-(-vocab_size // 32), dtype=np.int32)
            own = mask[: len(words)]
            words[: len(own)] = own
            found[row] = words & found[row] if row in found else words
        return found


def guide(logits: Tensor, negative_logits: Tensor, scale: float | Tensor) -> Tensor:
    """Classifier-free guidance for language models (Sanchez et al. 2023), as transformers computes it. All
    [..., V] float32. `negative_logits`: of the negative sequence, that is, the same tokens under the negative
    prompt."""
    scores = torch.log_softmax(logits, dim=-1)
    negative = torch.log_softmax(negative_logits, dim=-1)
    return scale * (scores - negative) + negative


def guide_rows(logits: Tensor, guided: Sequence[tuple[int, int, float]]) -> Tensor:
    """`guide`, for some rows of a step. guided: by row of the result, the row of `logits` [R, V] that it is
    made of, behind which its negative one stands, and the scale. Returns the [R - len(guided), V] rows that
    are left, a copy. On a GPU it is enqueued, in as many operations for all rows."""
    negative = {raw + 1 for _, raw, _ in guided}
    left = np.array([row for row in range(len(logits)) if row not in negative])
    first, raw, scales = (np.array(values) for values in zip(*guided, strict=True))
    to_left, into, own, theirs, scale = upload_as_they_are(
        [left, first, raw, raw + 1, scales.astype(np.float32)[:, None]], logits.device
    )
    out = logits[to_left]
    out[into] = guide(logits[own], logits[theirs], scale)
    return out


def add_bias(logits: Tensor, changed: Sequence[Biased]) -> None:
    table = logits.numpy()
    for row, ids, added in changed:
        table[row, ids] += added


def penalize(logits: Tensor, changed: Sequence[Counted]) -> None:
    """Repetition penalty as in transformers (Keskar et al. 2019), then frequency and presence penalty by
    OpenAI's formula: logit - count * frequency - (count > 0) * presence."""
    table = logits.numpy()
    for row, ids, counts, changes in changed:
        repetition, frequency, presence = map(np.float32, changes.penalties)
        scores = table[row, ids]
        table[row, ids] = _penalized(scores, counts, repetition, frequency, presence, np.where)


def _penalized(
    scores: Any, counts: Any, repetition: Any, frequency: Any, presence: Any, where: Callable[..., Any]
) -> Any:
    """Arrays and numbers of either library, float32; `where`: of the same."""
    repeated = where(scores < 0, scores * repetition, scores / repetition)
    return repeated - (counts * frequency + (counts > 0) * presence)


def forbid(logits: Tensor, changed: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
    """`changed`: row, and token ids that it cannot draw. Ids outside the vocabulary are ignored."""
    vocabulary = range(logits.shape[-1])
    for row, forbidden in changed:
        if forbidden:
            logits[row, [token_id for token_id in forbidden if token_id in vocabulary]] = _NONE
    return logits


def allow(logits: Tensor, changed: Sequence[tuple[int, Ids]]) -> None:
    """`changed`: row, and the only token ids that it can draw."""
    for row, ids in changed:
        allowed = torch.from_numpy(ids)
        kept = logits[row, allowed]
        logits[row] = _NONE
        logits[row, allowed] = kept


def apply_masks(logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """Row `rows[i]` can draw only the tokens of `masks[i]`. masks: [len(rows), words] int32; token t is bit
    t % 32 of word t // 32. Tokens behind the last word cannot be drawn."""
    num_masked = min(logits.shape[-1], masks.shape[1] * 32)
    for row, own in zip(rows, np.ascontiguousarray(masks).view(np.uint8), strict=True):
        allowed = np.unpackbits(own, count=num_masked, bitorder="little").view(bool)
        logits[row, :num_masked].masked_fill_(torch.from_numpy(~allowed), _NONE)
        logits[row, num_masked:] = _NONE


def _add(logits: Tensor, rows: Tensor, ids: Tensor, added: Tensor) -> None:
    logits[rows, ids] = logits[rows, ids] + added


def _penalize(logits: Tensor, rows: Tensor, ids: Tensor, counts: Tensor, penalties: Tensor) -> None:
    """penalties: [3, R], of each row of `logits`."""
    spread = penalties[:, rows].unbind()
    logits[rows, ids] = _penalized(logits[rows, ids], counts, *spread, torch.where)


def _forbid(logits: Tensor, rows: Tensor, ids: Tensor, none: Tensor) -> None:
    logits[rows, ids] = none


def _mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """masks: [len(rows), words] int32, of all tokens, as in `apply_masks`."""
    bits = masks[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)
    is_forbidden = ((bits & 1) == 0).flatten(1)[:, : logits.shape[-1]]
    logits[rows] = logits[rows].masked_fill(is_forbidden, _NONE)


def _places(rows: Sequence[int], ids: Sequence[Ids | Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Row and token id of every logit that is touched, int64."""
    sizes = [len(own) for own in ids]
    return np.repeat(np.array(rows, dtype=np.int64), sizes), np.concatenate(ids).astype(np.int64)
