"""The wheel, built from this checkout and installed into a fresh environment: `epdg serve` in an empty
folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench import REPOSITORY
from bench.first_steps.kinds import ask
from bench.first_steps.launcher import ReadyServer, running, write_config

WHERE = "import cluster, deploy, pathlib; print(pathlib.Path(cluster.__file__).parents[1])"
NOT_IN_WHEEL = ("bench", "tests")


def run(folder: Path) -> tuple[int, ReadyServer, str]:
    """Bytes of the wheel, start, answer. The dependencies are those of the present environment. Raises
    RuntimeError.
    """
    wheel = build(folder)
    venv = install(wheel, folder / "venv")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    environment = {"PYTHONPATH": ""}
    where = _run([str(venv / "bin" / "python"), "-c", WHERE], elsewhere)
    if not Path(where.strip()).is_relative_to(venv):
        raise RuntimeError(f"not the wheel's code: {where}")
    command = [str(venv / "bin" / "epdg"), "serve", str(write_config(elsewhere))]
    _run([command[0], "--help"], elsewhere)
    with running(command, None, elsewhere, environment) as ready:
        return wheel.stat().st_size, ready, ask(ready.url)


def build(folder: Path) -> Path:
    """Builds a wheel from a copy of what git tracks, so that nothing is left over in the checkout."""
    source = folder / "source"
    names = _run(["git", "ls-files", "-z"], REPOSITORY).split("\0")
    for name in filter(None, names):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    _run([*pip, "--wheel-dir", str(folder), str(source)], folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, venv: Path) -> Path:
    """Installs the wheel into an environment of its own that uses the present dependencies: installing torch
    again would prove nothing.
    """
    _run([sys.executable, "-m", "venv", str(venv)], wheel.parent)
    _run([str(venv / "bin" / "pip"), "install", "--quiet", "--no-deps", str(wheel)], wheel.parent)
    (site,) = (venv / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    left = [name for name in NOT_IN_WHEEL if (site / name).exists()]
    if left:
        raise RuntimeError(f"the wheel holds {left}")
    return venv


def _run(command: list[str], cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stderr}")
    return done.stdout
