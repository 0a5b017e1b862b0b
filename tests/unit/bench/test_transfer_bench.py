"""The tables of bench/transfer, from records made by hand."""

from __future__ import annotations

from bench.transfer.report import hidden_table, lane_table


def lane(agent, codec, repetition, seconds, num_bytes=4 << 20):
    return {
        "type": "lane", "agent": agent, "codec": codec, "num_blocks": 256, "repetition": repetition,
        "seconds": seconds, "bytes": num_bytes, "raw_bytes": 4 << 20,
    }  # fmt: skip


RECORDS = [
    *(lane("memcpy", "raw", i, seconds) for i, seconds in enumerate([1e-3, 2e-3, 1e-3])),
    *(lane("nixl", "int8", i, seconds, 2 << 20) for i, seconds in enumerate([3e-3, 4e-3, 2e-3])),
]


def hidden(mode, repetition, shows_s, ttft_s, num_bytes=12_000_000):
    return {
        "type": "hidden", "mode": mode, "prompt_tokens": 1024, "link_gb_per_s": 1.0, "repetition": repetition,
        "bytes": num_bytes, "shows_s": shows_s, "ttft_s": ttft_s, "second_token_s": ttft_s + 0.02,
    }  # fmt: skip


def test_a_lane_is_compared_with_memcpy_of_the_same_repetition():
    lines = lane_table(RECORDS)
    assert lines[-1] == "| 256 | nixl | int8 | 2.10 | 3.00 | 1.40 | 2.00 |"


def test_hidden_is_the_part_that_shows_no_more():
    records = [
        *(hidden("pipelined", i, 0.002, 1.0) for i in range(3)),
        *(hidden("after prefill", i, 0.020, 1.1) for i in range(3)),
        *(hidden("recomputed", i, 0.001, 1.05, 9_000_000) for i in range(3)),
    ]
    assert hidden_table(records)[-1] == (
        "| 1024 | 1 | 12.0 | 2.0 · 20.0 | 90% | 1000 · 1100 · 1050 | 1020 · 1120 · 1070 | 75% |"
    )
