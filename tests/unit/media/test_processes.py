"""Files are decoded in other processes: what comes back is what this process would have decoded, and whatever
a file does there, it costs its item and nothing else."""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from bench import fuzz_media
from bench.trusted_media import decode
from cluster.errors import MediaError, NotWantedError, RequestError, UnavailableError
from cluster.media.decoders import Decoders
from cluster.media.opener import DecodeOrder, Written
from cluster.media.openers import opener_pool
from cluster.media.processes import (
    FORK_TIMEOUT_S,
    START_TIMEOUT_S,
    PoolProcess,
    ProcessEndedError,
    ProcessPool,
    ProcessServer,
    run_blocking,
    wait_while,
)
from cluster.media.program import open_memory_file
from cluster.media.settings import MediaLimits, MediaSettings
from cluster.types.media import MediaOptions, Modality
from tests.fakes import hostile_opener
from tests.fakes.hostile_opener import pid_of
from tests.unit.media import files

IMAGE, AUDIO = Modality.IMAGE, Modality.AUDIO
PLAIN = MediaOptions()
SMALL = MediaSettings(MediaLimits(max_pixels=10_000, max_video_pixels=100_000, max_bytes=1 << 20))


class Opener(PoolProcess):
    is_closed = False

    def close(self) -> None:
        super().close()
        self.is_closed = True


def num_bytes_of_memory_files() -> int:
    """What this process holds in files that have no name."""
    held = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one by which the folder is read
            held += file.stat().st_size if "memfd:" in os.readlink(file) else 0
    return held


class Pool:
    """An encoder's decoders, and how many openers they have started."""

    def __init__(self, server: ProcessServer):
        self.openers: list[Opener] = []
        self._server = server
        self.pool = ProcessPool(self._start)
        self.decoders = Decoders(1, self.pool)

    def _start(self) -> PoolProcess:
        self.openers.append(Opener(self._server))
        return self.openers[-1]

    def decode(
        self, data: bytes | str, modality: Modality = IMAGE, settings=SMALL, is_wanted=lambda: True
    ) -> np.ndarray:
        data = data if isinstance(data, bytes) else data.encode()
        return self.decoders.decode(modality, data, settings, PLAIN, is_wanted)

    def check(self) -> None:
        """The pool does its work, and nothing is left of what has ended."""
        assert self.decode("good").shape == (2, 2, 3) and self.pool.num_busy == 0
        alive = [opener for opener in self.openers if not opener.is_closed]
        assert alive == self.pool.idle


@pytest.fixture(scope="module")
def hostile():
    server = ProcessServer(Written, "tests.fakes.hostile_opener")
    yield server
    server.close()


@pytest.fixture
def made(hostile):
    made = Pool(hostile)
    made.decode("warm")
    num_others = _num_files() - 3  # of an opener: a socket, its process, the result
    yield made
    made.check()
    num_own = sum(2 + (opener.process is not None) for opener in made.pool.idle)
    assert _num_files() - num_others == num_own, "a file or a socket is left"
    made.decoders.close()
    assert not made.pool.idle and made.pool.num_busy == 0


def _num_files() -> int:
    gc.collect()  # the array of an answer that was refused hangs on its error
    return len(os.listdir("/proc/self/fd"))


def _ends(process: int) -> bool:
    """Whether the process of this descriptor ends."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    has_ended = bool(poll.poll(60_000))
    os.close(process)
    return has_ended


def test_files_of_every_format_give_what_this_process_decodes():
    pool, settings = opener_pool(), MediaSettings()
    decoders = Decoders(1, pool)
    try:
        for name, modality, data in [
            *fuzz_media.good_files(),
            ("large", IMAGE, files.image(700, 500)),
            ("no image", IMAGE, b"nothing"),
            ("a cut image", IMAGE, files.image(96, 96, "JPEG")[:3000]),
            ("no sound", AUDIO, files.image()),
        ]:
            try:
                expected = decode(modality, data, settings, item_idx=None)
            except RequestError as error:
                with pytest.raises(type(error)) as caught:
                    decoders.decode(modality, data, settings, PLAIN)
                assert str(caught.value) == str(error), name
            else:
                got = decoders.decode(modality, data, settings, PLAIN)
                assert got.dtype == expected.dtype and np.array_equal(got, expected), name
                got[...] = 0  # private, and writable
        (opener,) = pool.idle
        assert opener.process is not None
    finally:
        decoders.close()


@pytest.mark.parametrize("way", ["crash", "abort", "exit", "nan", *hostile_opener.LIES])
def test_a_file_that_ends_two_processes_is_refused(made, way):
    lies = way in hostile_opener.LIES
    with pytest.raises(MediaError, match="the process that works on it dies"):
        made.decode(f"lie:{way}" if lies else way, AUDIO if way == "nan" else IMAGE)
    assert len(made.openers) == 3, "each that ended was replaced"


@pytest.mark.parametrize(
    ("way", "says"),
    [("memory", "too large"), ("result without end", "too large"), ("blame the server", "not now")],
)
def test_too_much_memory_costs_the_item_and_no_process(made, way, says):
    with pytest.raises(MediaError, match=says):
        made.decode(way)
    assert len(made.openers) == 1


def test_a_large_result_is_mapped_if_it_is_sealed(hostile):
    made = Pool(hostile)
    array = made.decode("large", settings=MediaSettings())
    assert array.shape == hostile_opener.LARGE and array.min() == 1 and array.base is not None
    del array
    assert num_bytes_of_memory_files() == 0, "its file is not kept"
    with pytest.raises(MediaError, match="the process that works on it dies"):
        made.decode("large and not sealed", settings=MediaSettings())
    made.check()
    made.decoders.close()


def test_a_process_that_is_killed_over_a_file_is_replaced_and_the_file_decoded(made):
    num_asked = 0

    def is_wanted() -> bool:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            (opener,) = made.pool.busy
            os.kill(pid_of(opener), signal.SIGKILL)
            assert _ends(os.dup(opener.process))
        return num_asked < 3

    with pytest.raises(NotWantedError):  # it hangs in the second process, too
        made.decode("hang", is_wanted=is_wanted)
    assert len(made.openers) == 3


def test_a_process_that_ends_while_it_is_idle_costs_no_file(made):
    (opener,) = made.openers
    process = os.dup(opener.process)
    opener.kill()
    assert _ends(process)
    assert made.decode("crash?").shape == (2, 2, 3) and len(made.openers) == 2


def test_a_file_that_is_not_wanted_any_more_or_takes_too_long_ends_its_process(made):
    process = os.dup(made.openers[0].process)
    with pytest.raises(NotWantedError):
        made.decode("hang", is_wanted=lambda: False)
    assert _ends(process)

    async def over(*_: object) -> None:
        raise TimeoutError

    made.check()  # the second has started
    process = os.dup(made.openers[1].process)
    order = DecodeOrder(IMAGE, PLAIN, SMALL, timeout_s=5.0)
    with open_memory_file() as file, pytest.raises(MediaError, match="longer than 5 seconds"):
        os.write(file, b"hang")
        run_blocking(made.pool.ask(order, file, over, lambda *_: None))
    assert _ends(process) and len(made.openers) == 3


def test_a_crash_costs_no_other_item(made):
    made.pool.warm_up(2)
    results: list[np.ndarray] = []

    def decode_good_ones() -> None:
        results.extend(made.decode("good") for _ in range(20))

    thread = threading.Thread(target=decode_good_ones)
    thread.start()
    for way in ("crash", "abort") * 2:
        with pytest.raises(MediaError):
            made.decode(way)
    thread.join(60)
    assert len(results) == 20


def test_a_process_that_is_taken_over_can_do_nothing_but_answer(made):
    (opener,) = made.openers
    if not opener.is_filtered:
        pytest.skip("this kernel filters no system calls")
    refused = made.decode("escapes")[0, :, 0]
    done = [name for name, is_refused in zip(hostile_opener.ESCAPES, refused, strict=True) if not is_refused]
    assert not done
    status = Path(f"/proc/{pid_of(opener)}/status").read_text()
    assert "NoNewPrivs:\t1" in status and "Seccomp:\t2" in status


def test_a_process_has_limits(made):
    made.decode("good")
    values = Path(f"/proc/{pid_of(made.openers[0])}/limits").read_text()
    soft = {line[:25].strip(): line[25:].split()[0] for line in values.splitlines()[1:]}
    space = int(soft["Max address space"]) - SMALL.limits.max_process_bytes
    assert 0 < space < 2 << 30, "what it has before the first file"
    assert int(soft["Max file size"]) == SMALL.max_result_bytes
    assert int(soft["Max cpu time"]) > 60 and int(soft["Max open files"]) == 16
    assert soft["Max core file size"] == "0"


def test_a_process_starts_while_many_descriptors_of_the_user_are_under_way(hostile):
    """As when many requests come at once: the kernel counts them all, and compares with an opener's limit."""
    sender, receiver = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with sender, receiver:
        for _ in range(5):
            socket.send_fds(sender, [b"x"], [0] * 8)
        made = Pool(hostile)
        made.check()
        made.decoders.close()


def test_a_kernel_without_filters_is_named_in_the_log_once(hostile, caplog):
    made = Pool(hostile)
    for _ in range(2):
        made.decode("good")
        made.openers[0].is_filtered = False
    made.decode("good")
    assert caplog.text.count("filters no system calls") == 1
    made.decoders.close()


def test_what_does_not_start_is_unavailable_and_a_server_that_ends_is_started_again(hostile):
    server = ProcessServer(Written, "cluster.no_such_module")
    made = Pool(server)
    with pytest.raises(UnavailableError, match="did not start"):
        made.decode("good")
    made.decoders.close()
    server.close()
    made = Pool(hostile)
    made.decode("good")
    opener = made.openers[0].process
    assert opener is not None
    process = os.dup(opener)
    process_of(hostile).kill()
    assert _ends(process), "an opener ends with its server"
    process_of(hostile).wait()
    made.check()
    made.decoders.close()


def process_of(server: ProcessServer) -> subprocess.Popen[bytes]:
    assert server.process is not None
    return server.process


class HungServer:
    """A server that is stopped. No time passes until its openers are given up."""

    def __init__(self):
        self.server = ProcessServer(Written, "tests.fakes.hostile_opener")
        self.made = Pool(self.server)
        self.made.decode("good")
        self.pid = process_of(self.server).pid
        os.kill(self.pid, signal.SIGSTOP)

    def wait_for(self, end: socket.socket, timeout_s: float) -> None:
        if process_of(self.server).pid == self.pid and timeout_s == FORK_TIMEOUT_S:
            raise TimeoutError

    def ask(self, num_orders: int) -> None:
        pool = ProcessPool(lambda: PoolProcess(self.server))
        pool.warm_up(num_orders)
        blocking = wait_while(lambda: True)

        async def wait(end: socket.socket, timeout_s: float) -> None:
            self.wait_for(end, timeout_s)
            await blocking(end, timeout_s)

        with open_memory_file() as file:
            os.write(file, b"good")
            order = DecodeOrder(IMAGE, PLAIN, SMALL, timeout_s=60.0)
            for _ in range(num_orders):
                run_blocking(pool.ask(order, file, wait, lambda answer, _: answer.shape))
        pool.close()

    def close(self):
        self.made.decoders.close()
        self.server.close()


def test_a_server_that_hangs_is_replaced_and_its_files_are_opened(caplog):
    hung = HungServer()
    hung.ask(3)
    assert process_of(hung.server).pid != hung.pid
    assert caplog.text.count("hangs: it is replaced") == 1 and "over a media file" not in caplog.text
    hung.close()


def test_a_server_that_imports_slowly_is_waited_for():
    server = ProcessServer(Written, "tests.fakes.hostile_opener")
    assert server.start_timeout_s == START_TIMEOUT_S
    made = Pool(server)
    made.decode("good")
    assert server.start_timeout_s == FORK_TIMEOUT_S < START_TIMEOUT_S
    process_of(server).kill()
    process_of(server).wait()
    PoolProcess(server).close()
    assert server.start_timeout_s == START_TIMEOUT_S, "the one in its place imports, too"
    made.decoders.close()
    server.close()


def test_nothing_is_left_of_a_process_that_is_killed():
    command = [sys.executable, "-m", "tests.fakes.hostile_opener", "ask"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as asker:
        assert asker.stdout is not None
        processes = [os.pidfd_open(int(pid)) for pid in asker.stdout.readline().split()]
        asker.kill()
    assert len(processes) == 2 and all(map(_ends, processes))


async def test_an_opener_that_was_closed_before_it_started_ends(hostile):
    opener = PoolProcess(hostile)
    opener.close()
    other = PoolProcess(hostile)
    with open_memory_file() as file, pytest.raises(ProcessEndedError):
        order = DecodeOrder(IMAGE, PLAIN, SMALL, timeout_s=60.0)
        os.write(file, b"exit")
        await other.ask(order, file, wait_while(lambda: True), lambda *_: None)
    other.close()
