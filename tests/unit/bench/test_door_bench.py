"""The benchmark of doors: every token arrives once, with the lag of its own step."""

from __future__ import annotations

import asyncio
import time

import pytest

from bench.door.__main__ import OTHERS_STEP_S, beside, started, streams
from bench.door.clients import leave, read_stream
from tests.fakes.slow_params import often


@pytest.mark.parametrize("num_doors", often([1, 2], [1]))
async def test_every_token_of_every_stream_is_counted_with_its_lag(num_doors: int):
    async with started(num_doors, 0.5) as bench:
        lags = bench.lags()
        async with bench.stepping(bench.stub.run_ahead(lambda: len(lags.values))):
            await asyncio.gather(*(read_stream(next(bench.ports), 20, lags) for _ in range(3)))
        assert len(lags.values) == 60
        row = await streams(bench, 3, 120.0)
        assert row["tokens"] > 0 and row["lag_p99_ms"] > 0 and row["door_us_per_token"] > 0
        assert bench.stub.num_running == 0


async def test_streams_that_are_read_beside_others_begin_when_all_are_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bench.door.__main__.OTHERS_STEP_S", 1e-3)
    monkeypatch.setattr("bench.door.__main__.NUM_OTHERS", 30)
    async with started(1, 1e-3) as bench:  # so the others end four steps after the first one
        row = await beside(bench, "read")
        assert row["row"] == "16 streams beside 30 read" and row["lag_p99_ms"] > 0
        clients = [leave(next(bench.ports), 1000) for _ in range(3)]
        async with bench.reading(clients, 3):  # no step comes, so they are cancelled while they wait for one
            pass
        assert bench.stub.num_running == 0


async def test_a_lag_is_counted_from_the_step_that_the_text_names():
    async with started(0, 0.5) as bench:
        lags = bench.lags()
        bench.stub.sent_at[:] = [time.monotonic() - 5] * len(bench.words)
        words = list(bench.words)
        lags.note(
            b'data: {"choices":[{"delta":{"content":" %s %s"}}]}' % (words[0].encode(), words[9].encode())
        )
        assert len(lags.values) == 2 and all(5 <= lag < 5 + 60 for lag in lags.values)
        assert len(bench.words) * OTHERS_STEP_S > 20, "a step's word comes again only much later"
