"""The LoRA adapters of a cluster, as doors and workers tell each other.

Doors and workers keep one value, `AdapterSet`, and the newest one wins wherever two meet: a door sends it to
every worker that has an older one, a worker tells every door what it has. So a worker or a door that was away
learns what it has missed from any other process. Pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from cluster.errors import ErrorInfo


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One adapter. Its digest names it everywhere but in the API."""

    name: str
    digest: str
    folder: str = ""  # in `adapters_folder`; empty: it is one of the settings
    is_ready: bool = True  # clients may name it: every worker has held it


class AdapterSet(msgspec.Struct, frozen=True, array_like=True):
    """The adapters that the workers shall hold. origin: of the settings' adapters; sets with another one are
    those of a cluster with other settings. version: how many changes have led to it."""

    origin: str
    version: int
    adapters: tuple[AdapterEntry, ...]

    @classmethod
    def of_settings(cls, digests: Mapping[str, str]) -> AdapterSet:
        """digests: by name."""
        entries = tuple(AdapterEntry(name, digest) for name, digest in sorted(digests.items()))
        return cls(hashlib.sha256(msgspec.json.encode(entries)).hexdigest()[:32], 0, entries)

    def follows(self, other: AdapterSet) -> bool:
        """Whether it takes the place of the other one. Of two changes at once, one does, everywhere the
        same."""
        own, others = (self.version, self.adapters), (other.version, other.adapters)
        return self.origin == other.origin and own > others

    def next(self, adapters: Iterable[AdapterEntry]) -> AdapterSet:
        return AdapterSet(self.origin, self.version + 1, tuple(sorted(adapters)))

    def named(self, name: str) -> AdapterEntry | None:
        return next((entry for entry in self.adapters if entry.name == name), None)


class AdapterFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a worker does not hold an adapter that it should."""

    digest: str
    error: ErrorInfo
