import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder_service.runner import pool_rows

side = st.integers(1, 5)


@given(side, side, side, st.integers(1, 4), st.integers(1, 4))
def test_every_row_is_the_mean_of_its_group(t, h, w, temporal, spatial):
    rows = torch.arange(t * h * w * 2, dtype=torch.float32).view(-1, 2) ** 2
    volume = rows.view(t, h, w, 2)
    expected = [
        volume[a : a + temporal, b : b + spatial, c : c + spatial].reshape(-1, 2).mean(0)
        for a, b, c in itertools.product(range(0, t, temporal), range(0, h, spatial), range(0, w, spatial))
    ]
    torch.testing.assert_close(pool_rows(rows, (t, h, w), temporal, spatial), torch.stack(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_means_are_taken_in_float32_and_rounded_once(dtype):
    rows = torch.tensor([[256.0], [1.0], [1.0], [1.0]], dtype=dtype)
    assert pool_rows(rows, (4, 1, 1), 4, 1).item() == torch.tensor(64.75).to(dtype).item()
