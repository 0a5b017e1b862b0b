"""Items that processes of their own preprocess."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from bench import DEMO_MODEL
from cluster.errors import MediaError, NotWantedError, RequestError, UnavailableError
from cluster.media.preprocessor import Preprocessed, read_tensors, write_tensors
from cluster.media.preprocessors import Preprocessors, preprocessor_server
from cluster.media.processes import ProcessServer
from cluster.media.processor import MediaProcessor
from cluster.media.program import memory_file
from cluster.types.media import MediaOptions, Modality
from tests.fakes import unruly_preprocessor as unruly

PLAIN = MediaOptions()
RANDOM = np.random.default_rng(0)
ARRAYS = {
    Modality.IMAGE: RANDOM.integers(0, 255, (100, 60, 3), np.uint8),
    Modality.VIDEO: RANDOM.integers(0, 255, (4, 64, 96, 3), np.uint8),
    Modality.AUDIO: RANDOM.standard_normal(20_000).astype(np.float32),
}


@pytest.fixture(scope="module")
def processor() -> MediaProcessor:
    loaded = MediaProcessor.load(DEMO_MODEL)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="module")
def served() -> Iterator[Preprocessors]:
    preprocessors = Preprocessors(preprocessor_server(DEMO_MODEL), 1, 60.0)
    yield preprocessors
    preprocessors.close()


@pytest.mark.parametrize("modality", ARRAYS)
def test_a_process_gives_the_same_bits_as_this_one(processor, served, modality):
    expected = processor.begin(modality, ARRAYS[modality], PLAIN)
    got = served.begin(modality, ARRAYS[modality], PLAIN)
    assert list(got) == list(expected)
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


@pytest.mark.parametrize(
    ("modality", "options"),
    [
        (Modality.IMAGE, MediaOptions(min_pixels=1 << 40)),
        (Modality.IMAGE, MediaOptions(min_pixels=500, max_pixels=400)),
        (Modality.AUDIO, MediaOptions(max_pixels=400)),
    ],
)
def test_a_refusal_is_the_one_of_this_process(processor, served, modality, options):
    with pytest.raises(RequestError) as expected:
        processor.begin(modality, ARRAYS[modality], options)
    with pytest.raises(expected.type) as got:
        served.begin(modality, ARRAYS[modality], options)
    assert (str(got.value), got.value.param) == (str(expected.value), expected.value.param)


def test_tensors_of_every_kind_arrive():
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "mask": torch.tensor([True, False, True]),
        "none": torch.empty(0, 4),
        "number": torch.tensor(7),
        "view": torch.arange(12).reshape(3, 4).T,
    }
    result = memory_file()
    try:
        answer = write_tensors(tensors, result)
        content = torch.frombuffer(bytearray(os.pread(result, answer.num_bytes, 0)), dtype=torch.uint8)
    finally:
        os.close(result)
    got = read_tensors(answer, content)
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name


class Unruly:
    def __init__(self, folder: os.PathLike[str]):
        self.server = ProcessServer(Preprocessed, "tests.fakes.unruly_preprocessor", [str(folder)])
        self.preprocessors = Preprocessors(self.server, 2, 60.0)

    def prepare(self, kind: int, **wanted) -> dict[str, torch.Tensor]:
        array = np.full((1, 1, 3), kind, np.uint8)
        return dict(self.preprocessors.begin(Modality.IMAGE, array, PLAIN, **wanted))


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Iterator[Unruly]:
    """Their server takes seconds to import what they need. The last test closes them."""
    made = Unruly(tmp_path_factory.mktemp("unruly"))
    yield made
    made.preprocessors.close()


def test_processes_work_at_once(two):
    with ThreadPoolExecutor(2) as threads:
        met = [result["met"].item() for result in threads.map(two.prepare, [unruly.MEET] * 2)]
    assert met == [2, 2]


def test_a_process_that_dies_costs_its_item_a_second_try_and_then_the_item(two):
    assert two.prepare(unruly.CRASH_ONCE)["pid"] > 0
    with pytest.raises(MediaError, match="dies"):
        two.prepare(unruly.CRASH)
    assert two.prepare(unruly.GOOD)["pid"] > 0


def test_an_item_that_is_not_wanted_or_takes_too_long_costs_its_process(two):
    before = two.prepare(unruly.GOOD)["pid"]
    with pytest.raises(NotWantedError):
        two.prepare(unruly.HANG, is_wanted=lambda: False)
    hurried = Preprocessors(two.server, 1, 0.1)
    with pytest.raises(MediaError, match="longer than"):
        hurried.begin(Modality.IMAGE, np.full((1, 1, 3), unruly.HANG, np.uint8), PLAIN)
    assert before > 0 and two.prepare(unruly.GOOD)["pid"] > 0


def test_a_large_result_stays_where_it_is_and_the_next_one_does_not_touch_it(two):
    large = two.prepare(unruly.LARGE)["large"]
    for _ in range(3):
        two.prepare(unruly.GOOD)
        two.prepare(unruly.LARGE)
    assert torch.equal(large, torch.arange(unruly.NUM_LARGE, dtype=torch.float32))


def test_a_refusal_keeps_the_process(two):
    pids = set()
    for _ in range(4):
        with pytest.raises(MediaError, match="refused"):
            two.prepare(unruly.REFUSE)
        pids.add(two.prepare(unruly.GOOD)["pid"].item())
    assert len(pids) == 1


def test_when_it_is_closed_processes_end_and_items_are_refused(two):
    handle = os.pidfd_open(int(two.prepare(unruly.GOOD)["pid"]))
    two.preprocessors.close()
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    assert poll.poll(60_000)
    os.close(handle)
    with pytest.raises(UnavailableError):
        two.prepare(unruly.GOOD)
