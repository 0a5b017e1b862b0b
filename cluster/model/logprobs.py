"""Log-probabilities of drawn tokens, of a prompt's own tokens, and of the most probable ones.

They are the model's own: of its logits, before guidance, penalties, temperature and filters, as transformers'
`output_logits` and vLLM's default (`raw_logprobs`) give them. A row's do not depend on other rows.

On the CPU rows are computed one by one, each in the core's cache, and numpy finds the most probable tokens.
What a row costs in a step: docs/api.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cluster.model.cuda.draw import reading, to_device
from cluster.model.cuda.uploads import upload_as_they_are
from cluster.types.logprobs import TokenLogprobs

_GROUP = 128  # logits whose maximum is looked at first

Reading = Callable[[], dict[int, TokenLogprobs]]  # by index of the token
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
        self._num_taken = 0
        self._readings: list[Reading] = []

    def take(self, logits: Tensor) -> None:
        """logits: [R, V] float32 of the next R rows. On a GPU everything is enqueued."""
        start, rows = self._num_taken, range(len(logits))
        self._num_taken += len(rows)
        raw = RawLogprobs(logits, {row: (row, self.num_top) for row in rows}, rows)
        self._readings.append(raw.reading(to_device(self.targets[start : start + len(rows)], logits.device)))

    def found(self) -> list[TokenLogprobs]:
        """Returns those of the targets whose rows were taken. Waits for them."""
        return [each for read in self._readings for each in read().values()]


class RawLogprobs:
    """Log-probabilities of some rows of a step. Made before anything changes the logits; read when tokens are
    drawn."""

    def __init__(
        self,
        logits: Tensor,
        wanted: Mapping[int, tuple[int, int]],
        rows: Sequence[int],
        *,
        together: bool = False,
    ):
        """logits: [R, V] float32. `wanted`: for rows that are drawn from, the row of `logits` behind it and
        how many of the most probable tokens are wanted. `rows`: of each token that will be drawn. `together`:
        in a few operations on all rows, as on other devices, also on the CPU. Enqueues on a GPU."""
        self._num_top = [num_top for _, num_top in wanted.values()]
        places = {row: place for place, row in enumerate(wanted)}
        # Of each token whose row is wanted: its index, and the place of its row
        self._tokens = [i for i, row in enumerate(rows) if row in places]
        self._places = [places[rows[i]] for i in self._tokens]
        raw_rows = [raw for raw, _ in wanted.values()]
        self._rows: Sequence[Tensor] | _OnDevice = []  # [V] each
        if logits.device.type == "cpu" and not together:
            self._rows = [torch.log_softmax(logits[raw], dim=-1) for raw in raw_rows]
        elif wanted:
            numbers = (np.array(each, dtype=np.int64) for each in (raw_rows, self._tokens, self._places))
            raw, tokens, place = upload_as_they_are([*numbers], logits.device)
            self._rows = _OnDevice(torch.log_softmax(logits[raw], dim=-1), tokens, place)

    def reading(self, tokens: Tensor) -> Reading:
        """tokens [number of `rows`] int64: the drawn ones, on the device of the logits. Enqueues everything,
        results included. The function that is returned waits for these alone; it gives them by index of the
        token, for each whose row is wanted."""
        if not self._places:
            return dict
        indices, places = self._tokens, self._places
        find = self._finding(tokens)

        def read() -> dict[int, TokenLogprobs]:
            drawn, top = find()
            return {
                i: TokenLogprobs(logprob, tuple(top[place][0]), tuple(top[place][1]))
                for i, place, logprob in zip(indices, places, drawn, strict=True)
            }

        return read

    def _finding(self, tokens: Tensor) -> Callable[[], tuple[list[float], list[Top]]]:
        """The function returns those of `_tokens`, and the most probable tokens of each row."""
        if isinstance(self._rows, _OnDevice):
            return self._rows.finding(tokens, self._num_top)
        ids = tokens.tolist()
        drawn = [float(self._rows[p][ids[i]]) for i, p in zip(self._tokens, self._places, strict=True)]
        top = [_largest(row.numpy(), num) for row, num in zip(self._rows, self._num_top, strict=True)]
        return lambda: (drawn, top)


@dataclass(frozen=True)
class _OnDevice:
    """logprobs: [rows, V] float32. tokens, places: int64, which drawn tokens are wanted, and their rows."""

    logprobs: Tensor
    tokens: Tensor
    places: Tensor

    def finding(self, drawn: Tensor, num_top: Sequence[int]) -> Callable[[], tuple[list[float], list[Top]]]:
        """One copy to the host, of bits: of float32 and int32."""
        own = self.logprobs[self.places, drawn[self.tokens]]
        top = self.logprobs.topk(min(max(num_top), self.logprobs.shape[-1]), dim=-1)
        parts = (own.view(torch.int32), top.indices.int().flatten(), top.values.flatten().view(torch.int32))
        sizes, shape = [len(own), top.indices.numel()], top.indices.shape
        copied = reading(torch.cat(parts))

        def find() -> tuple[list[float], list[Top]]:
            of_own, ids, values = np.split(copied(), np.cumsum(sizes))
            found = zip(
                ids.reshape(shape).tolist(),
                values.view(np.float32).reshape(shape).tolist(),
                num_top,
                strict=True,
            )
            return of_own.view(np.float32).tolist(), [(ids[:num], values[:num]) for ids, values, num in found]

        return find


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
