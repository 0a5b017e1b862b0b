"""Log-probabilities of drawn tokens and of the most probable ones.

They are the model's own: of its logits, before guidance, penalties, temperature and filters, as transformers'
`output_logits` and vLLM's default (`raw_logprobs`) give them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cluster.types.messages import TokenLogprobs


class RawLogprobs:
    """Of some rows of a step. Made before anything changes the logits; read when tokens are drawn."""

    def __init__(self, logits: Tensor, wanted: Mapping[int, tuple[int, int]]):
        """logits: [R, V] float32. `wanted`: for rows that are drawn from, the row of `logits` behind it and
        how many of the most probable tokens are wanted."""
        self._num_top = [num_top for _, num_top in wanted.values()]
        self._places = {row: place for place, row in enumerate(wanted)}
        raw_rows = torch.tensor([raw for raw, _ in wanted.values()], dtype=torch.int64, device=logits.device)
        self._logprobs = torch.log_softmax(logits[raw_rows], dim=-1) if wanted else None

    def of(self, rows: Sequence[int], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By its index: of each token whose row is wanted. Token `token_ids[i]` was drawn from row `rows[i]`.
        Synchronises the device."""
        if self._logprobs is None:
            return {}
        device, num_top = self._logprobs.device, min(max(self._num_top), self._logprobs.shape[-1])
        told = [(i, self._places[row]) for i, row in enumerate(rows) if row in self._places]
        drawn = self._logprobs[
            torch.tensor([place for _, place in told], device=device),
            torch.tensor([token_ids[i] for i, _ in told], device=device),
        ].tolist()
        top = self._logprobs.topk(num_top, dim=-1)
        top_ids, top_values = top.indices.tolist(), top.values.tolist()
        return {
            i: TokenLogprobs(
                logprob,
                tuple(top_ids[place][: self._num_top[place]]),
                tuple(top_values[place][: self._num_top[place]]),
            )
            for (i, place), logprob in zip(told, drawn, strict=True)
        }
