"""The recorded results that the READMEs of the benchmarks quote can still be read and shown."""

from __future__ import annotations

import json
from pathlib import Path

import bench.encoder.report
import bench.engine.report
import bench.transfer.report

BENCH = Path(__file__).parents[3] / "bench"


def recorded(folder: str) -> list[dict]:
    files = sorted((BENCH / folder).glob("*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_the_engines_results_make_tables():
    results = bench.engine.report.read(sorted((BENCH / "engine").glob("*.jsonl")))
    assert "| text-128/64 | 1 |" in bench.engine.report.table(results)
    assert "| ours |" in bench.engine.report.cpu_table(results)


def test_the_encoder_pools_results_make_tables():
    tables = "\n".join(bench.encoder.report.tables(recorded("encoder")))
    assert tables.count("| --- |") >= 4


def test_the_hand_overs_results_make_tables():
    kinds = {
        "lane": bench.transfer.report.lane_table,
        "hidden": bench.transfer.report.hidden_table,
        "accuracy": bench.transfer.report.accuracy_table,
    }
    for kind, table in kinds.items():
        assert len(table([record for record in recorded("transfer") if record["type"] == kind])) > 2, kind
