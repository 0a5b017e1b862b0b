"""`python -m bench.transfer hidden` replaces parts of the services, so it is run once against them as they
are."""

from __future__ import annotations

import pytest

from bench.transfer.hidden import MODES, measure
from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from tests.flow.test_law import cluster_args


@pytest.mark.slow
async def test_every_mode_is_measured():
    args = resolve(cluster_args(64), read_environment(), num_cores=1)
    records = await measure(args, [64], [1.0], repeats=1)
    assert [record["mode"] for record in records] == list(MODES)
    assert all(record["bytes"] and record["second_token_s"] > record["ttft_s"] > 0 for record in records)
