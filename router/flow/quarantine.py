"""Work that a worker had when it was lost, and that may have ended the worker.

A crash cannot be told from the death of a host, and a lost worker had many items and requests in work. So the
first loss makes each of them a suspect:

* An item is tried once more, one suspect at a time on an encoder (`router.flow.media`).
* A request goes on at another worker (`router.flow.continuation`). One that waited for memory at the lost
  worker is no suspect.

Work that is lost with a second worker is barred: it is refused (4xx) for `BARRED_S`, also when it is sent
again. Requests cannot wait for each other as items do, and many are lost with one decode worker. A request is
barred after the second loss if both losses came at the same point of its answer, as they do if the request is
the cause, else after the third.

A worker that comes back under its own id was not dead, only its connection: the suspicions of that loss are
dropped.

A poison item costs two workers, a poison request two or three, of each door that it is sent to: doors do not
tell each other. The table is bounded: the oldest suspicion is forgotten first. Pure: `now` is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from cluster.errors import QuarantinedError
from cluster.media.settings import item_name
from cluster.types.media import MediaItem
from cluster.types.request import GenerateRequest

BARRED_S = 600.0  # since the last loss; also how long a suspicion lasts
MAX_SUSPECTS = 4096
# Answers that end with so few tokens between them ended at the same point: a frame or two may be lost.
NEAR_TOKENS = 8


@dataclass(eq=False, slots=True)
class _Suspicion:
    lost_with: dict[str, int] = field(default_factory=dict)  # replica id: tokens of the answer until then
    until: float = 0.0

    @property
    def is_barred(self) -> bool:
        points = sorted(self.lost_with.values())
        return len(points) > 2 or (len(points) == 2 and points[1] - points[0] <= NEAR_TOKENS)


class Quarantine:
    """A quarantine of media items, by media hash, and of requests, by `content_of`."""

    def __init__(self) -> None:
        self._suspicions: OrderedDict[Hashable, _Suspicion] = OrderedDict()
        self.num_barred = 0  # since the start

    def __len__(self) -> int:
        """Suspects."""
        return len(self._suspicions)

    def lost(self, key: Hashable, replica_id: str, now: float, num_tokens: int = 0) -> None:
        """A worker was lost with this in work, `num_tokens` into the answer. May be repeated."""
        suspicion = self._find(key, now) or _Suspicion()
        was_barred = suspicion.is_barred
        suspicion.lost_with.setdefault(replica_id, num_tokens)
        suspicion.until = now + BARRED_S
        self.num_barred += suspicion.is_barred and not was_barred
        self._suspicions[key] = suspicion
        self._suspicions.move_to_end(key)
        if len(self._suspicions) > MAX_SUSPECTS:
            self._suspicions.popitem(last=False)

    def came_back(self, replica_id: str) -> None:
        """The worker lives: only its connection had been lost."""
        for key, suspicion in list(self._suspicions.items()):
            suspicion.lost_with.pop(replica_id, None)
            if not suspicion.lost_with:
                del self._suspicions[key]

    def survived(self, key: Hashable) -> None:
        """A worker has completed this work and lives."""
        self._suspicions.pop(key, None)

    def is_suspect(self, key: Hashable, now: float) -> bool:
        return self._find(key, now) is not None

    def is_barred(self, key: Hashable, now: float) -> bool:
        suspicion = self._find(key, now)
        return suspicion is not None and suspicion.is_barred

    def _find(self, key: Hashable, now: float) -> _Suspicion | None:
        suspicion = self._suspicions.get(key)
        if suspicion is not None and suspicion.until <= now:
            del self._suspicions[key]
            return None
        return suspicion


def content_of(request: GenerateRequest, hashes: Sequence[bytes], block_size: int) -> Hashable:
    """Equal for requests with equal prompts. `hashes`: of the prompt's full blocks."""
    prompt = request.prompt
    rest = prompt.token_ids[len(hashes) * block_size :]
    return (hashes[-1] if hashes else b"", rest, tuple(item.media_hash for item in prompt.media))


def barred_item(item: MediaItem) -> QuarantinedError:
    name = item_name(item.modality, item.item_idx)
    return QuarantinedError(
        f"{name}: the workers that encoded it were lost, so it is not tried again for now", param=item.param
    )


def barred_request() -> QuarantinedError:
    return QuarantinedError(
        "the workers that computed this prompt were lost, so it is not tried again for now", param="messages"
    )
