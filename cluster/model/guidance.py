"""Changes of logits before a token is drawn, in transformers' order: guidance, then forbidden tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def guide(logits: Tensor, negative_logits: Tensor, scale: float) -> Tensor:
    """Classifier-free guidance for language models (Sanchez et al. 2023), as transformers computes it. All
    [..., V] float32. `negative_logits`: of the negative sequence, that is, the same tokens under the negative
    prompt."""
    scores = torch.log_softmax(logits, dim=-1)
    negative = torch.log_softmax(negative_logits, dim=-1)
    return scale * (scores - negative) + negative


def forbid(logits: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """`logits` [B, V] in which row i cannot draw `token_ids[i]`. Ids outside the vocabulary are ignored.
    Changes `logits` in place."""
    vocabulary = range(logits.shape[-1])
    for row, forbidden in enumerate(token_ids):
        if forbidden:
            logits[row, [token_id for token_id in forbidden if token_id in vocabulary]] = float("-inf")
    return logits
