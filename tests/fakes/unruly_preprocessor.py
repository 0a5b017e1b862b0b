"""A program for `ProcessServer` whose "processor" does what the first number of its array says.

Arguments: a folder, where items that wait for each other meet.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch

from cluster.errors import MediaError
from cluster.media.preprocessor import serve
from cluster.media.program import fork_processes
from cluster.types.media import MediaOptions, Modality

GOOD, CRASH, HANG, REFUSE, LARGE, MEET, CRASH_ONCE = range(7)
NUM_LARGE = 5 << 20  # float32 numbers: more than is copied
MEET_S = 60.0


class Unruly:
    def __init__(self, folder: Path):
        self._folder = folder

    def begin(self, modality: Modality, array: np.ndarray, options: MediaOptions) -> dict[str, torch.Tensor]:
        match int(array.flat[0]):
            case 1:
                os.abort()
            case 2:
                time.sleep(1000)
            case 3:
                raise MediaError("refused")
            case 4:
                return {"large": torch.arange(NUM_LARGE, dtype=torch.float32)}
            case 5:
                (self._folder / str(os.getpid())).touch()
                ends_at = time.monotonic() + MEET_S
                while (num_met := self._num_met()) < 2 and time.monotonic() < ends_at:
                    time.sleep(0.01)
                return {"met": torch.tensor(num_met)}
            case 6:
                if not (self._folder / "crashed").exists():
                    (self._folder / "crashed").touch()
                    os.abort()
        return {"pid": torch.tensor(os.getpid())}

    def _num_met(self) -> int:
        """By the files that processes leave, of which each has the process's id as its name."""
        return sum(name.isdigit() for name in os.listdir(self._folder))


if __name__ == "__main__":
    torch.set_num_threads(1)
    unruly = Unruly(Path(sys.argv[2]))
    fork_processes(lambda asker: serve(asker, unruly))  # pyright: ignore
