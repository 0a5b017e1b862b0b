"""Reads a request's media, counts its bytes and opens it, before the prompt is planned.

    take_in   read all items at once and keep equal contents once → other processes open them, one after the
              other
    release   when the request has ended, successfully or not: its bytes are no longer counted

Limits per request: bytes and seconds of decoding. Limits per tenant and per door: bytes of all requests in
work. Requests share the surveyors item by item. A cancelled request stops reading and decoding at once. Runs
on the door's event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster import overload
from cluster.clock import Clock
from cluster.config.settings import MediaArgs
from cluster.errors import ClusterError, MediaError, OverloadedError, RequestError
from cluster.media.fetch import FetchedMedia, Fetcher
from cluster.media.opener import Surveyed, SurveyOrder
from cluster.media.processor import MediaProcessor
from cluster.media.settings import MediaSettings, naming
from cluster.media.sources import MediaSource
from cluster.media.survey import MediaSurvey
from cluster.media.surveyors import DecodeTime, SurveyorPool
from cluster.types.media import MediaOptions, Modality
from router.calls import ChatCall
from router.prompts.media import Content

RETRY_AFTER_S = 5.0


class MediaTooLargeError(RequestError):
    status = 413
    code = "media_too_large"


class MediaBytes:
    """The bytes of files, as they were sent or fetched, that the requests in work hold. A request's equal
    contents count once."""

    def __init__(self, limits: MediaArgs):
        self.limits = limits
        self.total = 0
        self.by_tenant: Counter[str] = Counter()

    def hold(self, tenant: str, num_bytes: int) -> None:
        """Raises OverloadedError."""
        held, per_door = self.by_tenant[tenant], self.limits.max_held_bytes
        per_tenant = max(per_door // 2, self.limits.max_request_bytes)
        for name, max_bytes, now in (("door", per_door, self.total), ("tenant", per_tenant, held)):
            if now + num_bytes > max_bytes:
                raise OverloadedError(
                    overload.media_bytes(now + num_bytes, name, max_bytes), retry_after_s=RETRY_AFTER_S
                )
        self.total += num_bytes
        self.by_tenant[tenant] += num_bytes

    def free(self, tenant: str, num_bytes: int) -> None:
        self.total -= num_bytes
        self.by_tenant[tenant] -= num_bytes
        if not self.by_tenant[tenant]:
            del self.by_tenant[tenant]


@dataclass(eq=False)
class RequestMedia:
    """One request's media. The caller releases it when the request has ended."""

    bytes_in_work: MediaBytes
    tenant: str
    contents: Sequence[Content | MediaError] = ()  # of each of the call's items
    num_bytes: int = 0
    read_at: float = 0.0  # on the door's clock: when all bytes had arrived
    _by_digest: dict[bytes, FetchedMedia] = field(default_factory=dict)

    def keep(self, media: FetchedMedia, param: str) -> FetchedMedia:
        """Returns the one content that is kept for these bytes. Raises MediaTooLargeError and
        OverloadedError."""
        known = self._by_digest.get(media.digest)
        if known is not None:
            return known
        max_bytes, num_bytes = self.bytes_in_work.limits.max_request_bytes, len(media.data)
        if self.num_bytes + num_bytes > max_bytes:
            raise MediaTooLargeError(
                f"the media of this request have more than {max_bytes} bytes", param=param
            )
        self.bytes_in_work.hold(self.tenant, num_bytes)
        self.num_bytes += num_bytes
        self._by_digest[media.digest] = media
        return media

    def release(self) -> None:
        """May be repeated."""
        self.bytes_in_work.free(self.tenant, self.num_bytes)
        self.num_bytes = 0
        self._by_digest.clear()


class MediaIntake:
    def __init__(
        self,
        fetcher: Fetcher,
        surveyors: SurveyorPool,
        processor: MediaProcessor | None,
        limits: MediaArgs,
        clock: Clock,
    ):
        """`processor`: None for a model without media; then `MediaPlanner` refuses every item by name."""
        self._fetcher = fetcher
        self._surveyors = surveyors
        self._settings = None if processor is None else processor.settings
        self._bytes = MediaBytes(limits)
        self._clock = clock

    @property
    def num_held_bytes(self) -> int:
        return self._bytes.total

    async def take_in(self, call: ChatCall) -> RequestMedia:
        """Reads and opens a call's media. Raises ClusterError; then nothing is held. With `omits_bad`, an
        item that cannot be used is an error among the contents."""
        media = RequestMedia(self._bytes, call.tenant, read_at=self._clock.now())
        try:
            if self._settings is None:
                nothing = Content(FetchedMedia(b"", b""), Surveyed(MediaSurvey()))
                media.contents = [nothing] * len(call.media)
            elif call.media:
                fetched = await self._read_all(call, media)
                media.read_at = self._clock.now()
                media.contents = await self._survey_all(call, fetched, self._settings)
        except BaseException:
            media.release()
            raise
        return media

    async def aclose(self) -> None:
        await self._fetcher.aclose()
        self._surveyors.close()

    async def _read_all(self, call: ChatCall, media: RequestMedia) -> list[FetchedMedia | MediaError]:
        """Reads all items at once. An item that cannot be read ends the others, unless it may be left out."""
        assert self._settings is not None
        max_bytes = self._settings.limits.max_bytes

        async def read(source: MediaSource, item_idx: int) -> FetchedMedia | MediaError:
            try:
                got = await self._fetcher.read(source, max_bytes, item_idx=item_idx, tenant=call.tenant)
            except MediaError as error:
                if not call.media_rules.omits_bad:
                    raise
                return error
            return media.keep(got, source.param)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(read(source, idx)) for idx, source in enumerate(call.media)]
        except ExceptionGroup as errors:
            raise next((e for e in errors.exceptions if isinstance(e, ClusterError)), errors) from None
        return [task.result() for task in tasks]

    async def _survey_all(
        self, call: ChatCall, fetched: Sequence[FetchedMedia | MediaError], settings: MediaSettings
    ) -> list[Content | MediaError]:
        """Opens equal items once."""
        time = DecodeTime(settings.limits.max_request_decode_s)
        known: dict[tuple[Modality, bytes, MediaOptions], Surveyed] = {}
        contents: list[Content | MediaError] = []
        for item_idx, (source, media) in enumerate(zip(call.media, fetched, strict=True)):
            if isinstance(media, MediaError):
                contents.append(media)
                continue
            key = (source.modality, media.digest, source.options)
            order = SurveyOrder(
                source.modality,
                source.options,
                settings,
                decodes=call.media_rules.omits_bad,
                timeout_s=settings.limits.max_decode_s,
            )
            try:
                with naming(source.modality, item_idx, source.param):
                    if key not in known:
                        known[key] = await self._surveyors.survey(call.tenant, order, media.data, time)
                contents.append(Content(media, known[key]))
            except MediaError as error:
                if not call.media_rules.omits_bad:
                    raise
                contents.append(error)
        return contents
