"""An encoder's way to preprocess an item: in a process of its own (`preprocessor`), as many at once as there
are processes. The tensors come in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from cluster.media.preprocessor import Preprocessed, PreprocessOrder, read_tensors
from cluster.media.processes import PoolProcess, ProcessPool, ProcessServer
from cluster.media.program import result_bytes
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
        data = np.ascontiguousarray(array).data.cast("B")
        return self._pool.ask_blocking(order, data, is_wanted, _tensors)

    def close(self) -> None:
        """Running calls fail."""
        self._pool.close()
        self.server.close()


def _tensors(preprocessed: Preprocessed, result: int) -> dict[str, Tensor]:
    return read_tensors(preprocessed, torch.from_numpy(result_bytes(result, preprocessed.num_bytes)))
