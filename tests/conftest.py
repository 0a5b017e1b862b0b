"""For every test: no hub, no outside network; torch on one thread, so that parallel tests do not fight for cores.

Property tests try the same examples in every run, and no example has a deadline: a change is judged by what it changed.
`--hypothesis-profile=search` looks for others; what it finds belongs into the test as an `@example`.
"""

from __future__ import annotations

import gc
import os
import socket
import sys

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("search", deadline=None)
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

_connect = socket.socket.connect


def _connect_here_only(self: socket.socket, address) -> None:
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"a unit test reached for the network: {address}")
    _connect(self, address)


@pytest.fixture(scope="session", autouse=True)
def _keep_what_is_imported() -> None:
    """The collector need not look at it again: what tests leave is found at little cost."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "unit" in request.node.path.parts:
        monkeypatch.setattr(socket.socket, "connect", _connect_here_only)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield
