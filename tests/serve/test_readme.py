"""The README's examples are run as they stand, with both major versions of the openai client."""

from __future__ import annotations

import json
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
# Each example in a namespace of its own; a process for each of them would mostly import the client.
RUN = """
import contextlib, io, json, sys
import openai
assert openai.__version__.startswith(sys.argv[1]), openai.__version__
printed = {}
for name, code in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, name, "exec"), {"__name__": "__main__"})
    printed[name] = out.getvalue()
print(json.dumps(printed))
"""


def test_the_readme_shows_every_kind_of_request():
    assert set(EXAMPLES) == {"image", "video", "audio", "stream", "error"}


@pytest.mark.parametrize("client", ["openai 2", "openai 3"])
def test_the_examples_print_what_the_readme_says(cluster_url, client):
    codes = {name: code.replace("http://127.0.0.1:8000", cluster_url) for name, (code, _) in EXAMPLES.items()}
    done = subprocess.run(
        [sys.executable, "-c", RUN, f"{client[-1]}."],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(OPENAI_2) if client == "openai 2" else ""},
        input=json.dumps(codes),
        capture_output=True,
        text=True,
        timeout=300,  # a guard
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {name: output for name, (_, output) in EXAMPLES.items()}
