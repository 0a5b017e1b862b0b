"""For every test: no hub, no outside network; torch on one thread, so that parallel tests do not fight for
cores.

With several workers (`-n 2 --dist loadscope --no-loadscope-reorder`, as in the Makefile) a file is run by one
of them, in its order. The files of tests/serve, which share a Ray cluster, are run by one as well, and come
first: they wait for processes while the other worker computes. No test may depend on how busy the machine is,
so that a deadline in a test is only a guard against hanging.

Property tests try the same examples in every run, and no example has a deadline: a change is judged by what
it changed. `--hypothesis-profile=search` looks for others; what it finds belongs into the test as an
`@example`.
"""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

gc.disable()  # until all files are imported: what they make stays, and is looked at again and again
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# workers of tests share no CPU slots, neither with each other nor with a cluster that runs on this machine
os.environ["EPDG_SOCKET_DIR"] = tempfile.mkdtemp(prefix="epdg-t")
atexit.register(shutil.rmtree, os.environ["EPDG_SOCKET_DIR"], ignore_errors=True)

settings.register_profile("search", deadline=None)
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")

TESTS = Path(__file__).parent
FIRST = ("serve", "flow", "faults", "contract")  # folders with the longest tests; what is left fills the gaps
WHOLE = ("tests/serve", "tests/architecture")  # one worker runs all of the folder
_connect = socket.socket.connect


def _connect_here_only(self: socket.socket, address) -> None:
    if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1", "localhost"):
        raise AssertionError(f"a unit test reached for the network: {address}")
    _connect(self, address)


@pytest.fixture(scope="module", autouse=True)
def _keep_what_is_imported() -> None:
    """The collector need not look at it again: what tests leave is found at little cost. For each file,
    because tests import more: a collection of all that takes most of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch):
    if "unit" in request.node.path.parts:
        monkeypatch.setattr(socket.socket, "connect", _connect_here_only)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    yield


if os.environ.get("TRITON_INTERPRET") == "1":

    @pytest.fixture(autouse=True)
    def _watched() -> Iterator[None]:
        from tests.fakes.watched_programs import watched_programs  # torch, after the environment is set

        with watched_programs():
            yield


def pytest_collection_finish() -> None:
    gc.enable()
    if "transformers" in sys.modules:
        # transformers formats each configuration that it reads for its log, also where the log is off
        sys.modules["transformers"].PreTrainedConfig.__repr__ = object.__repr__


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the larger cluster after the others of their folder: it starts late, and both end early."""
    ranks = {folder: rank for rank, folder in enumerate(FIRST)}

    def key(item: pytest.Item) -> tuple[int, bool]:
        rank = ranks.get(item.path.relative_to(TESTS).parts[0], len(FIRST))
        return rank, "parallel" in getattr(item, "fixturenames", ())

    items.sort(key=key)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A file's tests share its fixtures, all of tests/serve a cluster, and all of tests/architecture what is
    parsed: each goes to one worker, in this order."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = nodeid.partition("::")[0]
            return next((folder for folder in WHOLE if path.startswith(f"{folder}/")), path)

    return ByFile(config, log)
