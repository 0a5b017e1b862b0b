"""Lets schemathesis ask a running API; for `make test` and for `make conformance`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

COMMAND = Path(sys.executable).with_name("schemathesis")
CONFIG = Path(__file__).with_name("schemathesis.toml")
LIMITS = "examples,coverage"  # phases: the document's examples, and what the limits in its schemas give
DRAWN = "fuzzing"
VERSION = version("schemathesis")


def ask(url: str, *phases: str, only_examples_of: str = "", limit_s: float = 300.0) -> str:
    """What is wrong; empty: nothing. The same requests each time. `only_examples_of`: paths, as a regular
    expression, that are not asked about the limits in their schemas."""
    config = CONFIG.read_text()
    if only_examples_of:
        config += (
            f"\n[[operations]]\ninclude-path-regex = '{only_examples_of}'\nphases.coverage.enabled = false\n"
        )
    with tempfile.TemporaryDirectory() as folder:  # it keeps what it found where it runs
        path = Path(folder, CONFIG.name)
        path.write_text(config)
        command = [
            str(COMMAND), "--config-file", str(path), "run", f"{url}/openapi.json", "--url", url,
            "--no-color", "--phases", ",".join(phases), "--generation-deterministic",
            "--request-timeout", "60",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s)
        except subprocess.TimeoutExpired as expired:
            return f"no end within {limit_s:g} s: {(expired.stdout or b'')[-2000:].decode(errors='replace')}"
    return "" if done.returncode == 0 else f"{done.stdout}{done.stderr}"[-6000:]
