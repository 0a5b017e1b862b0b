"""Memory that is granted when a worker starts and allocated when it is ready."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading

import pytest
import torch

from cluster.config import ClusterArgs, read_environment, resolve
from cluster.config.settings import REPOSITORY
from cluster.engine.limits import limits_of, sizes_of
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from cluster.types.members import Role
from cluster.worker.language import load_language
from cluster.worker.late_memory import LateMemory
from cluster.worker.setup import set_up
from encoder_service.service import Encoder

MODEL = REPOSITORY / "deploy" / "demo_model"
PROMISING = """
import sys
from pathlib import Path
from cluster.worker.late_memory import LateMemory
late_memory = LateMemory(Path(sys.argv[1]))
with late_memory.granting():
    late_memory.promise(1000)
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "private"
    folder.mkdir(mode=0o700)
    return folder


def promised(late_memory: LateMemory) -> int:
    with late_memory.granting() as num_bytes:
        return num_bytes


def test_what_one_worker_was_promised_the_next_does_not_count_on(folder):
    one, other = LateMemory(folder), LateMemory(folder)
    with one.granting() as before:
        one.promise(1000)
    with other.granting() as between:
        other.promise(500)
        other.promise(20)
    assert (before, between, promised(one), promised(other)) == (0, 1000, 1520, 1520)


def test_a_promise_is_kept_when_its_pages_are_there(folder):
    layout = MemoryLayout((SegmentSpec(16, (1024,), torch.float32),))
    memory, late_memory = BlockMemory(layout, 64), LateMemory(folder)
    with late_memory.granting():
        late_memory.promise(64 * layout.block_bytes)
    late_memory.populate([memory])
    for thread in threading.enumerate():
        if thread.name == "populate":
            thread.join()
    assert promised(late_memory) == 0 and [path.name for path in folder.iterdir()] == ["late-memory"]


def test_a_promise_ends_with_its_process(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", PROMISING, str(folder)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline()
    late_memory = LateMemory(folder)
    during = promised(late_memory)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert (during, promised(late_memory)) == (1000, 0)


def test_on_a_gpu_nothing_is_late():
    late_memory = LateMemory(None)
    late_memory.promise(1000)
    late_memory.populate([])
    assert promised(late_memory) == 0


def test_a_worker_refuses_memory_that_another_was_promised(folder, monkeypatch):
    monkeypatch.setenv("EPDG_SOCKET_DIR", str(folder))
    args = resolve(ClusterArgs(model=str(MODEL), device="cpu"), read_environment(), num_cores=1)
    other, setup = LateMemory(folder), set_up(args, "replica")
    with other.granting():
        other.promise(1 << 50)
    sizes = sizes_of(Role.PREFILL, args, limits_of(Role.PREFILL, args), "cpu")
    before_a_weight_is_read = r"needs more memory than there is:\n  weights .* \(at least\)"
    with pytest.raises(ConfigError, match=before_a_weight_is_read):
        load_language(args, setup, Role.PREFILL, sizes)
    with pytest.raises(ConfigError, match=before_a_weight_is_read):
        Encoder.load(args, setup)
