"""An encoder's way to preprocess an item: in a process of its own (`preprocessor`), as many at once as there
are processes. The tensors come in shared memory: small ones are copied, large ones stay where they are.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.media.preprocessor import Preprocessed, PreprocessOrder, read_tensors
from cluster.media.processes import (
    PoolProcess,
    ProcessPool,
    ProcessServer,
    append,
    check_size,
    open_memory_file,
    run_blocking,
    seal,
    wait_while,
)
from cluster.media.program import MAX_COPIED_BYTES
from cluster.types.media import MediaOptions, Modality


def preprocessor_server(folder: str | Path) -> ProcessServer[Preprocessed]:
    """`folder`: of the model whose processor the processes run."""
    return ProcessServer(Preprocessed, "cluster.media.preprocessor", [str(folder)])


class Preprocessors:
    def __init__(self, server: ProcessServer[Preprocessed], num_processes: int, timeout_s: float):
        """Starts the processes without waiting: the server first loads the model's processor. `timeout_s`:
        for one item."""
        self.server = server
        self._pool = ProcessPool(lambda: PoolProcess(server))
        self._timeout_s = timeout_s
        self._pool.warm_up(num_processes)

    def begin(
        self,
        modality: Modality,
        array: np.ndarray,
        options: MediaOptions,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> Mapping[str, Tensor]:
        """Does what `MediaProcessor.begin` does, for an item without a number. Blocks no longer than the
        item `is_wanted`. Any thread. Raises MediaError, UnsupportedError, NotWantedError and
        UnavailableError."""
        order = PreprocessOrder(modality, options, array.shape, timeout_s=self._timeout_s)
        with open_memory_file() as file:
            append(file, np.ascontiguousarray(array).data.cast("B"))
            seal(file)
            return run_blocking(self._pool.ask(order, file, wait_while(is_wanted), _tensors))

    def close(self) -> None:
        """Running calls fail."""
        self._pool.close()
        self.server.close()


def _tensors(preprocessed: Preprocessed, result: int) -> dict[str, Tensor]:
    num_bytes = preprocessed.num_bytes
    check_size(result, num_bytes)
    if num_bytes > MAX_COPIED_BYTES:
        file = torch.frombuffer(mmap.mmap(result, num_bytes, mmap.MAP_PRIVATE), dtype=torch.uint8)
    else:
        file = torch.empty(num_bytes, dtype=torch.uint8)
        os.preadv(result, [file.numpy().data], 0)
    return read_tensors(preprocessed, file)
