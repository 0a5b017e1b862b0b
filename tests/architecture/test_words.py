"""The words of docs/glossary.md, enforced over the product's names, comments and docstrings.

Identifiers are looked at word by word (`EncodeTarget`, `num_open_leases`). tests/architecture/not_done.py counts what is left.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture.not_done import CLASSES, OLD_WORDS, RIDDLES, WORDS
from tests.architecture.sources import (
    DOCUMENTS,
    PRODUCT,
    REPOSITORY,
    SOURCES,
    check_limits,
    classes_of,
    comments_of,
    docstrings_of,
    name_of,
    nodes_of,
    room_of,
    text_of,
)

FILES = [path for path in SOURCES if name_of(path).startswith(PRODUCT)]

# A word, or words that follow each other in a name, and what to write for it.
FORBIDDEN = {
    "flight": "request, Attempt",
    "flights": "requests, attempts",
    "errand": "MediaItemState",
    "errands": "media items",
    "launch": "start (of a request)",
    "launched": "started",
    "departure": "start",
    "departures": "starts",
    "entrance": "AdmissionController",
    "placing": "placement",
    "outlook": "Estimate",
    "following": "KvTransferEstimate",
    "stretch": "local prefill step",
    "stretches": "local prefill",
    "stay": "local prefill",
    "stays": "local prefill",
    "turn": "CPU slot; the next one in an order",
    "turns": "CPU slots; an order",
    "patience": "timeout",
    "lane": "path (transport), queue (scheduling), kind (text or media)",
    "lanes": "paths, queues, kinds",
    "mover": "transfer engine",
    "ledger": "timeline (of a request), Holdings (of an encoder)",
    "most": "max",
    "companion": "negative (prompt, branch, logits)",
    "anew": "again",
    "nobody": "none",
    "somebody": "any",
    "whoever": "the thing that acts",
    "take_blocks": "free_blocks or allocate_blocks",
    "give_blocks": "allocate_blocks",
    "has_left": "has_deviated",
    "may_stay": "may_prefill_locally",
}

# Names that a word of the list has for a good reason.
ALLOWED = {
    "SingleFlight": "the field's word for calls that share one execution",
    "items_of_earlier_turns": "a turn of a conversation",
    "num_turns": "the same",
    "_turns": "of the round-robin policy",
    "_last_turns": "the same",
    "turn_to": "a verb: from one part of a timeline to the next",
    "keeps_ledger": "the HTTP field and header, which clients know",
    "_keeps_ledger": "the same",
    "LEDGER": "the same",
}
ALLOWED_IN = {
    ("launch", "cluster/serving"): "processes are launched",
    ("ledger", "router/openai"): "the HTTP field and header, which clients know",
    ("flight", "cluster/media"): "single flight: calls that share one execution",
    ("flights", "cluster/media"): "the same",
    ("turns", "cluster/media"): "quarter turns of a picture",
    ("lane", "kv_transfer/agents"): "UCX's own word for its paths",
    ("lane", "cluster/worker"): "the same, in the check at start",
}

RIDDLE = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|someone|anybody|anyone|everybody|everyone|anew|he|his|him)\b",
    re.IGNORECASE,
)


ORDINARY = {"following", "launch", "launched", "most", "stay", "stays", "turn", "turns"}  # fine in a sentence
OLD = re.compile(
    r"(?<!in )(?<!in-)(?<!single )(?<![`\w])\b({})\b".format("|".join(FORBIDDEN.keys() - ORDINARY)),
    re.IGNORECASE,
)


def test_names_use_the_glossarys_words():
    found = defaultdict(list)
    for path in FILES:
        for name, line in sorted(set(_names_of(path))):
            found[room_of(path)] += [
                f"{name_of(path)}:{line} {name}: not '{word}' but {FORBIDDEN[word]}"
                for word in _words_of(name)
                if word in FORBIDDEN and name not in ALLOWED and (word, room_of(path)) not in ALLOWED_IN
            ]
    check_limits(found, WORDS)


def test_the_glossary_lists_what_is_forbidden():
    rows = re.findall(r"^\|.*\|.*\|(.*)\|$", text_of(REPOSITORY / "docs" / "glossary.md"), re.MULTILINE)
    listed = {word for row in rows for word in re.findall(r"`(\w+)`", row)}
    assert listed == FORBIDDEN.keys()


def test_a_class_name_is_defined_once():
    """`_Copy` and `Copy` are one name to a reader."""
    found = defaultdict(list)
    for path in FILES:
        for node in classes_of(path):
            found[node.name.lstrip("_")].append(f"{name_of(path)}:{node.lineno}")
    twice = {name: places for name, places in found.items() if len(places) > 1}
    assert twice.keys() <= CLASSES, {n: twice[n] for n in twice.keys() - CLASSES}


def test_the_subject_of_a_sentence_is_a_thing():
    found = defaultdict(list)
    for path in (path for path in FILES if RIDDLE.search(text_of(path))):
        for prose in (*comments_of(path), *docstrings_of(path)):
            for number, line in enumerate(prose.text.splitlines(), prose.line):
                found[room_of(path)] += [f"{name_of(path)}:{number} {word}" for word in RIDDLE.findall(line)]
    check_limits(found, RIDDLES)


def test_sentences_use_the_glossarys_words():
    found = defaultdict(list)
    for path in (path for path in FILES if OLD.search(text_of(path))):
        for prose in (*comments_of(path), *docstrings_of(path)):
            for number, line in enumerate(prose.text.splitlines(), prose.line):
                found[room_of(path)] += [
                    f"{name_of(path)}:{number} {word}"
                    for word in OLD.findall(line)
                    if not _is_allowed(word, path)
                ]
    check_limits(found, OLD_WORDS)


def test_documents_have_things_as_subjects_too():
    found = [
        f"{name_of(path)}:{number} {word}"
        for path in DOCUMENTS
        if not name_of(path).startswith(("bench/", "deploy/")) and name_of(path) != "CHANGELOG.md"
        for number, line in enumerate(text_of(path).splitlines(), 1)
        for word in RIDDLE.findall(re.sub(r"`[^`]*`", "", line))
    ]
    assert not found


def _names_of(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file defines: module, classes, functions, arguments, attributes, fields, module constants."""
    for part in Path(name_of(path)).with_suffix("").parts[1:]:
        yield part, 1
    for node in nodes_of(path):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, node.lineno
            case ast.arg(arg=name):
                yield name, node.lineno
            case ast.Attribute(attr=name, ctx=ast.Store()):
                yield name, node.lineno
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, node.lineno
            case _:
                pass
        if isinstance(node, ast.Module | ast.ClassDef):
            for statement in node.body:
                if isinstance(statement, ast.Assign):
                    yield from (
                        (t.id, statement.lineno) for t in statement.targets if isinstance(t, ast.Name)
                    )


def _is_allowed(word: str, path: Path) -> bool:
    return (word.lower(), room_of(path)) in ALLOWED_IN or bool(RIDDLE.fullmatch(word))


def _words_of(name: str) -> list[str]:
    """The words of a name, each pair of neighbours, joined as in snake_case."""
    name = re.sub(r"in_?flight", "", name, flags=re.IGNORECASE)  # sent and not answered: the field's word
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
    return words + [f"{a}_{b}" for a, b in itertools.pairwise(words)]
