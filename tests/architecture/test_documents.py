"""What the documents name exists: files, modules, commands, settings, metrics, labels. Nothing is missing.

The documents are README.md, SECURITY.md, CHANGELOG.md, docs/ and the READMEs of bench and deploy. Paths and
modules in docstrings are looked up as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import yaml
from prometheus_client import CollectorRegistry
from pydantic import BaseModel

from cluster.config.settings import ClusterArgs
from router.http.edge import HttpMetrics
from router.telemetry.metrics import DoorMetrics
from tests.architecture.sources import (
    DOCUMENTS,
    PACKAGES,
    PRODUCT,
    REPOSITORY,
    SOURCES,
    TESTS,
    docstrings_of,
    name_of,
    room_of,
    text_of,
)

HISTORY = {"CHANGELOG.md"}  # names what was there, too
FOREIGN = {"llama.cpp", "convert_hf_to_gguf.py"}  # of other projects
TOPS = (*PACKAGES, "tests", "docs", "requirements")
MEASURED = REPOSITORY / "docs" / "measured.md"
METRICS = REPOSITORY / "docs" / "metrics.md"
SETTINGS = REPOSITORY / "docs" / "settings.md"
SUFFIXES = ("_bucket", "_sum", "_count", "_total", "_created")

_PATH = re.compile(
    rf"(?<![\w./:-])((?:{'|'.join(TOPS)})/[\w./*-]*\w|[A-Za-z_][\w-]*\.(?:py|md|yaml|cpp))(?![\w/])"
)
_MODULE = re.compile(rf"(?<![\w./-])((?:{'|'.join((*PACKAGES, 'tests'))})(?:\.\w+)+)")
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
_COMMAND = re.compile(r"python3? -m ([\w.]+)")
_TARGET = re.compile(r"\bmake ([a-z][a-z-]*)(?=[`\s,;:.)])")
_METRIC = re.compile(r"\b(epdg_[a-z0-9_]+[a-z0-9])(?:\{([^}]*)\})?")
_CODE = re.compile(r"`([^`\n]+)`")
_UNTRIED = re.compile(r"\b(?:untried|(?:never|not) run on a\s+GPU)\b", re.IGNORECASE)


def test_paths_and_links_in_documents_exist():
    missing = []
    for path in DOCUMENTS:
        text = text_of(path)
        links = [link for link in _LINK.findall(text) if "://" not in link]
        missing += [f"{name_of(path)}: {link}" for link in links if not (path.parent / link).exists()]
        if name_of(path) not in HISTORY:
            missing += [f"{name_of(path)}: {name}" for name in _missing_paths(text, path)]
    assert not missing, "\n".join(missing)


def test_paths_and_modules_in_docstrings_exist():
    missing = []
    for path in [*SOURCES, *TESTS]:
        for prose in docstrings_of(path):
            names = [*_missing_paths(prose.text, path), *_missing_modules(prose.text)]
            missing += [f"{name_of(path)}:{prose.line}: {name}" for name in names]
    assert not missing, "\n".join(missing)


def test_modules_and_commands_in_documents_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    missing = []
    for path in DOCUMENTS:
        if name_of(path) in HISTORY:
            continue
        text = text_of(path)
        missing += [f"{name_of(path)}: {name}" for name in _missing_modules(text)]
        missing += [
            f"{name_of(path)}: python -m {name}" for name in _COMMAND.findall(text) if not _is_command(name)
        ]
        code = "\n".join(_CODE.findall(text))
        missing += [
            f"{name_of(path)}: make {name}" for name in _TARGET.findall(code + "\n") if name not in targets
        ]
    assert not missing, "\n".join(missing)


def test_the_first_page_names_every_package_and_stays_one_page():
    text = text_of(REPOSITORY / "docs" / "architecture.md")
    rooms = {room_of(path) for path in SOURCES if name_of(path).startswith(PRODUCT)} - {"cluster"}
    assert not {
        room for room in rooms if f"`{room}`" not in text and f"`{room.partition('/')[0]}`" not in text
    }
    assert len(text.splitlines()) <= 140


def test_settings_in_documents_exist():
    known = dict(_settings(ClusterArgs))
    rooms = {name.rpartition(".")[0] for name in known} - {""}
    missing = []
    for path in DOCUMENTS:
        for code in _CODE.findall(text_of(path)):
            name = code.split(":")[0].split("=")[0].strip().removeprefix("args.")
            dotted = re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", name)
            if (
                dotted
                and name.split(".")[0] in ClusterArgs.model_fields
                and name not in known
                and name not in rooms
            ):
                missing.append(f"{name_of(path)}: {code}")
    assert not missing, "\n".join(missing)


def test_settings_in_yaml_exist():
    """Inline (`door: {media: {fetch: …}}`) and in blocks that begin with `args:`."""
    unknown = []
    for path in DOCUMENTS:
        text = text_of(path)
        blocks = [
            block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("args:")
        ]
        inline = [code for code in _CODE.findall(text) if re.match(r"[a-z_]+: \{", code)]
        for code in [*blocks, *inline]:
            value = yaml.safe_load(code.replace("…", "null"))
            value = value.get("args", value)
            unknown += [f"{name_of(path)}: {name} in {code}" for name in _unknown(value, ClusterArgs)]
    assert not unknown, "\n".join(unknown)


def test_every_setting_is_documented_with_its_default():
    known = {name: _default(name, value) for name, value in _settings(ClusterArgs)}
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \|", text_of(SETTINGS), re.MULTILINE)
    written = {name: default.strip("`") for name, default in rows}
    assert known.keys() - written.keys() == set(), "not documented"
    assert written.keys() - known.keys() == set(), "there are no such settings"
    assert {name: (value, written[name]) for name, value in known.items() if value != written[name]} == {}


def test_metrics_and_labels_in_documents_are_those_of_the_code():
    registered = _registered_metrics()
    wrong = []
    for path in DOCUMENTS:
        for name, labels in _METRIC.findall(text_of(path)):
            known = registered.get(_stem(name))
            named = set(re.findall(r"(\w+)(?==|,|$)", re.sub(r'"[^"]*"', "", labels)))
            if known is None or not named <= known:
                wrong.append(f"{name_of(path)}: {name}{{{labels}}}, registered: {known}")
    assert not wrong, "\n".join(wrong)


def test_modules_that_say_they_are_untried_are_in_the_table():
    """docs/measured.md, Not proven on hardware: rows name files or patterns."""
    table = text_of(MEASURED).partition("## Not proven on hardware")[2]
    cells = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    patterns = re.findall(r"`([\w/*.-]+)`", " ".join(cells))
    listed = {path for pattern in patterns for path in REPOSITORY.glob(pattern)}
    product = [path for path in SOURCES if name_of(path).startswith(PRODUCT)]
    untried = {path for path in product if any(_UNTRIED.search(each.text) for each in docstrings_of(path))}
    assert len(untried) > 5
    assert [name_of(path) for path in sorted(untried - listed)] == []


def test_every_metric_is_documented_with_its_labels():
    rows = re.findall(r"^\| `(epdg_\w+)(?:\{([\w,]*)\})?` \|", text_of(METRICS), re.MULTILINE)
    written = {_stem(name): set(filter(None, labels.split(","))) for name, labels in rows}
    assert written == _registered_metrics()


def _missing_paths(text: str, path: Path) -> Iterator[str]:
    """A path from the root, or a file's bare name that lies beside the text or has that name somewhere."""
    for name in _PATH.findall(text):
        if "/" not in name:
            if name not in FOREIGN and name not in _file_names() and not (path.parent / name).exists():
                yield name
        elif not any(REPOSITORY.glob(name)) and not any(path.parent.glob(name)):
            yield name


def _file_names() -> set[str]:
    if not _NAMES:
        for top in (*TOPS, "."):
            pattern = "*" if top == "." else "**/*"
            _NAMES.update(path.name for path in (REPOSITORY / top).glob(pattern))
    return _NAMES


_NAMES: set[str] = set()


def _missing_modules(text: str) -> Iterator[str]:
    """The first parts of a dotted name are a package or a module; the others stand in that module's text."""
    for name in _MODULE.findall(text):
        parts = name.split(".")
        if parts[-1] in ("py", "md", "yaml", "cpp"):
            continue
        if not _exists(parts):
            yield name


def _exists(parts: list[str]) -> bool:
    folder = REPOSITORY
    for idx, part in enumerate(parts):
        module = folder / f"{part}.py"
        if module.is_file() or not (folder / part).is_dir():
            text = text_of(module) if module.is_file() else text_of(folder / "__init__.py")
            rest = parts[idx + 1 :] if module.is_file() else parts[idx:]
            return all(re.search(rf"\b{re.escape(each)}\b", text) for each in rest)
        folder /= part
    return True


def _is_command(name: str) -> bool:
    """Ours can be run; another project's (pytest, pip) counts as existing."""
    parts = name.split(".")
    if parts[0] not in TOPS:
        return True
    path = REPOSITORY.joinpath(*parts)
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Every setting by its path in `args`, with its default; a class of admission stands for all of them."""
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from _settings(type(default), f"{prefix}{name}.")
        elif isinstance(default, tuple) and default and isinstance(default[0], BaseModel):
            yield from _settings(type(default[0]), f"{prefix}{name}.")
        else:
            yield prefix + name, default


def _unknown(value: object, model: type[BaseModel]) -> Iterator[str]:
    """Names in a YAML value that are no settings."""
    if not isinstance(value, dict):
        return
    for name, inner in value.items():
        info = model.model_fields.get(name)
        if info is None:
            yield name
            continue
        default = info.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            yield from _unknown(inner, type(default))


def _default(name: str, value: object) -> str:
    """As the tables of docs/settings.md write it."""
    match value:
        case bool():
            return str(value).lower()
        case int() if name.endswith("_bytes"):
            return f"{value >> 20} Mi"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:g}"
        case None | () | "":
            return "none"
        case dict() if not value:
            return "none"
        case str():
            return value
        case tuple() if all(isinstance(each, str) for each in value):
            return "`, `".join(value)
        case _:
            return "required"


def _stem(name: str) -> str:
    """Without what Prometheus' text form adds."""
    for suffix in SUFFIXES:
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _registered_metrics() -> dict[str, set[str]]:
    """Name → labels, asked of the registries themselves; what they read (workers, requests) is scripted."""
    registry = CollectorRegistry()
    DoorMetrics("model", list, MagicMock(), registry=registry)
    HttpMetrics(MagicMock(), MagicMock(), registry)
    return {_stem(name): labels for name, labels in _labels_in(registry)}


def _labels_in(registry: CollectorRegistry) -> Iterator[tuple[str, set[str]]]:
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        if hasattr(collector, "_labelnames"):
            (family,) = collector.describe()
            yield family.name, set(collector._labelnames)
        else:
            families: Iterator[Any] = collector.collect()
            yield from ((family.name, set(family._labelnames)) for family in families)
