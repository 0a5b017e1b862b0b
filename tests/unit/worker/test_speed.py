"""What a worker tells its doors of its own speed."""

from __future__ import annotations

import pytest

from cluster.scheduling.fit import StepFit
from cluster.types.curves import Link
from cluster.types.media import Modality
from cluster.types.messages import ChannelMessage, LoadReport, Measured
from cluster.worker.outbox import Outbox
from cluster.worker.speed import PAUSE_S, SpeedReporter
from tests.fakes.clock import ManualClock


class Worker:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.links: dict[str, Link] = {}
        self.prefill = StepFit(512, 512)
        self.encode = {modality: StepFit(512, 1) for modality in Modality}
        self.told: list[tuple[int, ChannelMessage]] = []
        self.outbox = Outbox(self.told.extend)
        self.speed = SpeedReporter(
            self.outbox,
            self.clock,
            encode=self.encode,
            prefill=self.prefill,
            max_step_units=512,
            links=lambda: self.links,
        )

    def step(self, after_s: float = PAUSE_S) -> list[Measured]:
        """What door 1 is told of it."""
        self.clock.at += after_s
        self.speed.report()
        self.told.clear()
        self.outbox.flush(LoadReport())
        return [message for door, message in self.told if door == 1 and isinstance(message, Measured)]


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_a_door_that_connects_is_told_what_was_measured_at_start(worker: Worker):
    worker.prefill.observe(16, 0, 0.1)
    worker.outbox.add_door(1)
    (measured,) = worker.step(after_s=0)[:1]
    assert measured.curves.prefill == worker.prefill.curve()
    assert measured.curves.max_step_units == 512
    assert measured.curves.encode == {} and measured.curves.decode is None, "nothing is known of these"


def test_what_has_not_changed_is_not_repeated(worker: Worker):
    worker.prefill.observe(16, 0, 0.1)
    worker.outbox.add_door(1)
    worker.step()
    for _ in range(5):
        worker.prefill.observe(16, 0, 0.1)
        assert worker.step() == []


def test_a_step_that_lasts_longer_is_told_but_at_most_once_a_second(worker: Worker):
    worker.outbox.add_door(1)
    worker.prefill.observe(16, 0, 0.1)
    worker.step()
    messages = []
    for _ in range(50):
        worker.prefill.observe(16, 0, 0.2)
        messages += worker.step(after_s=0.1 * PAUSE_S)
    assert 1 <= len(messages) <= 5
    curve = messages[-1].curves.prefill
    assert curve is not None and curve.seconds(16) == pytest.approx(0.2, rel=0.1)


def test_a_modality_is_told_when_its_first_item_has_been_seen(worker: Worker):
    worker.outbox.add_door(1)
    worker.step()
    worker.encode[Modality.AUDIO].observe(100, 0, 0.3)
    (measured,) = worker.step()
    assert measured.curves.encode == {Modality.AUDIO: worker.encode[Modality.AUDIO].curve()}


def test_all_doors_know_the_same(worker: Worker):
    """Else news would be news to some of them only."""
    worker.prefill.observe(16, 0, 0.1)
    worker.outbox.add_door(1)
    (first,) = worker.step()[:1]
    worker.prefill.observe(16, 0, 0.105)
    worker.outbox.add_door(2)
    assert worker.step() == []
    assert (2, first) in worker.told


def test_links_come_with_their_mean_and_are_told_when_they_change(worker: Worker):
    worker.outbox.add_door(1)
    worker.step()
    worker.links = {"d0": Link(0.001, 1e9), "d1": Link(0.003, 4e9)}
    (measured,) = worker.step()
    mean = measured.curves.links[""]
    assert mean.latency_s == pytest.approx(0.002) and mean.bytes_per_s == pytest.approx(1.6e9)
    assert worker.step() == []
    worker.links = {"d0": Link(0.001, 1e9)}
    assert set(worker.step()[0].curves.links) == {"d0", ""}
    worker.links = {"d0": Link(0.001, 2e8)}
    assert worker.step()[0].curves.links["d0"].bytes_per_s == 2e8


def test_short_steps_look_at_the_links_ten_times_a_second_and_tell_what_is_new() -> None:
    clock, told = ManualClock(), []
    num_looks, links = 0, {"decode": Link(0.0, 1e9)}

    def looked_at() -> dict[str, Link]:
        nonlocal num_looks
        num_looks += 1
        return links

    outbox = Outbox(lambda batch: told.extend(message for _, message in batch))
    reporter = SpeedReporter(outbox, clock, links=looked_at)
    outbox.add_door(1)
    for _ in range(3000):  # steps of a millisecond
        reporter.report()
        outbox.flush(None)
        clock.at += 0.001
    assert num_looks < 40
    links["decode"] = Link(0.0, 1e8)
    for _ in range(110):
        reporter.report()
        outbox.flush(None)
        clock.at += 0.001
    assert told[-1].curves.links["decode"] == Link(0.0, 1e8)
