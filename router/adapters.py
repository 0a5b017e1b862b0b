"""The LoRA adapters of the cluster, as one door knows them; loading and unloading while it runs.

A change is a new `AdapterSet`, which this door makes and sends to every worker with a language engine. Other
doors learn it from what the workers announce. A door sends the set that it knows to each worker that
announces an older one: so a worker that was started again gets the adapters, from any door, and a door that
was started again learns them from any worker. Nothing is written anywhere: if no door and no worker is left,
the adapters of the settings are.

Loading has two parts. First the workers shall hold the adapter, and no client can name it. When all of them
do, it is ready. If one cannot, or too much time has passed, a third set takes it back from all.

Lives on the door's event loop. One change at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from cluster.config.adapters import folder_within, read_adapter, read_adapters
from cluster.config.settings import ClusterArgs
from cluster.errors import (
    ClusterError,
    ConfigError,
    ErrorInfo,
    ModelNotFoundError,
    RequestError,
    UnavailableError,
    UnsupportedError,
    from_info,
)
from cluster.types.adapters import AdapterEntry, AdapterSet
from cluster.types.members import Phase
from cluster.types.messages import SetAdapters
from router.calls import ServedModels
from router.members import MemberTable, Peer

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0  # until every worker holds an adapter
CONFIRM_TIMEOUT_S = 10.0  # until every worker knows what has been decided
LANGUAGE = frozenset((Phase.PREFILL, Phase.DECODE))


class ChangedMeanwhileError(RequestError):
    status = 409
    code = "conflict"


class DoorAdapters:
    def __init__(self, args: ClusterArgs, *, load_timeout_s: float = LOAD_TIMEOUT_S):
        """Reads the adapters of the settings. Blocks. Raises ConfigError."""
        self._args, self._load_timeout_s = args, load_timeout_s
        own = read_adapters(args.adapters, args.max_lora_rank)
        self._set = AdapterSet.of_settings({adapter.name: adapter.digest for adapter in own})
        self._changed = asyncio.Event()  # what a worker holds, or which workers there are
        self._lock = asyncio.Lock()
        self.models = self._served()

    def attach(self, members: MemberTable) -> None:
        """Called once, before the first worker joins."""
        self._members = members

    def on_told(self, peer: Peer) -> None:
        """The worker has told of its adapters, or is lost."""
        if peer.adapters is not None and peer.adapters.wanted.follows(self._set):
            self._take_over(peer.adapters.wanted)
        else:
            self._catch_up([peer])
        self._changed.set()
        self._changed = asyncio.Event()

    async def load(self, name: str, path: str) -> None:
        """Returns when every worker holds the adapter and clients may name it. `path`: of its folder, in
        `adapters_folder`. Raises ClusterError; then no worker keeps it."""
        self._check_enabled()
        async with self._lock:
            self._check_new(name)
            try:
                entry = await asyncio.to_thread(self._read, name, path)
            except ConfigError as error:
                raise RequestError(error.message, param="lora_path") from error
            self._check_new(name)
            loading = self._adopt([*self._others(name), entry])
            try:
                await self._within(self._load_timeout_s, lambda: self._is_held(loading, entry))
            except BaseException:
                if self._set == loading:
                    self._adopt(self._others(name))
                raise
            ready = msgspec.structs.replace(entry, is_ready=True)
            await self._confirmed(self._adopt([*self._others(name), ready]))
            if self._set.named(name) != ready:
                raise _changed_meanwhile()

    async def unload(self, name: str) -> None:
        """Returns when no new request gets the adapter. Raises ClusterError."""
        self._check_enabled()
        async with self._lock:
            if self._set.named(name) is None:
                raise ModelNotFoundError(f"the adapter {name[:200]!r} is not loaded", param="lora_name")
            await self._confirmed(self._adopt(self._others(name)))
            if self._set.named(name) is not None:
                raise _changed_meanwhile()

    def _check_enabled(self) -> None:
        if not self._args.adapters_folder:
            raise UnsupportedError(
                "adapters are not loaded or unloaded while this cluster runs: its settings have no "
                "adapters_folder"
            )

    def _check_new(self, name: str) -> None:
        """Raises RequestError. An adapter that is not ready was left over by a door that has ended: its name
        may be loaded again."""
        if name == self._args.model_id:
            raise RequestError("this is the name of the model itself", param="lora_name")
        if (known := self._set.named(name)) is not None and known.is_ready:
            raise RequestError(
                f"the adapter {name[:200]!r} has already been loaded; unload it first", param="lora_name"
            )
        if len(self._others(name)) >= self._args.max_loras:
            raise RequestError(
                f"{self._args.max_loras} adapters are loaded, as many as max_loras allows; unload one first",
                param="lora_name",
            )

    def _read(self, name: str, path: str) -> AdapterEntry:
        root = self._args.adapters_folder
        adapter = read_adapter(name, folder_within(root, path), self._args.max_lora_rank)
        folder = str(adapter.folder.relative_to(Path(root).resolve()))
        return AdapterEntry(name, adapter.digest, folder, is_ready=False)

    def _others(self, name: str) -> list[AdapterEntry]:
        return [entry for entry in self._set.adapters if entry.name != name]

    def _adopt(self, adapters: Iterable[AdapterEntry]) -> AdapterSet:
        return self._take_over(self._set.next(adapters))

    def _take_over(self, newer: AdapterSet) -> AdapterSet:
        """From now on this door knows these, and sees to it that its workers do."""
        self._set = newer
        logger.info("adapters, version %d: %s", newer.version, ", ".join(e.name for e in newer.adapters))
        self.models = self._served()
        self._catch_up(self._members.all_peers())
        return newer

    def _served(self) -> ServedModels:
        ready = {entry.name: entry.digest for entry in self._set.adapters if entry.is_ready}
        return ServedModels(self._args.model_id, ready)

    def _catch_up(self, peers: Iterable[Peer]) -> None:
        """Sends the set to those that have told an older one."""
        for peer in peers:
            if peer.adapters is not None and self._set.follows(peer.adapters.wanted):
                self._members.send(peer.member.replica_id, SetAdapters(self._set))

    @property
    def _holders(self) -> list[Peer]:
        """Workers that compute with adapters; without those that drain."""
        peers = self._members.all_peers()
        return [peer for peer in peers if peer.is_listed and peer.member.role.phases & LANGUAGE]

    def _is_held(self, wanted: AdapterSet, entry: AdapterEntry) -> bool:
        """Whether every worker holds the adapter, and there is one for each phase. Raises ClusterError if one
        cannot hold it, or another change has come."""
        if self._set != wanted:
            raise _changed_meanwhile()
        held = [peer.adapters for peer in self._holders if peer.adapters is not None]
        for failure in (failure for told in held for failure in told.failed):
            if failure.digest == entry.digest:
                raise _refusal(failure.error)
        phases = frozenset[Phase]().union(*(peer.member.role.phases for peer in self._holders))
        is_everywhere = len(held) == len(self._holders) and all(entry.digest in told.held for told in held)
        return phases >= LANGUAGE and is_everywhere

    async def _confirmed(self, wanted: AdapterSet) -> None:
        def is_known() -> bool:
            told = (peer.adapters for peer in self._holders)
            return all(own is not None and not wanted.follows(own.wanted) for own in told)

        await self._within(CONFIRM_TIMEOUT_S, is_known)

    async def _within(self, timeout_s: float, is_done: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not is_done():
                    await self._changed.wait()
        except TimeoutError:
            raise UnavailableError(
                f"not every worker has answered within {timeout_s:.0f} s, or there is none for each phase"
            ) from None


def _refusal(error: ErrorInfo) -> ClusterError:
    """What keeps a worker from holding an adapter, as the client sees it."""
    found = from_info(error)
    return RequestError(found.message, param="lora_path") if isinstance(found, ConfigError) else found


def _changed_meanwhile() -> ChangedMeanwhileError:
    return ChangedMeanwhileError("another door has changed the adapters at the same time; try again")
