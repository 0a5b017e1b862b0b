"""How many rows an encoder call should have: encoders form calls by it, and doors predict by it.

In calls of r rows, each of `fixed + row · r` seconds, R rows are ready after
(R / r + 1) · (fixed + row · r) / 2 on average, which is least at r = √(R · fixed / row): where a call's fixed
part is small, items wait for no others, and under a backlog calls become large. As rows become fewer, calls
become smaller: R rows take about 2 · √(R · row / fixed) - 1 calls, of which the last one takes the last
fixed / row rows.

All functions take numbers or arrays; seconds and rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

LEAST_S = 1e-12  # of a part of a curve that says that it costs nothing


def rows_of_a_call(num_ready: Any, fixed_s: Any, row_s: Any) -> Any:
    """Rows of a call with which `num_ready` rows are encoded soonest on average."""
    return np.sqrt(num_ready * fixed_s / np.maximum(row_s, LEAST_S))


def num_calls(num_rows: Any, item_rows: Any, max_rows: Any, fixed_s: Any, row_s: Any) -> Any:
    """About how many calls so many rows take, in items of `item_rows`: at most one for each item, and as many
    as the largest call needs."""
    by_fit = 2 * np.sqrt(num_rows * row_s / np.maximum(fixed_s, LEAST_S)) - 1
    return np.maximum(np.ceil(num_rows / max_rows), np.minimum(num_rows / item_rows, by_fit))
