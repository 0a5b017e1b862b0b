"""The LoRA adapters that a worker holds: brings those that it shall hold into the model's slots, and tells
all doors what it has.

An adapter is read and converted on a thread of its own. It comes into a slot between two steps, when there is
one that no other adapter of the set has and no request uses: requests whose adapter was unloaded go on with
it, and hold its slot. New requests are refused then.

An adapter that cannot be loaded is told to the doors with the reason, and tried again with the next set, or
when the worker starts again. The engine's thread owns everything here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from cluster.config.adapters import folder_within, read_adapter
from cluster.config.settings import ClusterArgs
from cluster.engine.state import LanguageRequest
from cluster.errors import ConfigError, ErrorInfo, to_info
from cluster.model.adapters import PreparedAdapter
from cluster.model.language import LanguageModel
from cluster.types.adapters import AdapterEntry, AdapterFailure, AdapterSet
from cluster.types.messages import AdaptersHeld
from cluster.worker.outbox import Outbox

logger = logging.getLogger(__name__)

Call = Callable[..., None]  # runs a function with its arguments on the engine's thread


class AdapterModel(Protocol):
    """The part of `LanguageModel` that is needed here; `set_adapter` may be that of what wraps it."""

    num_adapter_slots: int

    @property
    def adapter_slots(self) -> dict[str, int]: ...


class AdapterReader:
    """Reads an adapter of a set for one model. Any thread."""

    def __init__(self, args: ClusterArgs, model: LanguageModel):
        self._args, self._model = args, model

    def __call__(self, entry: AdapterEntry) -> PreparedAdapter:
        """Blocks. Raises ConfigError, also if the content is not what the entry's digest says."""
        args = self._args
        if entry.folder:
            folder = folder_within(args.adapters_folder, entry.folder)
        else:
            folder = Path(args.adapters[entry.name])
        adapter = read_adapter(entry.name, folder, args.max_lora_rank)
        if adapter.digest != entry.digest:
            raise ConfigError(f"adapter '{entry.name}': this worker finds other content in its folder")
        return self._model.prepare_adapter(adapter)


class HeldAdapters:
    def __init__(
        self,
        model: AdapterModel,
        set_adapter: Callable[[int, PreparedAdapter], None],
        begins_with: AdapterSet,
        read: Callable[[AdapterEntry], PreparedAdapter],
        outbox: Outbox,
        executor: Executor,
    ):
        """`begins_with`: what the model has in its slots. `set_adapter`: of the model's steps. `read`: runs
        on `executor`."""
        self._model, self._set_adapter, self._read = model, set_adapter, read
        self._wanted = begins_with
        self._outbox, self._executor = outbox, executor
        self._reading: set[str] = set()
        self._prepared: dict[str, PreparedAdapter] = {}  # they wait for a slot
        self._failed: dict[str, ErrorInfo] = {}
        self._call: Call = _not_attached
        outbox.greet_with(self._told)

    def attach(self, call: Call) -> None:
        """Called once, before the first set."""
        self._call = call

    def has(self, digest: str) -> bool:
        """Whether new requests may have this adapter."""
        return digest in self._model.adapter_slots and digest in self._digests

    def want(self, wanted: AdapterSet) -> None:
        """A door tells the set that it knows. An older one, or that of other settings, is ignored."""
        if not wanted.follows(self._wanted):
            return
        self._wanted, digests = wanted, {entry.digest for entry in wanted.adapters}
        self._failed.clear()
        self._prepared = {own: prepared for own, prepared in self._prepared.items() if own in digests}
        for entry in wanted.adapters:
            if entry.digest not in self._model.adapter_slots.keys() | self._reading | self._prepared.keys():
                self._reading.add(entry.digest)
                self._executor.submit(self._try_read, entry)
        logger.info("adapters, version %d: %s", wanted.version, ", ".join(e.name for e in wanted.adapters))
        self._announce()

    def settle(self, requests: Iterable[LanguageRequest]) -> None:
        """Writes adapters that wait into slots that are free. To be called between two steps. `requests`: all
        that have not ended."""
        if not self._prepared:
            return
        in_use = {request.request.prompt.adapter for request in requests} | self._digests
        free = set(range(1, self._model.num_adapter_slots + 1))
        free -= {slot for digest, slot in self._model.adapter_slots.items() if digest in in_use}
        for digest in list(self._prepared)[: len(free)]:
            self._set_adapter(min(free), self._prepared.pop(digest))
            free.remove(self._model.adapter_slots[digest])
            self._announce()

    @property
    def _digests(self) -> set[str]:
        return {entry.digest for entry in self._wanted.adapters}

    def _try_read(self, entry: AdapterEntry) -> None:
        """The reader's thread. Its errors are told to the doors."""
        try:
            result = self._read(entry)
        except Exception as error:
            logger.exception("an adapter could not be loaded")
            result = to_info(error)
        self._call(self._on_read, entry.digest, result)

    def _on_read(self, digest: str, result: PreparedAdapter | ErrorInfo) -> None:
        self._reading.discard(digest)
        if digest not in self._digests:
            return
        if isinstance(result, PreparedAdapter):
            self._prepared[digest] = result
        else:
            self._failed[digest] = result
            self._announce()

    def _told(self) -> AdaptersHeld:
        held = tuple(entry.digest for entry in self._wanted.adapters if self.has(entry.digest))
        failed = tuple(AdapterFailure(digest, error) for digest, error in self._failed.items())
        return AdaptersHeld(self._wanted, held, failed)

    def _announce(self) -> None:
        self._outbox.broadcast(self._told())


def _not_attached(*_: object) -> None:
    raise AssertionError("the engine's thread does not run yet")
