"""CpuSlots at shared cores. Threads stand for processes: a lock excludes every other object for its path,
wherever it lives."""

import fcntl
import math
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cluster.clock import SystemClock
from cluster.worker.cpu_slots import (
    MAX_QUIET_S,
    POLL_S,
    QUIET_SHARE,
    SHARE,
    TIMEOUT_S,
    CpuSlots,
    FileLock,
    no_cpu_slots,
    shared_cpu_slots,
)
from tests.fakes.clock import ManualClock

DEADLINE_S = 120.0


def make(folder, clock=None, num_slots=1, pause=None, **others) -> Any:
    pause = pause or (lambda _: os.sched_yield())
    return CpuSlots(clock or SystemClock(), folder, num_slots, pause, **others)


def advance(clock, seconds):
    clock.at += seconds


def wait_until_queued(folder, unless=None):
    """Returns when a worker waits for a slot: it holds the lock `next`."""
    queue = FileLock(folder / "next")
    deadline = time.monotonic() + DEADLINE_S
    while not (unless and unless.is_set()) and queue.try_acquire():
        queue.release()
        assert time.monotonic() < deadline
        os.sched_yield()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(4) as executor:
        yield executor


@pytest.mark.parametrize("num_slots", [1, 2])
def test_no_more_steps_run_at_once_than_there_are_slots(tmp_path, pool, num_slots):
    running, most, guard = [], [], threading.Lock()

    def work():
        cpu_slots = make(tmp_path, num_slots=num_slots)
        for _ in range(50):
            with cpu_slots.acquire():
                with guard:
                    running.append(0)
                    most.append(len(running))
                os.sched_yield()
                with guard:
                    running.pop()

    for done in [pool.submit(work) for _ in range(4)]:
        done.result(DEADLINE_S)
    assert max(most) <= num_slots
    assert len(most) == 200


def test_a_worker_with_fewer_threads_leaves_the_first_slot_to_the_others(tmp_path):
    refused = []
    small, large = make(tmp_path, num_slots=2), make(tmp_path, num_slots=1, pause=refused.append)
    with small.acquire(), large.acquire():
        pass
    assert refused == []


def test_a_waiting_worker_goes_before_the_next_step_of_the_running_one(tmp_path, pool):
    """A worker with step after step must not keep the slot by asking again at once."""
    busy, other = make(tmp_path), make(tmp_path)
    has_run = threading.Event()

    def wait_for_a_slot():
        with other.acquire():
            has_run.set()

    with busy.acquire():
        done = pool.submit(wait_for_a_slot)
        wait_until_queued(tmp_path)
    with busy.acquire():
        assert has_run.is_set()
    done.result(DEADLINE_S)


def test_a_step_yields_between_layers_only_after_its_exclusive_time(tmp_path, pool):
    clock = ManualClock()
    long, short = make(tmp_path, clock), make(tmp_path, clock)
    ran = []

    def run_short():
        with short.acquire():
            advance(clock, 1.0)
            ran.append("short")

    with long.acquire(exclusive_s=2.0):
        done = pool.submit(run_short)
        wait_until_queued(tmp_path)
        long.yield_between_layers()
        ran.append("layer")
        advance(clock, 2.0)
        long.yield_between_layers()
        ran.append("last layer")
        assert long.ran_s == 2.0  # not the second that the other ran
    done.result(DEADLINE_S)
    assert ran == ["layer", "short", "last layer"]


def test_others_are_slowed_down_by_a_fixed_share(tmp_path, pool):
    """One second of the others for every 0.3 seconds of the step, after its exclusive time."""
    clock = ManualClock()
    long, decode = make(tmp_path, clock), make(tmp_path, clock)
    stop = threading.Event()
    gaps = []

    def run_steps():
        ended_at = None
        while not stop.is_set():
            with decode.acquire():
                if ended_at is not None:
                    gaps.append(clock.now() - ended_at)
                wait_until_queued(tmp_path, unless=stop)  # the long step, which comes next
                advance(clock, 1.0)
                ended_at = clock.now()

    with long.acquire(exclusive_s=0.0):
        done = pool.submit(run_steps)
        for _ in range(50):
            wait_until_queued(tmp_path)
            advance(clock, 0.1)  # a layer
            long.yield_between_layers()
        stop.set()
    done.result(DEADLINE_S)
    assert len(gaps) >= 5
    assert max(gaps[:-1]) <= SHARE + 1e-9  # the last one waited for the end of the step


class ScriptedLock:
    """Can be acquired or not, as the letters say: y or n."""

    def __init__(self, answers):
        self._answers = iter(answers)

    def try_acquire(self):
        return next(self._answers) == "y"

    def release(self):
        pass


def test_most_of_a_pause_like_the_last_ones_passes_without_a_poll(tmp_path):
    clock, pauses, poll_s = ManualClock(), [], POLL_S

    def pause(seconds):
        pauses.append(seconds)
        advance(clock, poll_s if seconds == POLL_S else seconds)

    # At each layer another worker waits, and gets a slot at once.
    locks = {
        "next": ScriptedLock(2 * ("y" + "ny" * 2)),
        "slot-0": ScriptedLock("y" + "n" * 20 + "y" + "nnny" + "y" + "ny" + "y"),
    }
    cpu_slots = make(tmp_path, clock, pause=pause, open_lock=lambda path: locks[path.name])
    with cpu_slots.acquire(exclusive_s=0.0):
        assert cpu_slots.mean_slice_s == math.inf
        advance(clock, 1.0)
        cpu_slots.yield_between_layers()
        assert pauses == [POLL_S] * 20
        assert cpu_slots.mean_slice_s == pytest.approx(SHARE * 20 * POLL_S)
        del pauses[:]
        advance(clock, 1.0)
        cpu_slots.yield_between_layers()
        assert pauses == [pytest.approx(QUIET_SHARE * 20 * POLL_S)] + [POLL_S] * 3
    poll_s = 10.0
    with cpu_slots.acquire(exclusive_s=0.0):
        advance(clock, 1.0)
        cpu_slots.yield_between_layers()
        del pauses[:]
        advance(clock, 100.0)
        cpu_slots.yield_between_layers()
        assert pauses == [MAX_QUIET_S]


def test_a_worker_that_gets_no_slot_runs_without_slots_for_good(tmp_path, caplog):
    clock = ManualClock()
    polls = []
    stuck = make(tmp_path, clock)
    worker = make(tmp_path, clock, pause=lambda _: (polls.append(0), advance(clock, TIMEOUT_S / 4)))
    with stuck.acquire():
        with worker.acquire():
            assert len(polls) == 4
        with worker.acquire():
            worker.yield_between_layers()
    assert len(polls) == 4  # the second step has not waited at all
    assert "runs without CPU slots" in caplog.text


def test_the_slot_of_a_killed_process_is_free_at_once(tmp_path):
    make(tmp_path)  # makes the files
    script = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, 2); print(flush=True); sys.stdin.read()"
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "slot-0")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    child.stdout.readline()
    with open(tmp_path / "slot-0", "w") as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    child.wait(DEADLINE_S)
    refused = []
    with make(tmp_path, pause=refused.append).acquire():
        pass
    assert refused == []


def test_a_worker_that_shares_nothing_never_waits_and_still_measures_its_steps():
    clock = ManualClock()
    cpu_slots = no_cpu_slots(clock)
    with cpu_slots.acquire(0.0):
        advance(clock, 3.0)
        cpu_slots.yield_between_layers()
    assert cpu_slots.ran_s == 3.0


def test_a_failing_step_frees_its_slot(tmp_path):
    refused = []
    cpu_slots, other = make(tmp_path), make(tmp_path, pause=refused.append)
    with pytest.raises(ZeroDivisionError), cpu_slots.acquire():
        _ = 1 / 0
    with other.acquire():
        pass
    assert refused == []


def test_workers_with_other_cores_share_no_slots(tmp_path, monkeypatch):
    def on_cores(cores, num_threads):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
        return shared_cpu_slots(ManualClock(), tmp_path / "new" / "private", num_threads)

    with on_cores({0, 1}, 2).acquire(), on_cores({2, 3}, 2).acquire(), on_cores(set(range(64)), 16).acquire():
        pass
    assert sorted(path.parent.name for path in tmp_path.rglob("next")) == sorted(
        ["cpu-slots-3", "cpu-slots-c", "cpu-slots-" + "f" * 16]
    )
    assert len(list((tmp_path / "new" / "private" / ("cpu-slots-" + "f" * 16)).glob("slot-*"))) == 4
    names = [on_cores(cores, 2).only_slot for cores in ({0, 1}, {1, 0}, {2, 3}, {0, 1, 2, 3})]
    assert names[0] == names[1] != names[2] and names[0] and names[3] == ""
