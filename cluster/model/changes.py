"""Changes of logits before a token is drawn. `cluster/engine/drawing.py` calls them, in transformers' order.

All but `guide` change `logits` [R, V] float32 in place. Each touches only the rows and the token ids that it
is given: no tensor of the size of the vocabulary is made for a penalty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cluster.types.request import LogitChanges

Ids = np.ndarray  # [n] int64: token ids, each once


def guide(logits: Tensor, negative_logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance for language models (Sanchez et al. 2023), as transformers computes it. All
    [..., V] float32. `negative_logits`: of the negative sequence, that is, the same tokens under the negative
    prompt."""
    scores = torch.log_softmax(logits, dim=-1)
    negative = torch.log_softmax(negative_logits, dim=-1)
    return scale * (scores - negative) + negative


def add_bias(logits: Tensor, changed: Sequence[tuple[int, Ids, np.ndarray]]) -> None:
    """`changed`: row, token ids, and what is added to each, [n] float32."""
    if not changed:
        return
    rows, ids, added = zip(*changed, strict=True)
    places = _places(logits, rows, ids)
    logits[places] = logits[places] + torch.from_numpy(np.concatenate(added)).to(logits.device)


def penalize(logits: Tensor, changed: Sequence[tuple[int, Ids, np.ndarray, LogitChanges]]) -> None:
    """Repetition penalty as in transformers (Keskar et al. 2019), then frequency and presence penalty by
    OpenAI's formula: logit - count * frequency - (count > 0) * presence. `changed`: row, token ids that it
    has seen, how often each was generated, [n] float32, and the penalties."""
    if logits.device.type != "cpu":
        return penalize_together(logits, changed)
    table = logits.numpy()
    for row, ids, counts, changes in changed:
        repetition, frequency, presence = map(np.float32, changes.penalties)
        scores = table[row, ids]
        table[row, ids] = _penalized(scores, counts, repetition, frequency, presence, np.where)


def penalize_together(logits: Tensor, changed: Sequence[tuple[int, Ids, np.ndarray, LogitChanges]]) -> None:
    """`penalize` in a few operations, for a device where each one costs."""
    if not changed:
        return
    rows, ids, counts, changes = zip(*changed, strict=True)
    places, sizes = _places(logits, rows, ids), [len(own) for own in ids]
    spread = [
        torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(logits.device)
        for values in zip(*(each.penalties for each in changes), strict=True)
    ]
    generated = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    logits[places] = _penalized(logits[places], generated, *spread, torch.where)


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
            logits[row, [token_id for token_id in forbidden if token_id in vocabulary]] = float("-inf")
    return logits


def allow(logits: Tensor, changed: Sequence[tuple[int, Ids]]) -> None:
    """`changed`: row, and the only token ids that it can draw."""
    for row, ids in changed:
        allowed = torch.from_numpy(ids).to(logits.device)
        kept = logits[row, allowed]
        logits[row] = float("-inf")
        logits[row, allowed] = kept


def apply_masks(logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """Row `rows[i]` can draw only the tokens of `masks[i]`. masks: [len(rows), words] int32; token t is bit
    t % 32 of word t // 32. Tokens behind the last word cannot be drawn."""
    if logits.device.type != "cpu":
        return apply_masks_together(logits, rows, masks)
    num_masked = min(logits.shape[-1], masks.shape[1] * 32)
    for row, own in zip(rows, np.ascontiguousarray(masks).view(np.uint8), strict=True):
        allowed = np.unpackbits(own, count=num_masked, bitorder="little").view(bool)
        logits[row, :num_masked].masked_fill_(torch.from_numpy(~allowed), float("-inf"))
        logits[row, num_masked:] = float("-inf")


def apply_masks_together(logits: Tensor, rows: Sequence[int], masks: np.ndarray) -> None:
    """`apply_masks` in a few operations, for a device where each one costs."""
    device, vocab_size = logits.device, logits.shape[-1]
    bits = torch.from_numpy(masks).to(device)[:, :, None] >> torch.arange(
        32, dtype=torch.int32, device=device
    )
    masked = (bits & 1).bool().flatten(1)[:, :vocab_size]
    allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
    allowed[:, : masked.shape[1]] = masked
    index = torch.tensor(rows, device=device)
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))


def _places(logits: Tensor, rows: Sequence[int], ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Row and token id of every logit that is touched."""
    row_of = np.repeat(np.array(rows, dtype=np.int64), [len(own) for own in ids])
    return torch.from_numpy(row_of).to(logits.device), torch.from_numpy(np.concatenate(ids)).to(logits.device)
