"""What the packages promise about their shape: imports, purity, sizes, docstrings; checked on the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from tests.architecture.sources import (
    PACKAGES,
    PRODUCT,
    REPOSITORY,
    SOURCES,
    TESTS,
    functions_of,
    imported_by,
    importers_of,
    name_of,
    nodes_of,
    text_of,
    tree_of,
)

ROOT = {*PACKAGES, "tests", "docs", "requirements", ".ci", ".gitignore", "Makefile", "pyproject.toml",
        "README.md", "CHANGELOG.md", "LICENSE", "SECURITY.md"}  # fmt: skip
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
REASON = "# size:"  # followed by why this is longer

# Decisions and state machines: data in, data out; the time is an argument.
PURE = ("router/flow", "router/admission", "router/policy", "router/scaling", "cluster/scheduling")
IMPURE = {
    "asyncio",
    "concurrent",
    "ray",
    "requests",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
}


def test_import_contracts_hold():
    lint = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([lint, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_only_one_file_imports_nixl():
    importers = {name for package in ("nixl", "nixl_cu12", "nixl_cu13") for name in importers_of(package)}
    assert importers <= {"kv_transfer/agents/nixl_agent.py"}


def test_only_the_composition_and_its_adapters_import_ray():
    strangers = {
        name for name in importers_of("ray") if not name.startswith(("deploy/serving/", "deploy/app.py"))
    }
    assert not strangers


def test_only_one_file_knows_rays_private_names():
    """Import contracts name an external package, not a part of it, so the names are looked for here: of
    modules, of what is imported from them, and of attributes of `ray`."""
    knowing = {name_of(path) for path in SOURCES for name in _names_of_ray(path) if _is_private(name)}
    assert knowing == {"deploy/serving/ray_internals.py"}


def _names_of_ray(path: Path) -> Iterator[str]:
    """Dotted names in or below `ray` that a file mentions as code, or as the name of a module to import."""
    for node in nodes_of(path):
        match node:
            case ast.Import():
                names = [alias.name for alias in node.names]
            case ast.ImportFrom(module=str(module)):
                names = [f"{module}.{alias.name}" for alias in node.names]
            case ast.Attribute(value=ast.Name(id="ray") | ast.Attribute(value=ast.Name(id="ray"))):
                names = [ast.unparse(node)]
            case ast.Constant(value=str(text)):
                names = [text]
            case _:
                names = []
        yield from (name for name in names if re.fullmatch(r"ray(\.\w+)+", name))


def _is_private(name: str) -> bool:
    return "internal_kv" in name or any(part.startswith("_") for part in name.split("."))


def test_the_product_imports_neither_bench_nor_tests():
    """Nor does `deploy`. Training is left out of the wheel, so only training itself imports training."""
    training = "deploy.demo_model.training"
    for package in ("bench", "tests", training):
        importers = {name for name in importers_of(package) if not name.startswith("bench/")}
        if package == training:
            importers = {name for name in importers if not name.startswith("deploy/demo_model/training/")}
        assert not importers, package


def test_the_wheel_holds_the_product_and_what_is_deployed():
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]
    shipped = find_namespace_packages(str(REPOSITORY), **settings["packages"]["find"])
    assert {name.partition(".")[0] for name in shipped} == {name.partition("/")[0] for name in PRODUCT}
    assert not [name for name in shipped if "training" in name]


def test_pure_packages_import_nothing_that_acts_or_tells_the_time():
    """Directly, or by a module of the product that they import."""
    for room in PURE:
        files = {path for path in SOURCES if name_of(path).startswith(room + "/")}
        assert files, room
        for path in _with_what_they_import(files):
            acting = {name for name in imported_by(path) if name.partition(".")[0] in IMPURE}
            assert not acting, f"{room} by {name_of(path)}"


def test_only_one_file_reads_the_environment():
    """Of the product: benchmarks and the demo model's training set variables of their processes."""
    readers = {
        name_of(path)
        for path in SOURCES
        if name_of(path).startswith(PRODUCT)
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb")
        and isinstance(node.value, ast.Name) and node.value.id == "os"
    }  # fmt: skip
    assert readers == {"cluster/config/environment.py"}


def test_long_files_and_functions_say_why():
    silent = []
    for path in SOURCES:
        text = text_of(path)
        lines = text.splitlines()
        if len(lines) > MAX_FILE_LINES and REASON not in text:
            silent.append(f"{name_of(path)}: {len(lines)} lines")
        for node in functions_of(path):
            body = lines[node.lineno - 1 : node.end_lineno]
            if len(body) > MAX_FUNCTION_LINES and not any(REASON in line for line in body):
                silent.append(f"{name_of(path)}:{node.lineno} {node.name}: {len(body)} lines")
    assert not silent


def test_every_module_says_what_it_is_for():
    assert not [name_of(path) for path in SOURCES if not ast.get_docstring(tree_of(path))]


def test_every_test_asserts_something():
    """Directly or through a function of the test's own tree that is called check_…, assert_… or expect…."""
    assert not [
        f"{name_of(path)}::{node.name}"
        for path in TESTS
        for node in functions_of(path)
        if node.name.startswith("test_") and not any(_asserts(child) for child in ast.walk(node))
    ]


def test_nothing_strays_at_the_root():
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {path.partition("/")[0] for path in listed.stdout.split("\0") if path} <= ROOT


def _with_what_they_import(paths: set[Path]) -> set[Path]:
    """And the modules of the product behind these files, as far as their imports go."""
    found: set[Path] = set()
    new = paths
    while new:
        found |= new
        new = {file for path in new for name in imported_by(path) for file in _files_of(name)} - found
    return found


def _files_of(module: str) -> set[Path]:
    path = REPOSITORY.joinpath(*module.split("."))
    return {file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()}


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.Assert):
        return True
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    return name in ("raises", "fail") or name.lstrip("_").startswith(("assert_", "check", "expect", "audit"))
