"""Log-probabilities of drawn tokens, of a prompt's own tokens, and of the most probable ones.

They are the model's own: of its logits, before guidance, penalties, temperature and filters, as transformers'
`output_logits` and vLLM's default (`raw_logprobs`) give them. A row's do not depend on other rows.

On the CPU rows are computed one by one, each in the core's cache, and numpy finds the most probable tokens.
What a row costs in a step: docs/api.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from cluster.types.logprobs import TokenLogprobs

_GROUP = 128  # logits whose maximum is looked at first

Top = tuple[list[int], list[float]]  # token ids, log-probabilities


class PromptScores:
    """What a forward finds out about the tokens of one chunk of a prompt. The forward makes logits of a few
    rows at a time and hands them over; what is kept is bounded by `num_top`."""

    def __init__(self, rows: Sequence[int], targets: Sequence[int], num_top: int):
        """`targets[i]`: the token of the prompt behind the chunk's token `rows[i]`. `num_top`: how many of
        the most probable tokens are wanted."""
        self.rows = rows
        self.targets = targets
        self.num_top = num_top
        self.found: list[TokenLogprobs] = []  # of the first targets

    def take(self, logits: Tensor) -> None:
        """logits: [R, V] float32 of the next R rows. Synchronises the device."""
        start, num_rows = len(self.found), len(logits)
        raw = RawLogprobs(logits, {row: (row, self.num_top) for row in range(num_rows)})
        found = raw.of(range(num_rows), self.targets[start : start + num_rows])
        self.found += [found[row] for row in range(num_rows)]


class RawLogprobs:
    """Log-probabilities of some rows of a step. Made before anything changes the logits; read when tokens are
    drawn."""

    def __init__(self, logits: Tensor, wanted: Mapping[int, tuple[int, int]], *, together: bool = False):
        """logits: [R, V] float32. `wanted`: for rows that are drawn from, the row of `logits` behind it and
        how many of the most probable tokens are wanted. `together`: in a few operations on all rows, as on
        other devices, also on the CPU."""
        self._num_top = [num_top for _, num_top in wanted.values()]
        self._places = {row: place for place, row in enumerate(wanted)}
        raw_rows = [raw for raw, _ in wanted.values()]
        self._rows: Sequence[Tensor] | Tensor = []  # [V] each
        if logits.device.type == "cpu" and not together:
            self._rows = [torch.log_softmax(logits[raw], dim=-1) for raw in raw_rows]
        elif wanted:
            self._rows = torch.log_softmax(logits[raw_rows], dim=-1)

    def of(self, rows: Sequence[int], token_ids: Sequence[int]) -> dict[int, TokenLogprobs]:
        """By its index: of each token whose row is wanted. Token `token_ids[i]` was drawn from row `rows[i]`.
        Synchronises the device."""
        if not self._places:
            return {}
        told = [(i, self._places[row]) for i, row in enumerate(rows) if row in self._places]
        drawn = self._drawn([place for _, place in told], [token_ids[i] for i, _ in told])
        top = self._top()
        return {
            i: TokenLogprobs(logprob, tuple(top[place][0]), tuple(top[place][1]))
            for (i, place), logprob in zip(told, drawn, strict=True)
        }

    def _drawn(self, places: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        if isinstance(self._rows, Tensor):
            device = self._rows.device
            return self._rows[
                torch.tensor(places, device=device), torch.tensor(token_ids, device=device)
            ].tolist()
        return [float(self._rows[place][token]) for place, token in zip(places, token_ids, strict=True)]

    def _top(self) -> list[Top]:
        """The most probable tokens of each row, as many as it wants."""
        if not isinstance(self._rows, Tensor):
            return [_largest(row.numpy(), num) for row, num in zip(self._rows, self._num_top, strict=True)]
        top = self._rows.topk(min(max(self._num_top), self._rows.shape[-1]), dim=-1)
        found = zip(top.indices.tolist(), top.values.tolist(), self._num_top, strict=True)
        return [(ids[:num], values[:num]) for ids, values, num in found]


def _largest(row: np.ndarray, num: int) -> Top:
    """The `num` largest values of a row with their indices, in descending order; of equal ones the first. At
    least `num` values reach the `num`-th largest maximum of a group: only such values are sorted."""
    if num == 0:
        return [], []
    maxima = np.maximum.reduceat(row, np.arange(0, len(row), _GROUP))
    least = np.partition(maxima, -num)[-num] if num < len(maxima) else -np.inf
    found = np.flatnonzero(row >= least)
    found = found[np.argsort(-row[found], kind="stable")][:num]
    return found.tolist(), row[found].tolist()
