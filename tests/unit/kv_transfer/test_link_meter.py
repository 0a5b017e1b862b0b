from __future__ import annotations

import pytest

from kv_transfer.lease.link_meter import LinkMeter


def test_a_link_is_measured_over_the_time_in_which_anything_is_on_its_way():
    link = LinkMeter()
    link.posted(1 << 20, at=10.0)
    link.posted(1 << 20, at=10.25)
    link.arrived(10.5)
    assert link.bytes_per_s is None
    link.arrived(11.0)
    assert link.bytes_per_s == 2 << 20
    link.posted(100, at=20.0)
    link.arrived(30.0)
    assert link.bytes_per_s == 2 << 20, "too little to say anything"
    link.posted(1 << 20, at=40.0)
    link.arrived(45.0)
    expected = (1 << 20) / (0.75 * 0.5 + 0.25 * 5.0)
    assert link.bytes_per_s == pytest.approx(expected), "ten times slower shows with one measurement"
    link.posted(1 << 20, at=50.0)
    link.posted(1 << 20, at=50.0)
    link.cancelled()
    link.arrived(90.0)
    assert link.bytes_per_s == pytest.approx(expected)


def test_small_writes_measure_the_latency_alone():
    link = LinkMeter()
    link.posted(100, at=1.0)
    link.arrived(1.5)
    assert link.bytes_per_s is None and link.latency_s == 0.5
    link.posted(1 << 20, at=2.0)
    link.arrived(3.0)
    link.posted(1 << 17, at=4.0)
    link.arrived(4.25)
    expected = 0.75 * 0.5 + 0.25 * (0.25 - (1 << 17) / (1 << 20))
    assert link.latency_s == pytest.approx(expected), "what its bytes take is not part of it"
    link.posted(100, at=5.0)
    link.posted(100, at=5.0)
    link.cancelled()
    link.arrived(50.0)
    assert link.latency_s == pytest.approx(expected)
