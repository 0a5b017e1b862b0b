"""The README's examples are run as they stand, with both major versions of the openai client."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
OPENAI_2 = Path(sys.prefix) / "openai-2"  # made by `make`; next to it, site-packages holds version 3
EXAMPLE = re.compile(r"<!-- example: (\w+) -->\n```python\n(.*?)```\n+```text\n(.*?)```", re.S)
EXAMPLES = {
    name: (code, output) for name, code, output in EXAMPLE.findall((REPOSITORY / "README.md").read_text())
}


def test_the_readme_shows_every_kind_of_request():
    assert set(EXAMPLES) == {"image", "video", "audio", "stream", "error"}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.parametrize("client", ["openai 2", "openai 3"])
def test_an_example_prints_what_the_readme_says(cluster_url, name, client):
    code, output = EXAMPLES[name]
    environment = {**os.environ, "PYTHONPATH": str(OPENAI_2) if client == "openai 2" else ""}
    version = f"import openai; assert openai.__version__.startswith('{client[-1]}.'), openai.__version__\n"
    script = version + code.replace("http://127.0.0.1:8000", cluster_url)
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,  # a guard
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
