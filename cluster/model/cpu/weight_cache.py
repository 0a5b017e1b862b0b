"""The folder of packed weights: one file for each half of a checkpoint, dtype and CPU variant.

    model = cache.load(key, kernels, make)

The first worker makes the model, writes the file and maps it; workers that start meanwhile wait for the file.
Later ones only map it. A file is found by a hash over all bytes of the checkpoint, over the code that made it
and over the versions of torch and transformers: a changed checkpoint has another name. The hash of a
checkpoint is remembered for as long as no file of it changes.

If the folder, a file or the budget does not allow it, the model is made as without a cache, and the log says
why. Files unused for the longest time are deleted to keep the budget. The folder belongs to one user; a
folder that others may write to is refused. Safe for several processes. Runs on the thread that loads the
model.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch import nn

from cluster.model.cpu.library import Kernels
from cluster.model.cpu.weight_file import DamagedFile, num_bytes_of, read_weights, write_weights
from cluster.model.cpu.weight_source import MappedWeights, RecordedWeights, StaleWeights

logger = logging.getLogger(__name__)

_MODEL_CODE = Path(__file__).parents[1]
_CODE = ("*.py", "layers/*.py", "cpu/*.py", "cpu/*.cpp", "cpu/*.h", "../config/weight_formats.py")
_CHECKPOINT = ("*.safetensors", "*.bin", "*.json")
_HASHES = "checkpoints.json"
_MAX_HASHES = 1000
_NUM_HASHED = 4  # files at once
# A file may change twice within one tick of the file system's clock: only older files' hashes are remembered.
_MIN_AGE_NS = 2_000_000_000
_MIN_FREE_BYTES = 2 << 30  # left on the disk
_ABANDONED_S = 3600.0  # age of an unfinished file whose process ended

Model = TypeVar("Model")


@dataclass(frozen=True)
class WeightKey:
    """What decides the bytes of a file, beside the kernels and the code."""

    checkpoint: Path
    half: str
    dtype: torch.dtype
    weight_dtype: str
    adapted: str = ""  # which modules adapters change: these are not replaced as others are


class Making:
    """One call of `make`: where its weights come from."""

    def __init__(
        self, kernels: Kernels | None, mapped: MappedWeights | None = None, *, is_recorded: bool = False
    ):
        """mapped: of a file. is_recorded: what is packed will be written to a file."""
        self.mapped = mapped
        # what `make` leaves here, as JSON can hold it, is there again when the file is mapped
        self.notes: dict[str, Any] = {} if mapped is None else dict(mapped.notes)
        self.evictable_bytes = 0 if mapped is None else mapped.evictable_bytes
        self.recorded: RecordedWeights | None = None
        self._kernels, self._is_recorded = kernels, is_recorded
        self._half: nn.Module | None = None

    def kernels_for(self, half: nn.Module) -> Kernels | None:
        """The kernels, with the source of this half's packed weights. Call it once, when the half is
        loaded and before a module is replaced."""
        self._half = half
        if self._kernels is None:
            return None
        if self._is_recorded:
            self.recorded = RecordedWeights(half, self.notes)
            return replace(self._kernels, weights=self.recorded)
        if self.mapped is not None:
            self.mapped.name_modules(half)
            return replace(self._kernels, weights=self.mapped)
        return self._kernels

    def check(self) -> None:
        """Raises StaleWeights if a module of the half got no weights."""
        if self._half is not None and any(parameter.is_meta for parameter in self._half.parameters()):
            raise StaleWeights("a module has neither its own nor packed weights")


def load_through(
    cache: WeightCache | None, key: WeightKey, kernels: Kernels | None, make: Callable[[Making], Model]
) -> Model:
    """`cache.load`; without a cache or kernels just what `make` makes."""
    return make(Making(kernels)) if cache is None or kernels is None else cache.load(key, kernels, make)


class WeightCache:
    def __init__(self, folder: Path, max_bytes: int):
        """max_bytes: of all files together; 0: nothing is kept or used."""
        self._folder = folder
        self._max_bytes = max_bytes

    def load(self, key: WeightKey, kernels: Kernels, make: Callable[[Making], Model]) -> Model:
        """The model that `make` makes, with its weights in a shared mapping where that is possible. `make`
        may be called more than once. Raises what `make` raises. Blocks: seconds for each gigabyte that is not
        there."""
        name = self._name(key, kernels)
        if name is None:
            return make(Making(kernels))
        mapped = self._open(name)
        if mapped is None:
            with self._locked(name):
                mapped = self._open(name)
                if mapped is None:
                    making = Making(kernels, is_recorded=True)
                    model = make(making)
                    if making.recorded is None or not self._write(name, making.recorded):
                        return model
                    del model, making
                    gc.collect()  # modules refer to each other
                    mapped = self._open(name, is_checked=True)
        making = Making(kernels, mapped)
        try:
            model = make(making)
            making.check()
        except (StaleWeights, RuntimeError) as error:  # torch's, e.g. of a weight on the meta device
            self._discard(name, error)
            return make(Making(kernels))
        return model

    def _name(self, key: WeightKey, kernels: Kernels) -> str | None:
        """Returns the file's name; None: there can be none, and the log says why."""
        files = sorted(file for pattern in _CHECKPOINT for file in key.checkpoint.glob(pattern))
        if self._max_bytes == 0:
            return None
        try:
            if sum(file.stat().st_size for file in files) > self._max_bytes:
                raise OSError(f"weight_cache.max_bytes {self._max_bytes:,} is less than the checkpoint has")
            self._prepare_folder()
            contents = self._hashes(files)
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            return None
        parts = (
            contents, key.half, str(key.dtype), key.weight_dtype, key.adapted,
            kernels.variant, kernels.panel_outputs,
            _code_digest(), torch.__version__, transformers.__version__,
        )  # fmt: skip
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
        dtype = str(key.dtype).removeprefix("torch.") if key.weight_dtype == "auto" else key.weight_dtype
        return f"{key.half}-{dtype}-{kernels.variant}-{digest}.weights"

    def _prepare_folder(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = self._folder.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise OSError(f"others may write to {self._folder}")

    def _open(self, name: str, *, is_checked: bool = False) -> MappedWeights | None:
        path = self._folder / name
        started_at = time.monotonic()
        try:
            mapped = read_weights(path, is_checked=is_checked)
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))  # used last, and not written to
        except FileNotFoundError:
            return None
        except (DamagedFile, OSError) as error:
            self._discard(name, error)
            return None
        logger.info(
            "packed weights: mapped %s in %.2f s%s",
            path, time.monotonic() - started_at,
            ", not locked in memory (ulimit -l)" if mapped.evictable_bytes else "",
        )  # fmt: skip
        return mapped

    def _discard(self, name: str, reason: Exception) -> None:
        logger.warning("packed weights: %s is not used: %s", self._folder / name, reason)
        with suppress(OSError):
            (self._folder / name).unlink()

    def _write(self, name: str, weights: RecordedWeights) -> bool:
        """Whether the file is there now."""
        if not weights.is_complete:
            logger.info("packed weights are not kept: this model packs some outside of its modules")
            return False
        unfinished = self._folder / f".{name}.{os.getpid()}.part"
        started_at = time.monotonic()
        try:
            self._make_room(num_bytes_of(weights))
            write_weights(unfinished, weights)
            unfinished.replace(self._folder / name)
        except OSError as error:
            logger.warning("packed weights are not kept: %s", error)
            unfinished.unlink(missing_ok=True)
            return False
        logger.info("packed weights: wrote %s in %.2f s", self._folder / name, time.monotonic() - started_at)
        return True

    def _make_room(self, num_bytes: int) -> None:
        """Deletes the files that were not used for the longest time. Workers that have mapped one keep it.
        Raises OSError if the budget or the disk has no room."""
        for abandoned in self._folder.glob(".*.part"):
            with suppress(OSError):
                if time.time() - abandoned.stat().st_mtime > _ABANDONED_S:
                    abandoned.unlink()
        if num_bytes > self._max_bytes:
            raise OSError(f"{num_bytes:,} bytes do not fit weight_cache.max_bytes {self._max_bytes:,}")
        files = sorted(self._folder.glob("*.weights"), key=lambda file: file.stat().st_atime_ns)
        used = sum(file.stat().st_size for file in files)
        while files and used + num_bytes > self._max_bytes:
            oldest = files.pop(0)
            used -= oldest.stat().st_size
            oldest.unlink()
            logger.info("packed weights: deleted %s for the budget", oldest)
        if shutil.disk_usage(self._folder).free < num_bytes + _MIN_FREE_BYTES:
            raise OSError(f"less than {num_bytes + _MIN_FREE_BYTES:,} bytes are free on the disk")

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """One process at a time. A process that opens the lock file while it is deleted gets a second
        lock: then two write the same file, each under a name of its own."""
        path = self._folder / f".{name}.lock"
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                path.unlink(missing_ok=True)

    def _hashes(self, files: list[Path]) -> list[tuple[str, str]]:
        """Name and SHA-256 of every file. Raises OSError."""
        memory = self._folder / _HASHES
        try:
            known = json.loads(memory.read_text())
        except (OSError, ValueError):
            known = {}
        states = {file: _state_of(file) for file in files}
        unknown = [file for file, (state, _) in states.items() if state not in known]
        with ThreadPoolExecutor(_NUM_HASHED) as threads:
            found = dict(zip(unknown, threads.map(_digest_of, unknown), strict=True))
        contents = [(file.name, found.get(file) or known[state]) for file, (state, _) in states.items()]
        lasting = [file for file in unknown if states[file][1] and _state_of(file) == states[file]]
        if lasting:
            known |= {states[file][0]: found[file] for file in lasting}
            recent = dict(list(known.items())[-_MAX_HASHES:])
            with tempfile.NamedTemporaryFile(
                "w", dir=self._folder, suffix=".part", delete=False
            ) as unfinished:
                json.dump(recent, unfinished)
            Path(unfinished.name).replace(memory)
        return contents


def _digest_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _state_of(file: Path) -> tuple[str, bool]:
    """What changes with every write to the file, and whether the clock has moved on since the last one."""
    status = file.stat()
    state = (
        str(file.resolve()), status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns,
        status.st_ctime_ns,
    )  # fmt: skip
    changed_at = max(status.st_mtime_ns, status.st_ctime_ns)
    return json.dumps(state), time.time_ns() - changed_at > _MIN_AGE_NS


@functools.cache
def _code_digest() -> str:
    """Returns the digest of the code that decides what is packed, and how."""
    digest = hashlib.sha256()
    for file in sorted(file for pattern in _CODE for file in _MODEL_CODE.glob(pattern)):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
