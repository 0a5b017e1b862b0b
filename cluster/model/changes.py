"""Changes of logits before a token is drawn. `cluster/engine/drawing.py` calls them, in transformers' order.

All but `guide` change `logits` [R, V] float32 in place. Each touches only the rows and the token ids that it
is given: no tensor of the size of the vocabulary is made for a penalty.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    if not changed:
        return
    rows, ids, counts, changes = zip(*changed, strict=True)
    places, sizes = _places(logits, rows, ids), [len(own) for own in ids]

    def spread(values: Sequence[float]) -> Tensor:
        return torch.from_numpy(np.repeat(np.array(values, dtype=np.float32), sizes)).to(logits.device)

    repetition = spread([each.repetition_penalty for each in changes])
    frequency = spread([each.frequency_penalty for each in changes])
    presence = spread([each.presence_penalty for each in changes])
    generated = torch.from_numpy(np.concatenate(counts)).to(logits.device)
    scores = logits[places]
    scores = torch.where(scores < 0, scores * repetition, scores / repetition)
    logits[places] = scores - (generated * frequency + (generated > 0) * presence)


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
    vocab_size = logits.shape[-1]
    num_masked = min(vocab_size, masks.shape[1] * 32)
    if logits.device.type == "cpu":
        bits = np.ascontiguousarray(masks).view(np.uint8)
        for row, own in zip(rows, bits, strict=True):
            allowed = np.unpackbits(own, count=num_masked, bitorder="little").view(bool)
            logits[row, :num_masked].masked_fill_(torch.from_numpy(~allowed), float("-inf"))
            logits[row, num_masked:] = float("-inf")
        return
    words = torch.from_numpy(masks).to(logits.device)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=logits.device)) & 1
    index = torch.tensor(rows, device=logits.device)
    allowed = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=logits.device)
    allowed[:, :num_masked] = bits.flatten(1)[:, :num_masked].bool()
    logits[index] = logits[index].masked_fill(~allowed, float("-inf"))


def _places(logits: Tensor, rows: Sequence[int], ids: Sequence[Ids]) -> tuple[Tensor, Tensor]:
    """Row and token id of every logit that is touched."""
    row_of = np.repeat(np.array(rows, dtype=np.int64), [len(own) for own in ids])
    return torch.from_numpy(row_of).to(logits.device), torch.from_numpy(np.concatenate(ids)).to(logits.device)
