"""Rows of block tables at a fixed place: a sequence keeps its row from step to step, so that a step writes no
more than the blocks that its tables have gained.

A table is known by its object. While it is the same object it only grows: blocks that are appended are
written behind the others; of a table that has become shorter, and of another object, all are. What stands in
front of a window may change, as no step reads it. A sequence that comes to a full set of rows gets the one
that was not used for longest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_NONE = np.zeros(0, dtype=np.int64)


class TableRows:
    """Owns the host's numbers, and which table each row has. One thread.

    numbers [num_rows, max_blocks] int32: in the place of a block that no table had, `filler`.
    """

    def __init__(self, num_rows: int, max_blocks: int, filler: int):
        self.numbers = np.full((num_rows, max_blocks), filler, dtype=np.int32)
        self._tables: list[Sequence[int] | None] = [None] * num_rows
        self._row_of: dict[int, int] = {}  # by the id of an object in `_tables`
        self._lens = np.zeros(num_rows, dtype=np.int64)  # blocks of each table in `numbers`
        self._used_at = np.zeros(num_rows, dtype=np.int64)  # number of the last step with the row
        self._step = 0
        self._gained = _NONE, _NONE  # rows, and the blocks that each has then

    def place(self, tables: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
        """A step has these tables, at most as many as there are rows. Returns their rows [B] and the places
        [n] int64 in `numbers.ravel()` that it has written: the same again in the next step, unless `sent` is
        called."""
        self._gained = _NONE, _NONE
        if not tables:
            return _NONE, _NONE
        try:
            rows = self._rows_of(tables)
        except KeyError:
            self._take_rows(tables)
            rows = self._rows_of(tables)
        self._step += 1
        self._used_at[rows] = self._step
        width = self.numbers.shape[1]
        # a table may reserve blocks for later
        lens = np.minimum(np.array(list(map(len, tables))), width)
        (changed,) = np.nonzero(lens != self._lens[rows])
        if not len(changed):
            return rows, _NONE
        own_rows, ends = rows[changed], lens[changed]
        starts = self._lens[own_rows]
        starts[ends < starts] = 0
        counts = ends - starts
        before = counts.cumsum() - counts
        places = np.repeat(own_rows * width + starts - before, counts) + np.arange(counts.sum())
        pieces = zip(changed.tolist(), starts.tolist(), ends.tolist(), strict=True)
        blocks = [block for i, start, end in pieces for block in tables[i][start:end]]
        self.numbers.reshape(-1)[places] = blocks
        self._gained = own_rows, ends
        return rows, places

    def sent(self) -> None:
        """What `place` has written is on its way to the device."""
        rows, lens = self._gained
        self._lens[rows] = lens

    def _rows_of(self, tables: Sequence[Sequence[int]]) -> np.ndarray:
        """Raises KeyError for a table without a row."""
        return np.fromiter(map(self._row_of.__getitem__, map(id, tables)), np.int64, len(tables))

    def _take_rows(self, tables: Sequence[Sequence[int]]) -> None:
        """Gives a row to each table that has none."""
        new = {id(table): table for table in tables if id(table) not in self._row_of}
        used_at = self._used_at.copy()
        used_at[[self._row_of[id(table)] for table in tables if id(table) not in new]] = self._step + 1
        oldest = np.argsort(used_at, kind="stable")[: len(new)]
        self._lens[oldest] = 0
        for row, (key, table) in zip(oldest.tolist(), new.items(), strict=True):
            self._row_of.pop(id(self._tables[row]), None)
            self._row_of[key], self._tables[row] = row, table
