"""The source text that the tests of this folder look at: files, syntax trees, comments and docstrings.

Everything is read once per process. Nothing is imported: a file with an error at import is still checked.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("encoder_service", "prefill_service", "decode_service")
# What composes the product, in `deploy`
ROOF = tuple(
    f"deploy/{name}" for name in ("__init__.py", "app.py", "services.py", "serving", "simulator", "whole.py")
)
PRODUCT = ("cluster", "router", *SERVICES, "kv_transfer", *ROOF)
PACKAGES = ("cluster", "router", *SERVICES, "kv_transfer", "deploy", "bench")
SOURCES = sorted(path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
DOCUMENTS = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "bench/**/*.md", "deploy/**/*.md")
    for path in REPOSITORY.glob(pattern)
)

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Prose(NamedTuple):
    """A comment or a docstring, and the line on which it begins."""

    line: int
    text: str


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def room_of(path: Path) -> str:
    """The folder of a file, at most two levels deep: router/flow, prefill_service, tests/unit."""
    return "/".join(path.relative_to(REPOSITORY).parent.parts[:2])


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(text_of(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def functions_of(path: Path) -> Iterator[FunctionNode]:
    return (node for node in nodes_of(path) if isinstance(node, FunctionNode))


def classes_of(path: Path) -> Iterator[ast.ClassDef]:
    return (node for node in nodes_of(path) if isinstance(node, ast.ClassDef))


@functools.cache
def tokens_of(path: Path) -> tuple[tokenize.TokenInfo, ...]:
    return tuple(tokenize.generate_tokens(io.StringIO(text_of(path)).readline))


def comments_of(path: Path) -> Iterator[Prose]:
    return (Prose(each.start[0], each.string) for each in tokens_of(path) if each.type == tokenize.COMMENT)


def docstrings_of(path: Path) -> Iterator[Prose]:
    for node in nodes_of(path):
        if isinstance(node, ast.Module | ast.ClassDef | FunctionNode) and ast.get_docstring(
            node, clean=False
        ):
            statement = node.body[0]
            assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
            yield Prose(statement.lineno, str(statement.value.value))


@functools.cache
def imported_by(path: Path) -> frozenset[str]:
    """The modules that a file imports, at its top or later, by absolute name."""
    names: set[str] = set()
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return frozenset(names)


def importers_of(package: str, among: Iterable[Path] = SOURCES) -> set[str]:
    return {
        name_of(path)
        for path in among
        if any(name == package or name.startswith(package + ".") for name in imported_by(path))
    }


def check_limits(found: dict[str, list[str]], limits: dict[str, int]) -> None:
    """Fails for rooms with more findings than their limit (0 where none is given), and names the findings."""
    text = "\n".join(
        f"{room}: {len(places)}, limit {limits.get(room, 0)}\n    " + "\n    ".join(places)
        for room, places in sorted(found.items())
        if len(places) > limits.get(room, 0)
    )
    if text:
        pytest.fail(text, pytrace=False)
