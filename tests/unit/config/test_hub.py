"""Models that are named by a hub id: downloaded where a hub answers, taken from the cache, refused in one
line."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from cluster.config import hub
from cluster.errors import ConfigError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FILES = {"config.json": json.dumps(CONFIG).encode(), "weights.bin": b"pickled"}


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one small public model needs."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if path.startswith("/api/models/org/name/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                for name, content in FILES.items()
            ]
            self._answer(json.dumps(entries).encode())
        elif path.startswith("/api/models/org/name"):
            siblings = [{"rfilename": name} for name in FILES]
            self._answer(json.dumps({"id": "org/name", "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith("/org/name/resolve/") and name in FILES:
            self._answer(FILES[name])
        else:
            self._answer(b"{}", status=404, headers={"X-Error-Code": "RepoNotFound"})

    def _answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        etag = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        for key, value in {"Content-Length": str(len(content)), **etag, **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a hub on this machine, with an empty cache here."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_model_is_downloaded_without_what_is_not_wanted_and_found_again_offline(endpoint):
    folder = hub.download("org/name", is_offline=False, endpoint=endpoint)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {
        "config.json": FILES["config.json"]
    }
    assert hub.download("org/name", is_offline=True) == folder


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("config.json", {**CONFIG, "quantization_config": {"quant_method": "awq"}}, "quantised as awq"),
        ("config.json", {**CONFIG, "architectures": ["LlamaModel"]}, "'LlamaModel' is not a causal"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4_AWQ"}}, "modelopt NVFP4_AWQ"),
        ("adapter_config.json", {"base_model_name_or_path": "org/base"}, "is an adapter of org/base"),
    ],
)
def test_weights_of_a_model_that_its_configuration_refuses_are_not_downloaded(
    endpoint, monkeypatch, name, content, reason
):
    monkeypatch.setitem(FILES, name, json.dumps(content).encode())
    monkeypatch.setitem(FILES, "model.safetensors", b"asked for")
    asked: list[str] = []
    monkeypatch.setattr(Hub, "log_request", lambda handler, *_: asked.append(handler.path), raising=False)
    with pytest.raises(ConfigError, match=reason):
        hub.download("org/name", is_offline=False, endpoint=endpoint)
    assert any(name in path for path in asked) and not any("safetensors" in path for path in asked)


def test_a_model_that_the_hub_does_not_know_is_refused(endpoint):
    with pytest.raises(ConfigError, match="no folder 'org/other', and the hub has no such model"):
        hub.download("org/other", is_offline=False, endpoint=endpoint)


def test_where_no_hub_answers_and_where_none_may_be_asked_the_error_says_so(endpoint):
    with pytest.raises(ConfigError, match=r"no folder 'org/name'.* HF_HUB_OFFLINE is set"):
        hub.download("org/name", is_offline=True)
    with pytest.raises(ConfigError, match=r"no folder 'org/name'.* the hub cannot be reached: ") as error:
        hub.download("org/name", is_offline=False, endpoint="http://127.0.0.1:9")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["./org/name", "/org/name", "name", "a/b/c", "~/name", "-a/b", "org/"])
def test_a_path_is_no_hub_id(name):
    assert not hub.is_hub_id(name)


def test_ids_of_the_hub_are_recognised():
    assert hub.is_hub_id("Qwen/Qwen2.5-Omni-3B") and hub.is_hub_id("a1/b_c.d")
