import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.types.media import Modality
from encoder_service.calls import EncoderFits
from encoder_service.scheduler import CallLimits, Candidate, select_batch, units_per_call

IMAGE, VIDEO = Modality.IMAGE, Modality.VIDEO
PLENTY = 10_000


def candidate(name: str, rows: int, modality: Modality = IMAGE, order: float = 0.0, **more) -> Candidate:
    return Candidate(name, (order, 0.0), modality, rows, 10 * rows, **more)


def names(ready, max_items=8, max_rows=1000, max_bytes=PLENTY, room=PLENTY) -> list[str]:
    chosen = select_batch(ready, CallLimits(max_items, max_rows, max_bytes), room)
    return [c.media_hash for c in chosen]


def test_the_most_urgent_item_chooses_the_modality():
    ready = [candidate("w", 64, VIDEO, 2), candidate("i", 16, IMAGE, 1), candidate("v", 64, VIDEO, 0)]
    assert names(ready) == ["v", "w"]


def test_rows_items_and_bytes_bound_a_batch():
    ready = [candidate(str(i), 16) for i in range(10)]
    assert len(names(ready, max_rows=50)) == 3
    assert len(names(ready)) == 8
    assert len(names(ready, max_bytes=330)) == 2


def test_an_item_larger_than_the_budgets_runs_alone():
    ready = [candidate("big", 5000), candidate("next", 10, order=1)]
    assert names(ready) == ["big"] == names(ready, max_rows=PLENTY, max_bytes=1)


def test_an_item_that_runs_alone_joins_no_batch_and_no_item_joins_it():
    alone = candidate("alone", 1, order=1, runs_alone=True)
    first, last = candidate("first", 1), candidate("last", 1, order=2)
    assert names([first, alone, last]) == ["first"]
    assert names([alone, last]) == ["alone"]


def test_behind_an_item_without_room_no_item_gets_any_and_items_with_room_run():
    ready = [
        candidate("large", 4, num_blocks=5),
        candidate("small", 4, order=1, num_blocks=1),
        candidate("begun", 4, order=2),
    ]
    assert names(ready, room=4) == ["begun"]
    assert names(ready, room=5) == ["large", "begun"]


def test_nothing_ready_is_an_empty_batch():
    assert names([]) == []


sizes = st.integers(1, 500)


@given(
    st.lists(
        st.tuples(sizes, st.integers(0, 5), st.booleans(), st.sampled_from([IMAGE, VIDEO])), max_size=12
    ),
    sizes,
)
def test_every_batch_keeps_its_limits_and_has_the_most_urgent_item_with_room(items, room):
    ready = [
        Candidate(str(i), (order, i), modality, rows, rows, rows % 7, alone)
        for i, (rows, order, alone, modality) in enumerate(items)
    ]
    batch = select_batch(ready, CallLimits(4, 600, 700), room)
    assert len({c.modality for c in batch}) <= 1 and len(batch) <= 4
    assert sum(c.num_blocks for c in batch) <= room
    if len(batch) > 1:
        assert sum(c.num_rows for c in batch) <= 600 and not any(c.runs_alone for c in batch)
    runnable = [c for c in ready if c.num_blocks <= room]
    first = min(ready, key=lambda c: c.order, default=None)
    assert bool(batch) or not any(c.num_blocks == 0 for c in runnable)
    if first in runnable:
        assert batch[0] is first


def test_an_item_within_the_limits_is_one_call():
    assert units_per_call(8, 64, 640, max_rows=64, max_bytes=640) == 8


def test_pieces_are_as_large_as_the_tighter_limit_allows_and_never_cut_a_pooled_group():
    assert units_per_call(8, 64, 640, max_rows=30, max_bytes=PLENTY) == 3
    assert units_per_call(8, 64, 640, max_rows=PLENTY, max_bytes=170) == 2
    assert units_per_call(8, 64, 640, max_rows=30, max_bytes=PLENTY, multiple=2) == 2
    assert units_per_call(8, 64, 640, max_rows=1, max_bytes=PLENTY, multiple=3) == 3
    assert units_per_call(1, 64, 640, max_rows=1, max_bytes=1) == 1


def mean_end_s(num_items: int, rows: int, limit: CallLimits, seconds) -> float:
    """Of equal items that are ready together, on a device whose calls take `seconds(rows)`."""
    left, now, ends = [candidate(str(i), rows, order=i) for i in range(num_items)], 0.0, []
    while left:
        batch = select_batch(left, limit, PLENTY)
        now += seconds(sum(c.num_rows for c in batch))
        ends += [now] * len(batch)
        left = left[len(batch) :]
    return sum(ends) / num_items


@pytest.mark.parametrize("num_items", [2, 5, 16, 64])
@pytest.mark.parametrize(("fixed_s", "per_row_s"), [(0.0, 1e-3), (2.5e-3, 1.3e-4), (8e-3, 1e-6), (0.1, 1e-4)])
def test_a_batch_is_as_large_as_makes_items_ready_soonest_on_average(num_items, fixed_s, per_row_s):
    def seconds(rows: float) -> float:
        return fixed_s + per_row_s * rows

    fits, rows = EncoderFits(16_384), 64
    for observed in (4, 64, 16, 256):
        fits.encode[IMAGE].observe(observed, 0.0, seconds(observed))
    by_fit = CallLimits(1000, 1 << 20, 1 << 30, fits.rows_of_a_batch)
    fixed = [CallLimits(items, 1 << 20, 1 << 30) for items in range(1, num_items + 1)]
    best_s = min(mean_end_s(num_items, rows, limit, seconds) for limit in fixed)
    assert mean_end_s(num_items, rows, by_fit, seconds) <= 1.1 * best_s


def test_before_a_call_was_measured_limits_alone_bound_a_batch_and_pieces_are_not_enlarged():
    fits = EncoderFits(16_384)
    assert fits.rows_of_a_batch(IMAGE, 100) == math.inf and fits.rows_within(IMAGE, 1.0) == 0


def test_rows_within_a_time_follow_from_the_fit():
    fits = EncoderFits(16_384)
    for rows in (64, 1024) * 20:
        fits.encode[VIDEO].observe(rows, 0.0, 0.01 + 1e-5 * rows)
    assert fits.rows_within(VIDEO, 0.05) == pytest.approx(4000, rel=0.05)
    assert fits.rows_within(VIDEO, 0.001) == 0
