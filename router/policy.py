"""Which encoders, prefill and decode worker serve a request. Pure: no clock, no sockets, no torch.

Predicted work decides: a worker's queue plus what this request would add there, in the worker's own unit (embedding rows,
prompt tokens, sequences). What is cached adds nothing, so affinity is not a separate rule. Ties go to rendezvous hashing
(Thaler and Ravishankar 1998) of the content, so that doors which share no state come to the same choice.

An item that some encoder has, or is about to have, goes there whatever its queue: nothing is encoded twice, and rows that are
cached need no device. Encoders say what they take on and what they evict, so this is knowledge. Of prompts the policy remembers
what it has sent where (bounded, least recently used first out). That is a guess: a worker may have evicted; then the work is
done again and only time is lost.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.errors import UnavailableError

MAX_REMEMBERED = 65_536  # keys per worker: blocks of prompts or media items


@dataclass(frozen=True)
class WorkerView:
    """One live worker as the door sees it."""

    replica_id: str
    num_queued_units: int


@dataclass(frozen=True)
class RequestView:
    """What a placement depends on."""

    num_prompt_tokens: int
    block_size: int
    block_hashes: Sequence[bytes]  # one per full block of the prompt
    media: Sequence[tuple[str, int]] = ()  # (media_hash, embedding rows) in prompt order


@dataclass(frozen=True)
class Placement:
    encoders: tuple[str, ...]  # replica id per media item
    prefill: str
    decode: str


class _Remembered:
    """The keys most recently sent to one worker."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes | str, None] = OrderedDict()

    def __contains__(self, key: bytes | str) -> bool:
        return key in self._keys

    def add(self, key: bytes | str) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > MAX_REMEMBERED:
            self._keys.popitem(last=False)

    def discard(self, key: bytes | str) -> None:
        self._keys.pop(key, None)


class LeastWorkPolicy:
    def __init__(self) -> None:
        self._remembered: dict[str, _Remembered] = {}

    def place(
        self,
        request: RequestView,
        encoders: Sequence[WorkerView],
        prefills: Sequence[WorkerView],
        decodes: Sequence[WorkerView],
    ) -> Placement:
        """Raises UnavailableError, naming the pool, when a pool that the request needs is empty."""
        for pool, workers in (("encode", encoders), ("prefill", prefills), ("decode", decodes)):
            if not workers and (pool != "encode" or request.media):
                raise UnavailableError(f"no {pool} worker is ready", retry_after_s=1.0)
        return Placement(
            encoders=self._place_items(request.media, encoders),
            prefill=self._place_prefill(request, prefills),
            decode=min(decodes, key=lambda worker: (worker.num_queued_units, worker.replica_id)).replica_id,
        )

    def forget(self, replica_id: str) -> None:
        """The worker is gone, and its caches with it."""
        self._remembered.pop(replica_id, None)

    def media_changed(self, encoder: str, added: Sequence[str], gone: Sequence[str]) -> None:
        """What an encoder has taken on, for whichever door, and what it does not have any more."""
        memory = self._memory(encoder)
        for media_hash in gone:
            memory.discard(media_hash)
        for media_hash in added:
            memory.add(media_hash)

    def has_media(self, media_hash: str) -> bool:
        """Whether some encoder has the item, or has taken it on."""
        return any(media_hash in memory for memory in list(self._remembered.values()))

    def place_item(self, media_hash: str, num_rows: int, encoders: Sequence[WorkerView]) -> str:
        """The encoder for one item of a request. Raises UnavailableError when there is none."""
        if not encoders:
            raise UnavailableError("no encode worker is ready", retry_after_s=1.0)
        return self._place_items([(media_hash, num_rows)], encoders)[0]

    def _place_items(
        self, media: Sequence[tuple[str, int]], encoders: Sequence[WorkerView]
    ) -> tuple[str, ...]:
        queued = {worker.replica_id: worker.num_queued_units for worker in encoders}
        chosen: list[str] = []
        for media_hash, num_rows in media:
            holders = [replica_id for replica_id in queued if media_hash in self._memory(replica_id)]

            def cost(replica_id: str, key: str = media_hash) -> tuple[int, bytes]:
                return queued[replica_id], _rendezvous(key.encode(), replica_id)

            best = min(holders or queued, key=cost)
            if not holders:
                queued[best] += num_rows
                self._memory(best).add(media_hash)
            chosen.append(best)
        return tuple(chosen)

    def _place_prefill(self, request: RequestView, prefills: Sequence[WorkerView]) -> str:
        content = request.block_hashes[0] if request.block_hashes else b""

        def cost(worker: WorkerView) -> tuple[int, bytes]:
            uncached = request.num_prompt_tokens - self._num_cached_tokens(worker.replica_id, request)
            return worker.num_queued_units + uncached, _rendezvous(content, worker.replica_id)

        best = min(prefills, key=cost).replica_id
        memory = self._memory(best)
        for block_hash in request.block_hashes:
            memory.add(block_hash)
        return best

    def _num_cached_tokens(self, replica_id: str, request: RequestView) -> int:
        memory = self._memory(replica_id)
        num_blocks = 0
        for block_hash in request.block_hashes:
            if block_hash not in memory:
                break
            num_blocks += 1
        return num_blocks * request.block_size

    def _memory(self, replica_id: str) -> _Remembered:
        return self._remembered.setdefault(replica_id, _Remembered())


def _rendezvous(content: bytes, replica_id: str) -> bytes:
    return hashlib.blake2b(content + replica_id.encode(), digest_size=8).digest()
