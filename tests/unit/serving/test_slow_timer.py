"""The library that is preloaded into Ray's processes changes one timer: the main thread's, in a worker."""

import os
import subprocess
import sys

import pytest

from cluster.serving import slow_timer
from cluster.serving.local_environment import cluster_environment

# Prints the milliseconds to which a timer of 9 ms and one of 50 ms are set, by the main and by another thread.
SET_TIMERS = """
import ctypes, threading
libc = ctypes.CDLL(None)

class Spec(ctypes.Structure):
    _fields_ = [("interval_s", ctypes.c_long), ("interval_ns", ctypes.c_long)]
    _fields_ += [("value_s", ctypes.c_long), ("value_ns", ctypes.c_long)]

def set_to(milliseconds):
    fd = libc.timerfd_create(1, 0)
    libc.timerfd_settime(fd, 0, ctypes.byref(Spec(0, 0, 0, milliseconds * 1_000_000)), None)
    left = Spec()
    libc.timerfd_gettime(fd, ctypes.byref(left))
    print("slow" if left.value_ns > 60_000_000 else "kept")

set_to(9)
set_to(50)
other = threading.Thread(target=set_to, args=(9,))
other.start()
other.join()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    library = slow_timer.build(tmp_path_factory.mktemp("library"))
    if library is None:
        pytest.skip("no compiler")
    return library


@pytest.mark.parametrize(
    ("worker", "expected"), [({"RAY_RAYLET_PID": "1"}, ["slow", "kept", "kept"]), ({}, ["kept"] * 3)]
)
def test_only_short_timers_of_a_workers_main_thread_are_slow(library, worker, expected):
    environment = {"PATH": os.defpath, "LD_PRELOAD": str(library), **worker}
    done = subprocess.run(
        [sys.executable, "-S", "-c", SET_TIMERS], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == expected


def test_without_a_compiler_the_timer_stays(tmp_path):
    assert slow_timer.build(tmp_path, compilers=("no-such-compiler",)) is None


def test_what_the_user_preloads_stays(tmp_path, monkeypatch, library):
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/other.so")
    environment = cluster_environment(tmp_path)
    assert environment["LD_PRELOAD"] == f"/usr/lib/other.so:{tmp_path / library.name}"
    assert environment["RAY_LD_PRELOAD_ON_WORKERS"] == "1"
