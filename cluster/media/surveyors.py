"""A door's surveys: files are opened in processes (`processes`) and not in the door, whose event loop and
streams stay unaffected.

Steps of a survey: it waits for a slot among all tenants' surveys → an opener follows its order. Long surveys
(clips, sounds, whole decodes) leave one process for headers of images, which take a millisecond, and one for
other tenants. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import msgspec

from cluster import overload
from cluster.errors import MediaError, OverloadedError
from cluster.media.opener import Surveyed, SurveyOrder, Written
from cluster.media.openers import opener_pool
from cluster.media.processes import ProcessPool, wait_on_loop
from cluster.media.program import append, open_memory_file, result_bytes, seal
from cluster.media.settings import MAX_SURVEY_BYTES
from cluster.media.slots import FairSlots
from cluster.media.survey import check_survey
from cluster.types.media import Modality

NUM_PROCESSES = 4
NUM_PROCESSES_PER_TENANT = 3
NUM_LONG = 3
NUM_LONG_PER_TENANT = 2
WAIT_TIMEOUT_S = 60.0  # for a slot
RETRY_AFTER_S = 5.0
PIECE_BYTES = 1 << 20  # of a file, copied at once: a larger one would hold up the event loop

_decoder = msgspec.msgpack.Decoder(Surveyed)


@dataclass
class DecodeTime:
    """Seconds that all surveys of one request may take together."""

    left_s: float

    def bound(self, order: SurveyOrder) -> SurveyOrder:
        """The order with at most the remaining time. Raises MediaError if none is left."""
        if self.left_s <= 0:
            raise MediaError("the media of this request take too long to decode")
        return msgspec.structs.replace(order, timeout_s=min(order.timeout_s, self.left_s))


class SurveyorPool:
    def __init__(self, pool: ProcessPool[Written] | None = None):
        self._pool = pool or opener_pool()
        self._long = FairSlots(NUM_LONG, NUM_LONG_PER_TENANT)
        self._all = FairSlots(NUM_PROCESSES, NUM_PROCESSES_PER_TENANT)

    @property
    def num_busy(self) -> int:
        return self._pool.num_busy

    def warm_up(self) -> None:
        """Starts a process early, so that the first client need not wait for it."""
        self._pool.warm_up()

    async def survey(self, tenant: str, order: SurveyOrder, data: bytes, time: DecodeTime) -> Surveyed:
        """Raises MediaError, which does not name the item, OverloadedError and UnavailableError. May be
        cancelled at any time."""
        async with AsyncExitStack() as slots:
            work, limits = "processes that open long media", (NUM_LONG, NUM_LONG_PER_TENANT)
            try:
                async with asyncio.timeout(WAIT_TIMEOUT_S):
                    if order.modality is not Modality.IMAGE or order.decodes:
                        await slots.enter_async_context(self._long.slot(tenant))
                    work, limits = "processes that open media", (NUM_PROCESSES, NUM_PROCESSES_PER_TENANT)
                    await slots.enter_async_context(self._all.slot(tenant))
            except TimeoutError:
                text = overload.no_slot(work, WAIT_TIMEOUT_S, *limits)
                raise OverloadedError(text, retry_after_s=RETRY_AFTER_S) from None
            bounded, loop = time.bound(order), asyncio.get_running_loop()
            began_at = loop.time()
            try:
                file = slots.enter_context(open_memory_file())
                for start in range(0, len(data), PIECE_BYTES):
                    append(file, memoryview(data)[start : start + PIECE_BYTES])
                    await asyncio.sleep(0)
                seal(file)
                return await self._pool.ask(bounded, file, wait_on_loop, partial(_read, order))
            finally:
                time.left_s -= loop.time() - began_at

    def close(self) -> None:
        """Ends all processes. Running surveys fail."""
        self._pool.close()


def _read(order: SurveyOrder, answer: Written, result: int) -> Surveyed:
    """Raises ValueError and msgspec.DecodeError for a survey that no file can have."""
    (num_bytes,) = answer.shape
    if not 0 < num_bytes <= MAX_SURVEY_BYTES:
        raise ValueError(f"a survey of {num_bytes} bytes")
    surveyed = _decoder.decode(result_bytes(result, num_bytes).data)
    check_survey(surveyed.survey, order.modality, order.settings)
    if surveyed.sound is not None:
        check_survey(surveyed.sound, Modality.AUDIO, order.settings)
    return surveyed
