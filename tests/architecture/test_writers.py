"""Every fact of these packages has one writer: a field is written in the file whose class declares it.

Elsewhere it is read, and changes through a method of its record. An attribute of `self` belongs to its class.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.sources import SOURCES, classes_of, name_of, nodes_of, room_of

ROOMS = ("cluster/engine", "cluster/scheduling", "router/scaling", "cluster/text")
# Their lists, sets and dicts are changed by calls as well.
RECORDS = ("cluster/engine/sequence.py", "cluster/engine/state.py", "cluster/engine/shared_copies.py")
# Methods of lists, sets and dicts that change them.
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}
FILES = [path for path in SOURCES if room_of(path) in ROOMS]


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_fields_are_written_where_they_are_declared(path: Path):
    own = _declared_in(path)
    strange = [
        f"{name_of(path)}:{node.lineno} writes {ast.unparse(node)}"
        for node in _written_in(path)
        if node.attr not in own and not _is_self(node.value)
    ]
    assert not strange


def test_each_way_to_write_a_field_is_seen(tmp_path: Path):
    written = """
a.one = 1
a.two += 1
a.three[0].x = a.four[1:] = 1
(a.five, [b.six, *b.c.seven]) = values
del a.eight[0]
for a.nine in values: pass
with file as a.ten: pass
a.sequences.append(1)
a.table.append(1)
held.admission.remove(1)
"""
    path = tmp_path / "written.py"
    path.write_text(written)
    found = {node.attr for node in _written_in(path)}
    assert found == {"one", "two", "x", "four", "five", "six", "seven", "eight", "nine", "ten", "sequences"}


def _declared_in(path: Path) -> set[str]:
    """Fields of the file's classes, and what their methods assign to `self`."""
    fields = {
        statement.target.id
        for node in classes_of(path)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }
    return fields | {node.attr for node in _written_in(path) if _is_self(node.value)}


def _written_in(path: Path) -> Iterator[ast.Attribute]:
    """Attributes that are assigned or deleted, in whole or in part; and the containers of records that are
    changed by a call."""
    for node in nodes_of(path):
        match node:
            case ast.Attribute(ctx=ast.Store() | ast.Del()):
                yield node
            case ast.Subscript(value=ast.Attribute() as container, ctx=ast.Store() | ast.Del()):
                yield container
            case ast.Call(func=ast.Attribute(value=ast.Attribute() as container, attr=name)):
                if name in CHANGING and container.attr in _containers():
                    yield container


@cache
def _containers() -> set[str]:
    """Fields of the records that are lists, sets or dicts."""
    return {
        statement.target.id
        for path in FILES
        if name_of(path) in RECORDS
        for node in classes_of(path)
        for statement in node.body
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and ast.unparse(statement.annotation).startswith(("list[", "set[", "dict["))
    }


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
