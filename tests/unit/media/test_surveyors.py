"""Files are opened in other processes: what these do to each other, to their callers and to the door, which
is nothing."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest

from bench.trusted_media import probe
from cluster.errors import MediaError, UnavailableError
from cluster.media.opener import Surveyed, SurveyOrder, Written
from cluster.media.openers import opener_pool
from cluster.media.processes import ProcessEndedError, ProcessPool
from cluster.media.program import open_memory_file
from cluster.media.settings import MediaSettings
from cluster.media.survey import MediaSurvey, probe_of
from cluster.media.surveyors import DecodeTime, SurveyorPool, _read
from cluster.types.media import FrameStrategy, MediaOptions, Modality
from tests.unit.media import files

SETTINGS = MediaSettings()
PLAIN = MediaOptions()


def order_of(modality: Modality, options: MediaOptions = PLAIN, **fields) -> SurveyOrder:
    return SurveyOrder(modality, options, SETTINGS, timeout_s=60.0, **fields)


class FakeOpener:
    """Answers when, and with what, a test says."""

    is_filtered = True
    has_ended = False

    def __init__(self):
        self.orders: list[SurveyOrder] = []
        self.answer: asyncio.Future = asyncio.get_running_loop().create_future()
        self.is_closed = False

    async def ask(self, order, file, wait, read):
        assert not self.is_closed
        self.orders.append(order)
        answer, self.answer = await self.answer, asyncio.get_running_loop().create_future()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self):
        self.answer.set_result(ProcessEndedError())

    def close(self):
        self.is_closed = True


class Pool:
    def __init__(self):
        self.processes: list[FakeOpener] = []
        self.pool = SurveyorPool(ProcessPool(self._start))  # pyright: ignore

    def _start(self) -> FakeOpener:
        self.processes.append(FakeOpener())
        return self.processes[-1]

    async def look(
        self, modality: Modality, tenant: str = "", left_s: float = 60.0, **fields
    ) -> asyncio.Task:
        task = asyncio.ensure_future(
            self.pool.survey(tenant, order_of(modality, **fields), b"", DecodeTime(left_s))
        )
        for _ in range(10):
            await asyncio.sleep(0)
        return task

    @property
    def num_alive(self) -> int:
        return sum(not process.is_closed for process in self.processes)


ANSWER = Surveyed(MediaSurvey(3, 4))


async def test_long_looks_leave_a_process_to_other_tenants_and_one_to_the_headers_of_images():
    made = Pool()
    long = [await made.look(Modality.VIDEO, "a") for _ in range(4)]
    assert len(made.processes) == 2, "a tenant has two at once"
    long.append(await made.look(Modality.AUDIO, "b"))
    long.append(await made.look(Modality.IMAGE, "c", decodes=True))
    assert len(made.processes) == 3, "three are long"
    image = await made.look(Modality.IMAGE, "a")
    assert len(made.processes) == 4
    made.processes[3].answer.set_result(ANSWER)
    assert await image is ANSWER
    for task in long:
        task.cancel()
    await asyncio.wait(long)
    assert made.pool.num_busy == 0 and made.num_alive == 4 and len(made.processes) == 7, "those are replaced"


async def test_a_look_that_is_not_wanted_any_more_ends_its_process_at_once():
    made = Pool()
    task = await made.look(Modality.VIDEO)
    task.cancel()
    await asyncio.wait([task])
    assert made.processes[0].is_closed and made.pool.num_busy == 0
    again = await made.look(Modality.VIDEO)
    made.processes[1].answer.set_result(ANSWER)
    assert await again is ANSWER


async def test_a_file_whose_process_dies_is_tried_once_more_and_then_refused():
    made = Pool()
    made.pool.warm_up()
    made.processes[0].answer.set_result(ProcessEndedError())
    task = await made.look(Modality.IMAGE)
    made.processes[1].answer.set_result(ANSWER)
    assert await task is ANSWER
    made.processes[1].answer.set_result(ProcessEndedError())
    task = await made.look(Modality.IMAGE)
    made.processes[2].answer.set_result(ProcessEndedError())
    with pytest.raises(MediaError, match="the process that works on it dies"):
        await task
    assert made.pool.num_busy == 0


async def test_the_looks_of_a_request_share_its_time():
    made = Pool()
    task = await made.look(Modality.VIDEO, left_s=5.0)
    assert made.processes[0].orders[0].timeout_s == 5.0
    made.processes[0].answer.set_result(TimeoutError())
    with pytest.raises(MediaError, match="longer than 5 seconds"):
        await task
    assert made.processes[0].is_closed
    with pytest.raises(MediaError, match="too long"):
        await made.pool.survey("", order_of(Modality.VIDEO), b"", DecodeTime(0.0))


async def test_a_pool_that_is_closed_ends_its_processes_and_starts_none():
    made = Pool()
    made.pool.warm_up()
    task = await made.look(Modality.VIDEO)
    made.pool.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        await task
    assert made.num_alive == 0


@pytest.fixture
def openers():
    return opener_pool()


@pytest.fixture
def pool(openers):
    pool = SurveyorPool(openers)
    yield pool
    pool.close()


async def survey(
    pool: SurveyorPool, modality: Modality, data: bytes, options: MediaOptions = PLAIN, **fields
):
    return await pool.survey("", order_of(modality, options, **fields), data, DecodeTime(60.0))


async def test_another_process_finds_what_this_one_does(pool):
    scenes = MediaOptions(strategy=FrameStrategy.SCENES, audio_in_video=True)
    clip = files.video_of(files.scenes(5, 9, 6), sound_s=1.0)
    for modality, data, options in [
        (Modality.IMAGE, files.rotated_jpeg(30, 20), PLAIN),
        (Modality.IMAGE, files.image(1500, 1200), PLAIN),  # more than is copied at once
        (Modality.AUDIO, files.audio(0.7), PLAIN),
        (Modality.VIDEO, clip, scenes),
        (Modality.VIDEO, clip, MediaOptions(strategy=FrameStrategy.KEYFRAMES)),
    ]:
        found = await survey(pool, modality, data, options, decodes=True)
        assert probe_of(modality, found.survey, SETTINGS, options) == probe(modality, data, SETTINGS, options)
        assert (found.sound is not None) == options.audio_in_video


async def test_what_cannot_be_opened_is_a_media_error_and_the_process_goes_on(pool, openers):
    cut = files.image(96, 96, "JPEG")[:3000]
    for modality, data, fields in [
        (Modality.IMAGE, b"nothing", {}),
        (Modality.VIDEO, files.audio(0.1), {}),
        (Modality.IMAGE, b"", {}),
        (Modality.IMAGE, cut, {"decodes": True}),
    ]:
        with pytest.raises(MediaError):
            await survey(pool, modality, data, **fields)
    (opener,) = openers.idle
    assert not opener.has_ended


@pytest.mark.parametrize(
    ("modality", "lie"),
    [
        (Modality.IMAGE, MediaSurvey(10**5, 10**5)),
        (Modality.IMAGE, MediaSurvey(-3, -4)),
        (Modality.AUDIO, MediaSurvey(num_samples=10**12)),
        (Modality.VIDEO, MediaSurvey(30, 20, num_frames=10**9, source_fps=1e9)),
        (Modality.VIDEO, MediaSurvey(30, 20, num_frames=10, source_fps=float("nan"))),
        (Modality.VIDEO, MediaSurvey(30, 20, num_frames=10, source_fps=5.0, key_idx=(11,))),
    ],
)
def test_a_survey_that_no_file_can_have_is_not_believed(modality, lie):
    content = msgspec.msgpack.encode(Surveyed(lie))
    with open_memory_file() as result, pytest.raises(ValueError):
        os.write(result, content)
        _read(order_of(modality), Written((len(content),)), result)
