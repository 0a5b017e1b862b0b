"""Block tables that rank 0 sends to the others."""

from __future__ import annotations

from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from cluster.model import rank_tables
from cluster.model.rank_tables import TableReceiver, TableSender

changes = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.booleans()), max_size=6)


@given(calls=st.lists(changes, max_size=20), most=st.sampled_from([2, 3, 100]))
def test_a_rank_gets_the_tables_of_a_call_and_keeps_their_objects(calls, most: int) -> None:
    with mock.patch.object(rank_tables, "MAX_TABLES", most):
        sender, receiver = TableSender(), TableReceiver()
        tables: list[list[int]] = [[seq] for seq in range(6)]
        held: dict[int, tuple[list[int], list[int]]] = {}
        for number, call in enumerate(calls):
            for seq, count, begins in call:
                tables[seq] = [] if begins else tables[seq]
                tables[seq] += range(10 * number, 10 * number + count)
            sent = [tables[seq] for seq, *_ in call]
            wires = sender.to_wire(sent)
            found = receiver.of_wire(wires)
            assert found == sent
            for (seq, *_), table, there in zip(call, sent, found, strict=True):
                if most == 100 and held.get(seq, (None,))[0] is table:
                    assert held[seq][1] is there
                if table:
                    held[seq] = (table, there)


def test_a_call_carries_what_its_tables_have_gained() -> None:
    sender, tables = TableSender(), [list(range(5000)), list(range(5000, 9000))]
    assert [len(wire.block_ids) for wire in sender.to_wire(tables)] == [5000, 4000]
    tables[1].append(1)
    assert [[*wire.block_ids] for wire in sender.to_wire(tables[::-1])] == [[1], []]
