"""Block tables on their way from rank 0 to the others, which repeat its calls: what a table has gained since
the call before. So a call does not become longer with the contexts, and a table stays one object in every
rank, as `cluster.model.cuda.table_rows` wants.

Both ends see the same tables in the same order; a number that is used again begins a new table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

MAX_TABLES = 4096  # that rank 0 remembers; of others all is sent again


class WireTable(msgspec.Struct, array_like=True):
    number: int
    start: int  # blocks that the receiver has; 0: a new table
    block_ids: Sequence[int]  # behind them


@dataclass
class _Sent:
    table: Sequence[int]
    number: int
    num_blocks: int = 0


class TableSender:
    """A table is known by its object (`StepModel`)."""

    def __init__(self) -> None:
        self._sent: OrderedDict[int, _Sent] = OrderedDict()  # by the object's id; least recently sent first

    def to_wire(self, tables: Sequence[Sequence[int]]) -> list[WireTable]:
        return [self._of(table) for table in tables]

    def _of(self, table: Sequence[int]) -> WireTable:
        sent = self._sent.get(id(table))
        if sent is None:
            number = len(self._sent)
            if number == MAX_TABLES:
                number = self._sent.popitem(last=False)[1].number
            sent = self._sent[id(table)] = _Sent(table, number)
        else:
            self._sent.move_to_end(id(table))
        start = sent.num_blocks if sent.num_blocks <= len(table) else 0
        sent.num_blocks = len(table)
        return WireTable(sent.number, start, list(table[start:]))


class TableReceiver:
    def __init__(self) -> None:
        self._tables: dict[int, list[int]] = {}

    def of_wire(self, wires: Sequence[WireTable]) -> list[list[int]]:
        return [self._of(wire) for wire in wires]

    def _of(self, wire: WireTable) -> list[int]:
        if not wire.start:
            self._tables[wire.number] = list(wire.block_ids)
        else:
            self._tables[wire.number] += wire.block_ids
        return self._tables[wire.number]
