"""The end of processes that may write to this one, as the kernel tells it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import msgspec
import pytest

from kv_transfer.lease.processes import has_ended, process_id


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def wait_for_end(process) -> None:
    """The process stays a zombie: its parent does not ask for its exit status."""
    descriptor = os.pidfd_open(process.pid)
    assert select.select([descriptor], [], [], 60)[0]
    os.close(descriptor)


def test_a_process_has_ended_when_it_was_killed_and_not_while_it_is_stopped(child):
    identity = process_id(child.pid)
    assert identity is not None and not has_ended(identity)
    child.send_signal(signal.SIGSTOP)
    assert not has_ended(identity)
    child.kill()
    wait_for_end(child)
    assert has_ended(identity)
    child.wait()
    assert has_ended(identity) and process_id(child.pid) is None


def test_another_process_with_the_same_number_is_another_process(child):
    identity = process_id(child.pid)
    assert identity is not None
    assert has_ended(msgspec.structs.replace(identity, started_at=identity.started_at - 1))


@pytest.mark.parametrize("field", ["boot_id", "namespace"])
def test_of_other_hosts_and_namespaces_nothing_is_known(child, field):
    identity = process_id(child.pid)
    assert identity is not None
    elsewhere = msgspec.structs.replace(identity, **{field: "" if field == "boot_id" else 0})
    child.kill()
    child.wait()
    assert has_ended(identity) and not has_ended(elsewhere)


def test_this_process_runs():
    identity = process_id(os.getpid())
    assert identity is not None and not has_ended(identity)
