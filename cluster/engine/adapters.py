"""The LoRA adapters that a worker holds: brings those that it shall hold into the model's slots, and tells
all doors what it has.

When there is a slot that no other adapter of the set has and no request uses, an adapter is loaded into it on
a thread of its own, while steps go on (`cluster.worker.adapter_loading`). Requests whose adapter was unloaded
go on with it, and hold its slot. New requests are refused then.

An adapter that cannot be loaded is told to the doors with the reason, and tried again with the next set, or
when the worker starts again. The engine's thread owns everything here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from typing import Protocol

from cluster.engine.state import LanguageRequest
from cluster.errors import ErrorInfo, to_info
from cluster.types.adapters import AdapterEntry, AdapterFailure, AdapterSet
from cluster.types.messages import AdaptersHeld
from cluster.worker.adapter_loading import LoadAdapter
from cluster.worker.outbox import Outbox

logger = logging.getLogger(__name__)

Call = Callable[..., None]  # runs a function with its arguments on the engine's thread


class AdapterModel(Protocol):
    """The part of `LanguageModel` that is needed here."""

    num_adapter_slots: int

    @property
    def adapter_slots(self) -> dict[str, int]: ...

    def set_adapter(self, slot: int, digest: str) -> None: ...


class HeldAdapters:
    def __init__(
        self,
        model: AdapterModel,
        begins_with: AdapterSet,
        load: LoadAdapter,
        outbox: Outbox,
        executor: Executor,
    ):
        """`begins_with`: what the model has in its slots. `load`: runs on `executor`."""
        self._model, self._load = model, load
        self._wanted = begins_with
        self._outbox, self._executor = outbox, executor
        self._waiting: list[AdapterEntry] = []  # for a slot
        self._loading: dict[str, int] = {}  # slots by digest
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
        self._wanted = wanted
        self._failed.clear()
        known = self._model.adapter_slots.keys() | self._loading.keys()
        self._waiting = [entry for entry in wanted.adapters if entry.digest not in known]
        logger.info("adapters, version %d: %s", wanted.version, ", ".join(e.name for e in wanted.adapters))
        self._announce()

    def settle(self, requests: Iterable[LanguageRequest]) -> None:
        """Begins to load adapters that wait into slots that are free. To be called between two steps.
        `requests`: all that have not ended."""
        if not self._waiting:
            return
        in_use = {request.request.prompt.adapter for request in requests} | self._digests
        free = set(range(1, self._model.num_adapter_slots + 1)) - {*self._loading.values()}
        free -= {slot for digest, slot in self._model.adapter_slots.items() if digest in in_use}
        while free and self._waiting:
            entry, slot = self._waiting.pop(0), min(free)
            free.remove(slot)
            self._model.set_adapter(slot, "")
            self._loading[entry.digest] = slot
            self._executor.submit(self._try_load, entry, slot)

    @property
    def _digests(self) -> set[str]:
        return {entry.digest for entry in self._wanted.adapters}

    def _try_load(self, entry: AdapterEntry, slot: int) -> None:
        """The loader's thread. Its errors are told to the doors."""
        failure = None
        try:
            self._load(entry, slot)
        except Exception as error:
            logger.exception("an adapter could not be loaded")
            failure = to_info(error)
        self._call(self._on_loaded, entry.digest, failure)

    def _on_loaded(self, digest: str, failure: ErrorInfo | None) -> None:
        slot = self._loading.pop(digest)
        if digest not in self._digests:
            return
        if failure is None:
            self._model.set_adapter(slot, digest)
        else:
            self._failed[digest] = failure
        self._announce()

    def _told(self) -> AdaptersHeld:
        held = tuple(entry.digest for entry in self._wanted.adapters if self.has(entry.digest))
        failed = tuple(AdapterFailure(digest, error) for digest, error in self._failed.items())
        return AdaptersHeld(self._wanted, held, failed)

    def _announce(self) -> None:
        self._outbox.broadcast(self._told())


def _not_attached(*_: object) -> None:
    raise AssertionError("the engine's thread does not run yet")
