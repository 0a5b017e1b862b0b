"""Doors count an encoder's calls as encoders form them."""

import pytest

from cluster.scheduling.encoder_calls import num_calls, rows_of_a_call
from cluster.scheduling.keys import Ticket, order_key
from cluster.types.media import Modality
from encoder_service.scheduler import CallLimits, Candidate, select_batch
from tests.fakes.placement import SCHEDULING

MAX_ROWS = 4096


@pytest.mark.parametrize("fixed_s", [1e-4, 3e-3, 3e-2])
@pytest.mark.parametrize("num_items", [1, 4, 12, 40])
@pytest.mark.parametrize("item_rows", [64, 400, 1000])
def test_as_many_calls_are_counted_as_are_formed(fixed_s, num_items, item_rows):
    row_s, num_formed = 14e-6, 0
    limits = CallLimits(
        1000, MAX_ROWS, 1 << 40, lambda _, num_ready: float(rows_of_a_call(num_ready, fixed_s, row_s))
    )
    order = order_key(Ticket("all", 0.0, 1, False), SCHEDULING)
    ready = [Candidate(f"{idx}", order, Modality.IMAGE, item_rows, 1) for idx in range(num_items)]
    while ready:
        ready = ready[len(select_batch(ready, limits, 0)) :]
        num_formed += 1
    counted = num_calls(num_items * item_rows, item_rows, MAX_ROWS, fixed_s, row_s)
    assert counted == pytest.approx(num_formed, rel=0.35, abs=1.0)
