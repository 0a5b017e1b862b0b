"""The commands that a new user types first."""

from __future__ import annotations

import subprocess
import tomllib
from pathlib import Path

import pytest

from cluster.config.keys import key_entry, read_key_file
from cluster.config.settings import REPOSITORY
from deploy.serving import command, launch
from deploy.serving.ports import free_port


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where clusters make theirs."""
    made = launch.tempfile.mkdtemp
    monkeypatch.setattr(launch.tempfile, "mkdtemp", lambda prefix, dir: made(prefix=prefix, dir=tmp_path))
    monkeypatch.setattr(command.signal, "signal", lambda number, handler: None)
    return tmp_path


def test_a_wrong_set_up_ends_with_one_line_and_leaves_no_folder(folders, capsys, monkeypatch):
    monkeypatch.setenv("EPDG_MODEL", "/nowhere/model")
    content = command.DEFAULT_CONFIG.read_text()
    (folders / "file.yaml").write_text(content.replace("port: 8000", f"port: {free_port()}"))
    assert command.main(["serve", str(folders / "file.yaml")]) == 1
    said = capsys.readouterr()
    assert said.err == "error: no model folder '/nowhere/model': there is no /nowhere/model\n"
    assert said.out == "" and list(folders.glob("epdg-*")) == []


def test_a_file_that_is_not_there_ends_with_one_line(folders, capsys):
    assert command.main(["serve", str(folders / "none.yaml")]) == 1
    assert capsys.readouterr().err == f"error: cannot read {folders}/none.yaml: No such file or directory\n"


def test_help_names_the_command_and_its_default(capsys):
    with pytest.raises(SystemExit):
        command.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "epdg serve" in text and "deploy/cluster.yaml" in text and "EPDG_MODEL" in text


def test_a_made_key_is_valid_with_the_entry_that_is_printed(tmp_path, capsys):
    assert command.main(["key", "alice"]) == 0
    _, key, *_, line = capsys.readouterr().out.splitlines()
    (tmp_path / "keys.yaml").write_text(line)
    (entry,) = read_key_file(tmp_path / "keys.yaml")
    assert entry == key_entry("alice", key) and len(key) > 40


def test_a_name_that_no_file_could_have_makes_no_key(capsys):
    assert command.main(["key", "a b"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: 'a b' cannot be the name of a key")


def test_make_help_names_every_target_and_variable():
    text = subprocess.run(["make", "help"], cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    words = ("serve", "test", "lint", "fmt", "env", "clean", "help")
    assert all(f"make {word} " in text for word in words)
    assert all(f"{name}=" in text for name in ("EPDG_MODEL", "CONFIG", "PYTHON", "TORCH_INDEX"))


def test_the_package_declares_the_command_and_everything_that_it_imports():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"epdg": "deploy.serving.command:main"}
    declared = {each.partition("[")[0].partition(">")[0].lower() for each in project["dependencies"]}
    assert imported_distributions() <= declared | NOT_DECLARED


NOT_DECLARED = {"triton", "flash-attn"}  # come with torch for CUDA; an extra
SERVICES = ("encoder_service", "prefill_service", "decode_service")
PACKAGES = ("cluster", "router", *SERVICES, "kv_transfer", "deploy")


def imported_distributions() -> set[str]:
    """Of the packages that are installed, by the names that pip knows."""
    import ast
    import sys
    from importlib.metadata import packages_distributions

    names: set[str] = set()
    for package in PACKAGES:
        for file in (REPOSITORY / package).rglob("*.py"):
            if "training" in file.parts:
                continue  # it is not in the wheel
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Import):
                    names.update(alias.name.partition(".")[0] for alias in node.names)
                elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    names.add(node.module.partition(".")[0])
    known = packages_distributions()
    third = names - set(sys.stdlib_module_names) - set(PACKAGES)
    by_pip = {name: {each.lower().replace("_", "-") for each in known.get(name, ())} for name in third}
    by_pip["opentelemetry"] = {"opentelemetry-api", "opentelemetry-sdk"}
    return {min(found) for found in by_pip.values() if found}
