"""What the tests of this folder look for in names, sentences and lines, and where it is found.

Identifiers are looked at word by word (`EncodeTarget`, `num_open_leases`). Everything is counted per room, a
folder two levels deep; fragments are counted per file.

    python -m tests.architecture.findings        lists everything
    python -m tests.architecture.findings write  lowers the limits in tests/architecture/not_done.py
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.architecture import not_done
from tests.architecture.sources import (
    PRODUCT,
    SOURCES,
    TESTS,
    classes_of,
    comments_of,
    docstrings_of,
    name_of,
    nodes_of,
    room_of,
    text_of,
)

PRODUCT_FILES = [path for path in SOURCES if name_of(path).startswith(PRODUCT)]
ALL_FILES = [*SOURCES, *TESTS]

Found = dict[str, list[str]]  # room or file → places

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
    ("launch", "deploy/serving"): "processes are launched",
    ("ledger", "router/api"): "the HTTP field and header, which clients know",
    ("flight", "cluster/media"): "single flight: calls that share one execution",
    ("flights", "cluster/media"): "the same",
    ("turns", "cluster/media"): "quarter turns of a picture",
    ("lane", "kv_transfer/agents"): "UCX's own word for its paths",
    ("lane", "cluster/worker"): "the same, in the check at start",
}

PLANTED_BUGS = {f"tests/histories/{name}.py" for name in ("mutants", "mutants_of_doors")}  # inside by nature
# Private names of libraries, which tests imitate or look at.
OF_LIBRARIES = re.compile(
    # torch
    "_C|_aten|_buffers|_devices|_disabled_torch_function_impl|_dispatch_has_kernel_for_dispatch_key|"
    "_foreach_copy_|_handle_(event|kernel|stream)_.*|_index_put_impl_|_local_scalar_dense|"
    "_make_wrapper_subclass|_materialize_copy|_Options|_parameters|_pin_memory|_set_only_lift_cpu_tensors|"
    "_timeout|_to_copy|"
    # transformers, Ray, prometheus_client, the standard library
    "_apply_gate|_attn_implementation|_bound_deployment|_deployment_config|_ray_params|_raylet|"
    "_collector_to_names|_labelnames|_upper_bounds|_exit|_obj|_global_node|_retrieve_input_features"
)

RIDDLE = re.compile(
    r"\b(who|whom|whoever|nobody|somebody|someone|anybody|anyone|everybody|everyone|anew|he|his|him)\b",
    re.IGNORECASE,
)

UNSEEN = {"anew", "nobody", "somebody", "whoever"}  # in the list above already
ORDINARY = {"following", "launch", "launched", "most", "stay", "stays", "turn", "turns"}  # fine in a sentence
OLD = re.compile(
    r"(?<!in )(?<!in-)(?<!single )(?<![`\w])\b({})\b".format("|".join(FORBIDDEN.keys() - ORDINARY - UNSEEN)),
    re.IGNORECASE,
)

# A docstring that begins like this needs the name of its function to be read: "Of one attempt.", "That are
# connected.", "In which KV can be sent." A condition that comes first has a comma after it.
WITHOUT_SUBJECT = re.compile(r"(Of|That|(In|By|On|For|To|From|With|At) (which|whom|whose|what))\b")
PREPOSITION = re.compile(
    r"(As|At(?! least| most)|After|Before|Behind|Beside|Between|By|During|For|From|In|Into|On|Over|Per|Since|"
    r"Through|To|Towards|Under|Until|Up|With|Within|Without)\b"
)
END_OF_SENTENCE = re.compile(r"(?<=[.;!?])\s")

MAX_COLUMNS = 110
BRACKET_AND_COMMENT = re.compile(r"\s*[)\]}]\s+(#.*)")
DIRECTIVES = ("# fmt:", "# type:", "# pyright:", "# noqa")  # they must stand where they are


def names() -> Found:
    found = defaultdict(list)
    for path in PRODUCT_FILES:
        for name, line in sorted(set(_names_of(path))):
            found[room_of(path)] += [
                f"{name_of(path)}:{line} {name}: not '{word}' but {FORBIDDEN[word]}"
                for word in _words_of(name)
                if word in FORBIDDEN and name not in ALLOWED and (word, room_of(path)) not in ALLOWED_IN
            ]
    return found


def riddles() -> Found:
    """Comments and docstrings with who, whoever, nobody, somebody, anew, he."""
    return _in_prose(RIDDLE)


def old_words() -> Found:
    return _in_prose(OLD)


def long_lines() -> Found:
    found = defaultdict(list)
    for path in ALL_FILES:
        for number, line in enumerate(text_of(path).splitlines(), 1):
            if len(line) > MAX_COLUMNS:
                found[room_of(path)].append(f"{name_of(path)}:{number} {len(line)}")
    return found


def comments_behind_brackets() -> Found:
    """Lines that the formatter broke because of their comment: it follows a bracket that stands alone."""
    found = defaultdict(list)
    for path in ALL_FILES:
        for number, line in enumerate(text_of(path).splitlines(), 1):
            match = BRACKET_AND_COMMENT.match(line)
            if match and not match[1].startswith(DIRECTIVES):
                found[room_of(path)].append(f"{name_of(path)}:{number}")
    return found


def fragments() -> Found:
    """Docstrings whose first sentence has no subject, as far as its opening words show it."""
    found = defaultdict(list)
    for path in SOURCES:
        for docstring in docstrings_of(path):
            sentence = first_sentence(docstring.text)
            if is_fragment(sentence):
                found[name_of(path)].append(f"{name_of(path)}:{docstring.line} {sentence[:80]}")
    return found


def first_sentence(docstring: str) -> str:
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    return END_OF_SENTENCE.split(paragraph)[0]


def is_fragment(sentence: str) -> bool:
    if WITHOUT_SUBJECT.match(sentence):
        return True
    return PREPOSITION.match(sentence) is not None and not {",", ":"} & set(sentence)


def classes() -> Found:
    """Class names that are defined twice. `_Copy` and `Copy` are one name to a reader."""
    found = defaultdict(list)
    for path in PRODUCT_FILES:
        for node in classes_of(path):
            found[node.name.lstrip("_")].append(f"{name_of(path)}:{node.lineno}")
    return {name: places for name, places in found.items() if len(places) > 1}


def privates() -> Found:
    """Accesses of tests to what begins with an underscore and is not their own class's, also by the name that
    `setattr` or `patch.object` gets."""
    found = defaultdict(list)
    for path in (path for path in TESTS if name_of(path) not in PLANTED_BUGS):
        for node in nodes_of(path):
            match node:
                case ast.Attribute(value=ast.Name(id="self" | "cls")):
                    continue
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super"))):
                    continue
                case ast.Attribute(attr=name):
                    pass
                case ast.Call(
                    func=ast.Attribute(attr="setattr" | "object"), args=[_, ast.Constant(value=str(name)), *_]
                ):
                    pass
                case _:
                    continue
            if name.startswith("_") and not name.startswith("__") and not OF_LIBRARIES.fullmatch(name):
                found[room_of(path)].append(f"{name_of(path)}:{node.lineno} {name}")
    return found


def _in_prose(pattern: re.Pattern[str]) -> Found:
    found = defaultdict(list)
    for path in (path for path in PRODUCT_FILES if pattern.search(text_of(path))):
        for prose in (*comments_of(path), *docstrings_of(path)):
            for number, line in enumerate(prose.text.splitlines(), prose.line):
                found[room_of(path)] += [
                    f"{name_of(path)}:{number} {word}"
                    for word in pattern.findall(line)
                    if (word.lower(), room_of(path)) not in ALLOWED_IN
                ]
    return found


def _names_of(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file defines: module, classes, functions, arguments, attributes, fields, constants."""
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


def _words_of(name: str) -> list[str]:
    """The words of a name, each pair of neighbours, joined as in snake_case."""
    name = re.sub(r"in_?flight", "", name, flags=re.IGNORECASE)  # sent and not answered: the field's word
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
    return words + [f"{a}_{b}" for a, b in itertools.pairwise(words)]


LIMITS = {
    "NAMES": ("names with a word that the glossary replaces", names, not_done.NAMES),
    "RIDDLES": ("sentences with who, whoever, nobody, somebody, anew, he", riddles, not_done.RIDDLES),
    "OLD_WORDS": ("sentences with a word that the glossary replaces", old_words, not_done.OLD_WORDS),
    "LONG_LINES": ("lines over 110 columns", long_lines, not_done.LONG_LINES),
    "COMMENTS": ("lines that their comment has broken", comments_behind_brackets, not_done.COMMENTS),
    "FRAGMENTS": ("docstrings that begin without a subject", fragments, not_done.FRAGMENTS),
    "CLASSES": ("modules that define one class name", classes, not_done.CLASSES),
    "PRIVATES": ("private names of the product that tests reach into", privates, not_done.PRIVATES),
}


def main(arguments: list[str]) -> None:
    text = not_done.__doc__ or ""
    lines = [f'"""{text}"""\n']
    for name, (title, find, limits) in LIMITS.items():
        found = {room: places for room, places in sorted(find().items()) if places}
        print(f"{title}: {sum(map(len, found.values()))}")
        for place in [] if arguments else itertools.chain(*found.values()):
            print("   ", place)
        left = {
            room: min(len(places), limits.get(room, 0)) for room, places in found.items() if limits.get(room)
        }
        entries = "".join(f'\n    "{room}": {count},' for room, count in left.items())
        lines.append(f"# {title}\n{name}: dict[str, int] = {{{entries}{chr(10) if left else ''}}}\n")
    if arguments:
        Path(not_done.__file__).write_text("\n".join(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
