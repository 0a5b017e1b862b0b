"""Checkpoints of different kinds: each starts with the shipped file and EPDG_MODEL alone, and answers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench import EXAMPLES
from bench.first_steps.folders import KINDS
from bench.first_steps.launcher import SERVE, ReadyServer, running, write_config

ANSWER_TIMEOUT_S = 120.0


def run_all(folder: Path) -> Iterator[tuple[str, ReadyServer, str]]:
    """Kind, start, answer. Raises RuntimeError for a kind that does not start or answer."""
    for kind, (make, shown) in KINDS.items():
        model = make(folder / kind.replace(" ", "_").replace(",", ""))
        with running([*SERVE, str(write_config(folder))], str(model), folder) as ready:
            yield kind, ready, ask(ready.url, shown)


def ask(url: str, shown: Sequence[str] = ()) -> str:
    """The finish reason and length of one answer. Raises RuntimeError."""
    model = httpx.get(f"{url}/v1/models", timeout=ANSWER_TIMEOUT_S).json()["data"][0]["id"]
    content = [*(_part(kind) for kind in shown), {"type": "text", "text": "What is this?"}]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=ANSWER_TIMEOUT_S)
    if response.status_code != 200:
        raise RuntimeError(response.text)
    answer = response.json()
    return f"{answer['usage']['prompt_tokens']} + {answer['usage']['completion_tokens']} tokens"


def _part(kind: str) -> dict[str, Any]:
    if kind == "image":
        data = base64.b64encode((EXAMPLES / "red_circle.png").read_bytes()).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    data = base64.b64encode((EXAMPLES / "seven.wav").read_bytes()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
