"""The recording of CUDA graphs."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

import torch
from torch import Tensor

from cluster.model.collectives import Collectives

Replay = Callable[[], Tensor]  # enqueues the recorded work; always returns the same tensor


class Capture(Protocol):
    def __call__(self, work: Callable[[], Tensor]) -> Replay:
        """Runs `work` any number of times and records it."""
        ...


RECORDING_S = 10.0  # longer than any recording

_recording_lock = threading.Lock()  # held by the thread that records
# invalid recordings; torch's allocator of host memory still asks them whether it allocates for them
_abandoned: list[object] = []


def capture_cuda(*, is_alone: bool = True, collectives: Collectives | None = None) -> Capture:
    """A capture whose graphs share one memory pool, so only one of them may run at a time. `is_alone`: no
    other thread uses the device while it records; otherwise the work must be known to read nothing on the
    host. `collectives`: of a rank; all of them record the same work. What fails on one rank alone fails on
    all, if it does so without collectives. The runs before the recording are those that NCCL needs, too: its
    communicators are not made inside of one."""
    pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def capture(work: Callable[[], Tensor]) -> Replay:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if collectives is not None:
                collectives.rehearse(work)
            work()  # compiles kernels and initialises libraries outside the recording
            if is_alone:
                with refusing_reads():
                    work()
        before = torch.cuda.current_stream()
        before.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of a worker, NCCL's among them, may use the device meanwhile
        if is_alone:
            recording = torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local")
        else:
            recording = _recording(graph, pool, side)
        try:
            with _recording_lock, _no_collection(), _own_workspaces(), recording:
                out = work()
        finally:
            torch.cuda.set_stream(before)  # which a recording that failed may not have done

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    return capture


def wait_for_recording(timeout_s: float = RECORDING_S) -> bool:
    """Waits until no thread records. While one does, torch does not free what it caches for other streams:
    what has run out of memory may succeed afterwards. False: one still records."""
    is_over = _recording_lock.acquire(timeout=timeout_s)
    if is_over:
        _recording_lock.release()
    return is_over


@contextmanager
def _recording(
    graph: torch.cuda.CUDAGraph, pool: tuple[int, int], stream: torch.cuda.Stream
) -> Iterator[None]:
    """As `torch.cuda.graph`, which waits for the device and empties torch's cache first, while other threads
    compute. Work that fails raises its own error."""
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            yield
            graph.capture_end()
        except Exception:
            try:
                graph.capture_end()
            except RuntimeError:
                # it is invalid: torch would go on allocating for it (pytorch/pytorch#180395)
                _abandoned.append(graph)
                with suppress(RuntimeError):  # it does not
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise


@contextmanager
def _no_collection() -> Iterator[None]:
    """Inside, Python collects no garbage: a graph among it, destroyed while another is recorded, ends the
    recording (pytorch/pytorch#161037)."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Inside, cuBLAS gets memory of the recording's own pool for its sums. torch keeps what it gave cuBLAS on
    a stream, and frees it with any graph that was recorded there, though others still use it
    (pytorch/pytorch#193402). What other threads' products had is free for what is enqueued behind them."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def refusing_reads() -> Iterator[None]:
    """Inside, work that reads the device on the host raises RuntimeError. In a recording such a read leaves
    the process unusable: torch 2.11 goes on allocating from the recording's memory afterwards
    (pytorch/pytorch#180395). The switch is the process's: no other thread may wait for a stream meanwhile.
    Workers record while they load, when no other thread does."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
