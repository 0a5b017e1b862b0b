"""A request's media on its way in: equal contents once, bytes counted and freed, time bounded, nothing left
of who leaves."""

from __future__ import annotations

import asyncio
import base64
import hashlib
from itertools import accumulate
from typing import Any

import pytest

from bench.media_files import image
from cluster.clock import SystemClock
from cluster.errors import MediaError, OverloadedError
from cluster.media.fetch import FetchedMedia
from cluster.media.opener import Surveyed
from cluster.media.settings import MediaLimits, MediaSettings, naming
from cluster.media.sources import MediaSource, read_data_uri
from cluster.media.survey import MediaSurvey
from cluster.types.media import MediaOptions, Modality
from cluster.types.request import SamplingParams
from router.calls import ChatCall, MediaRules, StopRules
from router.prompts.intake import ByteLimits, MediaBytes, MediaIntake, MediaTooLargeError

PICTURE, OTHER = image(30, 20), image(31, 20)
LIMITS = ByteLimits(per_request=4 * len(PICTURE), per_door=8 * len(PICTURE))


class FakeFetcher:
    """Reads data URIs, each time into new bytes."""

    def __init__(self):
        self.num_bytes_made = 0

    async def read(self, source, max_bytes, *, item_idx, tenant):
        with naming(source.modality, item_idx, source.param):
            data = read_data_uri(source.url, max_bytes)
        return FetchedMedia(data, hashlib.sha256(data).digest())

    async def aclose(self):
        pass


class FakeSurveyors:
    """Each look takes as long as a test says, of the request's time."""

    def __init__(self, took_s: float = 0.0):
        self.num_looks = 0
        self.took_s = took_s
        self.gate = asyncio.Event()
        self.gate.set()

    async def survey(self, tenant, order, data, time):
        bounded = time.bound(order)
        self.num_looks += 1
        await self.gate.wait()
        time.left_s -= min(self.took_s, bounded.timeout_s)
        if self.took_s > bounded.timeout_s:
            raise MediaError("takes longer")
        if data == b"bad":
            raise MediaError("not an image")
        return Surveyed(MediaSurvey(30, 20))

    def close(self):
        pass


class FakeProcessor:
    settings = MediaSettings(MediaLimits(max_request_decode_s=10.0))


class Intake:
    def __init__(self, took_s: float = 0.0):
        self.surveyors = FakeSurveyors(took_s)
        self.intake = MediaIntake(FakeFetcher(), self.surveyors, FakeProcessor(), LIMITS, SystemClock())  # pyright: ignore

    async def take_in(self, *contents: bytes, tenant: str = "", omits_bad: bool = False):
        media = tuple(
            MediaSource(
                Modality.IMAGE,
                "data:;base64," + base64.b64encode(data).decode(),
                f"messages[0].content[{idx}]",
                MediaOptions(),
            )
            for idx, data in enumerate(contents)
        )
        return await self.intake.take_in(
            ChatCall(
                model="m",
                messages=(),
                media=media,
                sampling=(SamplingParams(),),
                stop=StopRules(1, (), ()),
                media_rules=MediaRules(omits_bad=omits_bad),
                tenant=tenant,
            )
        )


async def test_equal_items_are_held_and_opened_once():
    made = Intake()
    media = await made.take_in(*[PICTURE, OTHER] * 32)
    assert len(media.contents) == 64 and made.surveyors.num_looks == 2
    contents: list[Any] = list(media.contents)
    assert len({id(content.fetched.data) for content in contents}) == 2
    assert made.intake.num_held_bytes == len(PICTURE) + len(OTHER)
    media.release()
    media.release()
    assert made.intake.num_held_bytes == 0


async def test_a_request_of_too_many_bytes_is_refused_with_the_limit_and_nothing_is_held():
    made, pictures = Intake(), [image(30, 20 + idx) for idx in range(8)]
    with pytest.raises(MediaTooLargeError, match=f"more than {LIMITS.per_request} bytes") as refused:
        await made.take_in(*pictures, omits_bad=True)
    sums = list(accumulate(map(len, pictures)))
    first_beyond = next(idx for idx, total in enumerate(sums) if total > LIMITS.per_request)
    assert refused.value.status == 413 and refused.value.param == f"messages[0].content[{first_beyond}]"
    assert made.intake.num_held_bytes == 0


async def test_requests_in_work_hold_no_more_than_a_tenant_and_the_door_may():
    made = Intake()
    held = [await made.take_in(image(30, 20, "PNG"), tenant="a") for _ in range(4)]
    with pytest.raises(OverloadedError, match=f"a tenant holds at most {LIMITS.per_tenant}") as refused:
        await made.take_in(PICTURE, tenant="a")
    assert refused.value.retry_after_s
    held += [await made.take_in(PICTURE, tenant="b") for _ in range(4)]
    with pytest.raises(OverloadedError, match=f"a door holds at most {LIMITS.per_door}"):
        await made.take_in(PICTURE, tenant="c")
    for media in held:
        media.release()
    (await made.take_in(PICTURE, tenant="a")).release()
    assert made.intake.num_held_bytes == 0


def test_a_tenant_that_holds_no_bytes_is_forgotten():
    held = MediaBytes(LIMITS)
    for num_bytes in (3, 4):
        held.hold("a", num_bytes)
    held.free("a", 3)
    assert held.by_tenant == {"a": 4}
    held.free("a", 4)
    assert not held.by_tenant


async def test_who_leaves_while_its_media_is_opened_holds_nothing():
    made = Intake()
    made.surveyors.gate.clear()
    task = asyncio.ensure_future(made.take_in(PICTURE))
    while not made.surveyors.num_looks:
        await asyncio.sleep(0)
    assert made.intake.num_held_bytes == len(PICTURE)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and made.intake.num_held_bytes == 0


async def test_a_bad_item_ends_the_request_by_name_or_is_left_out():
    made = Intake()
    for bad, reason in ((b"bad", "not an image"), (b"", "empty")):
        with pytest.raises(MediaError, match=rf"item 1 \(image\): {reason}") as refused:
            await made.take_in(PICTURE, bad)
        assert refused.value.param == "messages[0].content[1]"
    assert made.intake.num_held_bytes == 0
    media = await made.take_in(PICTURE, b"bad", OTHER, omits_bad=True)
    assert [isinstance(content, MediaError) for content in media.contents] == [False, True, False]
    media.release()


async def test_all_items_of_a_request_share_ten_seconds_of_decoding():
    made = Intake(took_s=4.0)
    pictures = [image(20 + idx, 9) for idx in range(5)]
    media = await made.take_in(*pictures, omits_bad=True)
    assert [isinstance(content, MediaError) for content in media.contents] == [False, False, True, True, True]
    assert made.surveyors.num_looks == 3
    media.release()
