"""`epdg serve` with other models than the demo's: a text checkpoint and the shipped file; a checkpoint on
which a replica fails."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from bench.first_steps.folders import make_text
from bench.first_steps.launcher import SERVE, run_until_end, running, write_config
from deploy.serving.launch import processes_of
from tests.serve.test_replicas import HANG_S, ask

pytestmark = pytest.mark.slow  # each starts a cluster of its own


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_text(tmp_path / "text")


def folder_of(line: str) -> Path:
    return Path(line.rpartition("logs in ")[2])


def test_a_text_checkpoint_starts_with_the_shipped_file_and_no_encode_pool(model, tmp_path):
    with running([*SERVE, str(write_config(tmp_path))], str(model), tmp_path) as ready:
        answer = ask(ready.url)
        assert answer.status_code == 200, answer.text
        assert httpx.get(f"{ready.url}/v1/models", timeout=HANG_S).json()["data"][0]["id"] == "text"
        note, starting, *pools = ready.progress
        folder = folder_of(starting)
        assert "Client for request" not in (folder / "serve.log").read_text()
    assert note == "model type 'qwen2' takes no media: there is no encode pool"
    assert sorted(line for line in pools if "loading" in line) == [
        f"{pool}: loading …" for pool in ("decode", "door", "prefill")
    ]
    assert sum("ready in" in line for line in pools) == 3
    assert not folder.exists() and processes_of(folder) == []


def test_a_replica_that_fails_ends_the_start_with_one_line_and_its_logs_stay(model, tmp_path):
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    ended = run_until_end(write_config(tmp_path), str(model), {}, tmp_path)
    (line,) = ended.errors
    folder = folder_of(ended.progress[1])
    assert ended.code == 1 and processes_of(folder) == []
    reason = f"the checkpoint '{model}' has weights that are not finite: model.norm.weight (logs: {folder})"
    assert line in (f"error: prefill: {reason}", f"error: decode: {reason}")
    assert any(reason.partition(" (")[0] in log.read_text() for log in (folder / "logs" / "serve").iterdir())
