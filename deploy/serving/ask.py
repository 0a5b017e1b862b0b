"""The command `epdg ask`: sends one question, with files, to a running server and prints the answer while it
comes. Knows nothing of the cluster but its URL. Blocks; imports no Ray."""

from __future__ import annotations

import base64
import json
import mimetypes
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from cluster.errors import RequestError
from cluster.types.media import Modality

TIMEOUT_S = 300.0  # between two pieces of the answer


def ask(url: str, question: str, files: Sequence[Path], api_key: str | None = None) -> Iterator[str]:
    """The answer, in pieces. Raises RequestError with a message for the person at the terminal."""
    message = {"role": "user", "content": [*map(_part, files), {"type": "text", "text": question}]}
    headers = {"content-type": "application/json"}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    try:
        with _open(f"{url}/v1/models", headers) as answer:
            model = json.load(answer)["data"][0]["id"]
        body = {"model": model, "messages": [message], "stream": True}
        with _open(f"{url}/v1/chat/completions", headers, json.dumps(body).encode()) as events:
            for line in events:
                if line.startswith(b"data: {"):
                    yield _text_of(json.loads(line[6:]))
    except urllib.error.HTTPError as error:
        raise RequestError(_reason(error)) from error
    except OSError as error:
        raise RequestError(f"no answer from {url}: {error}; is `epdg serve` running there?") from error


def _open(url: str, headers: dict[str, str], body: bytes | None = None) -> Any:
    return urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=TIMEOUT_S)


def _part(file: Path) -> dict[str, Any]:
    media_type = mimetypes.guess_type(file.name)[0] or ""
    kind = media_type.partition("/")[0]
    if kind not in list(Modality):
        raise RequestError(f"{file}: neither an image nor a video nor a sound by its name")
    try:
        content = base64.b64encode(file.read_bytes()).decode()
    except OSError as error:
        raise RequestError(f"cannot read {file}: {error.strerror}") from error
    return {"type": f"{kind}_url", f"{kind}_url": {"url": f"data:{media_type};base64,{content}"}}


def _text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise RequestError(event["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _reason(error: urllib.error.HTTPError) -> str:
    """The server's own words, if the answer has OpenAI's error object."""
    try:
        return json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{error.url}: {error.code} {error.reason}"
