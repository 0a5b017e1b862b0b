from __future__ import annotations

import pytest

from kv_transfer.lease.link_meter import MAX_GAP_S, LinkMeter

MIB = 1 << 20
FAST = 134e9  # bytes a second, of a link on an H100


def looked_at_until(link: LinkMeter, end: float, every: float = 0.001) -> None:
    link.pending(end - every)
    link.arrived(end)


def test_a_link_is_measured_over_the_time_in_which_anything_is_on_its_way():
    link = LinkMeter()
    link.posted(MIB, 10.0, 10.0)
    link.posted(MIB, 10.25, 10.25)
    looked_at_until(link, 10.5)
    assert link.bytes_per_s is None
    looked_at_until(link, 11.0)
    assert link.bytes_per_s == 2 * MIB
    link.posted(100, 20.0, 20.0)
    looked_at_until(link, 20.25)
    assert link.bytes_per_s == 2 * MIB, "too little to say anything"
    link.posted(MIB, 40.0, 40.0)
    looked_at_until(link, 45.0, every=0.0)
    expected = MIB / (0.75 * 0.5 + 0.25 * (5.0 - 0.25))
    slowed = link.bytes_per_s
    assert slowed == pytest.approx(expected, rel=1e-4), "ten times slower shows with one measurement"
    link.posted(MIB, 50.0, 50.0)
    link.posted(MIB, 50.0, 50.0)
    link.cancelled()
    looked_at_until(link, 90.0)
    assert link.bytes_per_s == slowed


def test_small_writes_measure_the_latency_alone():
    link = LinkMeter()
    link.posted(100, 1.0, 1.0)
    looked_at_until(link, 1.5)
    assert link.bytes_per_s is None and link.latency_s == 0.5
    link.posted(MIB, 2.0, 2.0)
    looked_at_until(link, 3.0)
    link.posted(1 << 17, 4.0, 4.0)
    looked_at_until(link, 4.25, every=0.0)
    expected = 0.75 * 0.5 + 0.25 * (0.25 - (1 << 17) / (2 * MIB))
    assert link.latency_s == pytest.approx(expected), "what its bytes take is not part of it"
    link.posted(100, 5.0, 5.0)
    link.posted(100, 5.0, 5.0)
    link.cancelled()
    looked_at_until(link, 50.0)
    assert link.latency_s == pytest.approx(expected)


def test_writes_that_take_hardly_longer_than_small_ones_do_not_make_a_link_slow():
    """0.5 MB over a link of 134 GB/s, where every write takes half a millisecond."""
    link, fixed_s, num_bytes = LinkMeter(), 0.0005, MIB // 2
    for start in range(1, 20):
        link.posted(100, start, start)
        link.arrived(start + fixed_s)
        link.posted(num_bytes, start + 0.5, start + 0.5)
        link.arrived(start + 0.5 + fixed_s + num_bytes / FAST)
    assert link.bytes_per_s is None, "it is fast, and nothing shows how fast"
    link.posted(128 * MIB, 30.0, 30.0)
    link.arrived(30.0 + fixed_s + 128 * MIB / FAST)
    assert link.bytes_per_s == pytest.approx(FAST, rel=0.01)
    link.posted(num_bytes, 31.0, 31.0)
    link.arrived(31.0 + fixed_s + num_bytes / FAST)
    assert link.bytes_per_s == pytest.approx(FAST, rel=0.01)


def test_a_write_that_takes_hardly_longer_than_small_ones_proves_a_least_speed():
    link = LinkMeter()
    link.posted(MIB, 1.0, 1.0)
    looked_at_until(link, 2.0)
    link.posted(100, 3.0, 3.0)
    looked_at_until(link, 3.25)
    link.posted(16 * MIB, 4.0, 4.0)
    looked_at_until(link, 4.3, every=0.0)
    assert link.bytes_per_s == pytest.approx(16 * MIB / 0.3)


def measured(num_bytes: int = 128 * MIB) -> LinkMeter:
    link = LinkMeter()
    link.posted(num_bytes, 1.0, 1.0)
    link.arrived(1.0 + num_bytes / FAST)
    assert link.bytes_per_s == pytest.approx(FAST)
    return link


@pytest.mark.parametrize("num_bytes", [100, 128 * MIB])
def test_a_thread_that_comes_back_late_says_nothing_about_the_link(num_bytes):
    link = measured()
    link.latency_s = 0.0005
    for start in range(2, 20):
        link.posted(num_bytes, start, start + 0.0001)
        link.arrived(start + 0.45)
    assert link.bytes_per_s == pytest.approx(FAST) and link.latency_s == 0.0005


def test_a_write_that_was_seen_in_flight_proves_a_slower_link():
    link = measured()
    link.posted(128 * MIB, 2.0, 2.0)
    link.pending(2.1)
    link.arrived(2.55)
    expected = 128 * MIB / (0.75 * 128 * MIB / FAST + 0.25 * 0.1)
    assert link.bytes_per_s == pytest.approx(expected), "as slow as was seen, not as the thread was late"


def test_an_unknown_link_is_not_measured_by_a_thread_that_was_late():
    link = LinkMeter()
    for num_bytes in (100, MIB):
        link.posted(num_bytes, 1.0, 1.0)
        link.arrived(1.0 + 2 * MAX_GAP_S)
    assert link.bytes_per_s is None and link.latency_s == 0
    link.posted(MIB, 2.0, 2.0)
    link.arrived(2.0 + MAX_GAP_S / 2)
    assert link.bytes_per_s == pytest.approx(MIB / (MAX_GAP_S / 2))


def test_what_is_copied_inside_the_post_is_measured_by_it():
    link = LinkMeter()
    link.posted(MIB, 1.0, 1.5)
    link.arrived(1.5)
    assert link.bytes_per_s == 2 * MIB


def test_where_the_transport_tells_the_end_it_counts():
    link = LinkMeter()
    link.posted(MIB, 1.0, 1.0)
    link.arrived(2.0, ended_at=1.25)
    assert link.bytes_per_s == 4 * MIB
