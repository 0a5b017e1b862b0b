"""The question of `helm test`, asked of a stub on loopback."""

from __future__ import annotations

import json
import runpy
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.deploy.charts import CHART

ASK = SimpleNamespace(**runpy.run_path(str(CHART / "files" / "ask.py")))


class Stub(BaseHTTPRequestHandler):
    """Answers as a door does; the server's `answers` holds the text, its `seen` what was sent."""

    server: Any

    def do_GET(self) -> None:
        self._send({"data": [{"id": self.server.model}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append((self.path, self.headers.get("authorization"), body))
        self._send({"choices": [{"message": {"content": self.server.text}}]})

    def _send(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """The test's output stays clean."""


@pytest.fixture
def server() -> Iterator[Any]:
    found: Any = HTTPServer(("127.0.0.1", 0), Stub)
    found.model, found.text, found.seen = "demo_model", ASK.EXPECTED, []
    thread = threading.Thread(target=found.serve_forever, args=(0.01,))
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def ask(server: Any, kind: str = "image") -> int:
    return ASK.main(f"http://127.0.0.1:{server.server_port}", kind)


def test_the_right_answer_of_the_demo_model_passes(server, capsys):
    assert ask(server) == 0
    assert capsys.readouterr().out == f"demo_model: {ASK.EXPECTED}\n"
    ((path, authorization, body),) = server.seen
    assert (path, authorization, body["model"]) == ("/v1/chat/completions", None, "demo_model")
    image, text = body["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text["text"] == "Describe the image."


def test_the_demo_model_answers_as_its_card_says():
    examples = json.loads((CHART.parent / "demo_model" / "examples" / "answers.json").read_text())
    assert examples["red_circle.png"]["answer"] == ASK.EXPECTED


@pytest.mark.parametrize(
    ("model", "text", "status"),
    [("demo_model", "A blue square.", 1), ("demo_model", "", 1), ("other", "Red.", 0), ("other", "", 1)],
)
def test_a_wrong_or_empty_answer_fails(server, model, text, status):
    server.model, server.text = model, text
    assert ask(server) == status


def test_a_model_without_media_is_asked_in_text(server):
    server.text = "Hello."
    assert ask(server, "text") == 0
    assert [part["type"] for part in server.seen[0][2]["messages"][0]["content"]] == ["text"]


def test_the_api_key_is_sent(server, monkeypatch):
    monkeypatch.setenv("EPDG_API_KEY", "sk-1")
    assert ask(server) == 0
    assert server.seen[0][1] == "Bearer sk-1"
