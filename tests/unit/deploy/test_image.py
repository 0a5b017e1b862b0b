"""deploy/Dockerfile, its script and what it copies, against the packages, the Makefile and the chart.

An image is not built here: the test reads the instructions.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from cluster.config import machine
from tests.unit.deploy.charts import CHART, VALUES

DEPLOY = CHART.parent
REPOSITORY = DEPLOY.parent
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SCRIPT = (DEPLOY / "finish_image.sh").read_text()
IGNORED = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
HADOLINT = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.prefix) / "helm" / "bin"))


def _instructions() -> list[tuple[str, str]]:
    """Instruction and its text, of continued lines too, without comments."""
    lines = [line for line in DOCKERFILE.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(name, text) for name, _, text in (line.partition(" ") for line in whole.splitlines())]


INSTRUCTIONS = _instructions()


def _stages() -> dict[str, list[tuple[str, str]]]:
    found: dict[str, list[tuple[str, str]]] = {}
    for name, text in INSTRUCTIONS:
        if name == "FROM":
            base, _, stage = text.partition(" AS ")
            found[stage] = list(found.get(base, []))
        elif found:
            found[next(reversed(found))].append((name, text))
    return found


STAGES = _stages()


def _text(stage: str) -> str:
    return "\n".join(f"{name} {text}" for name, text in STAGES[stage])


def test_both_targets_exist_and_the_default_is_for_cpus():
    assert {"cpu", "cuda"} < STAGES.keys()
    assert list(STAGES)[-1] == "cpu"


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_image_has_no_packages_of_its_own_and_does_not_run_as_root(target: str):
    text = _text(target)
    assert "g++" not in text and "pip install" not in text
    users = [text for name, text in STAGES[target] if name == "USER"]
    assert users[-1] == (
        f"{VALUES['podSecurityContext']['runAsUser']}:{VALUES['podSecurityContext']['runAsGroup']}"
    )
    copies = [text for name, text in STAGES[target] if name == "COPY"]
    assert copies == [f"--from=install-{target} /opt/epdg /opt/epdg"]


def test_the_image_for_gpus_has_what_the_fast_attention_needs(monkeypatch: pytest.MonkeyPatch):
    """flash-attn 4, and a C compiler with the C library's headers for the launchers of Triton's kernels."""
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    assert any(each.startswith("flash-attn-4[cu13]") for each in extras["gpu"])
    assert '".[gpu]"' in _text("install-cuda") and "[gpu]" not in _text("install-cpu")
    installed = re.findall(r"--no-install-recommends ([^&]+)", _text("cuda"))
    assert [names.split() for names in installed] == [["libgomp1", "tini", "wget"], ["gcc", "libc6-dev"]]
    assert not re.search(r"\bgcc\b", _text("cpu"))
    monkeypatch.setattr(machine, "find_spec", lambda name: object())
    for programs, has_triton in ((["gcc"], True), ([], False)):
        monkeypatch.setattr(machine.shutil, "which", lambda name, programs=programs: name in programs)
        assert machine.can_run_triton.__wrapped__() is has_triton


def test_every_package_that_ships_is_copied():
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        wanted = tomllib.load(file)["tool"]["setuptools"]["packages"]["find"]["include"]
    copied = {text.split()[0] for name, text in STAGES["install"] if name == "COPY"}
    assert {each.rstrip("*") for each in wanted} <= copied
    for name, text in INSTRUCTIONS:
        if name == "COPY" and not text.startswith("--from"):
            for source in text.split()[:-1]:
                assert (REPOSITORY / source).exists(), source
                assert f"!{source}" in IGNORED, f"{source} is ignored"


def test_the_context_leaves_out_what_is_not_copied():
    assert IGNORED[1] == "*"
    for path in ("deploy/chart", "deploy/demo_model/training", "cluster/native/_build"):
        assert path in IGNORED
    needed = (
        "deploy/demo_model/examples/red_circle.png",
        "deploy/demo_model/model.safetensors",
        "deploy/cluster.yaml",
    )
    for path in needed:
        assert (REPOSITORY / path).exists()
        hidden = [rule for rule in IGNORED[2:] if not rule.startswith("!") and fnmatch(path, rule + "*")]
        assert not [rule for rule in hidden if rule != "**/.*"], hidden


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_versions_are_those_of_the_lock(target: str):
    package = {"cpu": ".", "cuda": '".[gpu]"'}[target]
    assert f"--constraint requirements/cpu.lock {package}" in _text(f"install-{target}")
    lock = (REPOSITORY / "requirements" / "cpu.lock").read_text()
    assert f"\nray=={VALUES['rayVersion']}\n" in lock


def test_kernels_are_built_as_the_makefile_builds_them_for_every_cpu():
    makefile = (REPOSITORY / "Makefile").read_text()
    (folders,) = re.findall(r"python -m cluster\.native\.build (.*)", makefile)
    built = re.findall(r'"\$packages/([\w/]+)"', SCRIPT)
    assert built == folders.split() and "cluster.native.build --all " in SCRIPT
    assert all((REPOSITORY / folder).is_dir() for folder in built)


def test_the_pods_find_the_script_in_front_of_haproxy():
    environment = yaml.safe_load((CHART / "files" / "environment.yaml").read_text())
    assert environment["RAY_SERVE_HAPROXY_BINARY_PATH"] == "/opt/epdg/bin/haproxy-front"
    assert '"$environment/bin/haproxy-front"' in SCRIPT
    assert "HAPROXY_BINARY=/opt/epdg/bin/haproxy " in _text("cpu")


def test_a_login_shell_finds_ray():
    """KubeRay starts it with `bash -lc`, and Debian's /etc/profile sets PATH."""
    assert "/etc/profile.d/epdg.sh" in _text("base")
    assert "PATH=/opt/epdg/bin:" in _text("cpu")


def test_the_health_check_asks_what_epdg_serve_answers():
    (check,) = [text for name, text in STAGES["cpu"] if name == "HEALTHCHECK"]
    serve = yaml.safe_load((DEPLOY / "cluster.yaml").read_text())["http_options"]
    assert f"http://{serve['host']}:{serve['port']}/health" in check
    assert [text for name, text in STAGES["cpu"] if name == "CMD"] == ['["epdg", "serve"]']


def test_the_script_is_a_script():
    subprocess.run(["bash", "-n", str(DEPLOY / "finish_image.sh")], check=True, timeout=60)
    assert SCRIPT.startswith("#!/bin/bash\n") and "set -euo pipefail" in SCRIPT


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_hadolint_finds_nothing():
    done = subprocess.run(
        [str(HADOLINT), str(DEPLOY / "Dockerfile")], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")
