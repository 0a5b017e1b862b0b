"""Results to Markdown tables. Pure; reads the JSON lines that `run` wrote."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from bench.engine.isa import NATIVE
from bench.engine.processes import ROLES
from bench.engine.servers import OURS
from bench.records import Record
from bench.records import read as read_records
from bench.tables import head, median, paired_ratio, row

METRICS = ("tokens_per_s", "ttft_p50_s", "itl_p50_s")
TOTALS = ("all", "client")  # columns of the table of CPU time, behind the roles
SHARED_CORES = 0.15  # used by other programs: above it a figure is marked


@dataclass
class Results:
    servers: list[str] = field(default_factory=list)  # in the order they appear, ours first
    cells: dict[tuple[str, int], dict[str, list[Record]]] = field(default_factory=dict)  # (row, concurrency)
    findings: dict[str, list[Record]] = field(default_factory=dict)
    failures: list[Record] = field(default_factory=list)
    starts_s: dict[str, list[float]] = field(default_factory=dict)  # by server, of all rows


def read(files: Sequence[Path]) -> Results:
    return collect(read_records(files))


def collect(records: Iterable[Record]) -> Results:
    results = Results()
    for record in records:
        if record["type"] == "row":
            cell = results.cells.setdefault((_row_name(record), record["concurrency"]), {})
            cell.setdefault(record["server"], []).append(record)
            results.starts_s.setdefault(record["server"], []).append(record.get("start_s", 0.0))
            if record["server"] not in results.servers:
                results.servers.append(record["server"])
        elif record["type"] == "finding":
            results.findings.setdefault(record["measure"], []).append(record)
        else:
            results.failures.append(record)
    results.servers.sort(key=lambda name: name != OURS)
    return results


def _row_name(record: Record) -> str:
    """Rows of an instruction set have a name of their own, so that files of several can be read together."""
    isa = record.get("isa", NATIVE)
    return record["row"] if isa == NATIVE else f"{record['row']} {isa}"


def better_ratio(ours: Sequence[Record], peers: Iterable[Sequence[Record]], metric: str) -> float | None:
    """The ratio to the peer that does better in this metric."""
    ratios = [each for peer in peers if (each := paired_ratio(ours, peer, itemgetter(metric))) is not None]
    return (min if metric == METRICS[0] else max)(ratios, default=None)


def table(results: Results) -> str:
    """Medians per row, ours divided by each peer, and by the better one in each metric. `†`: some answers
    failed; `‡`: other programs used the machine.
    """
    peers = [name for name in results.servers if name != OURS]
    compares = OURS in results.servers and bool(peers)
    columns = ["row", "at once", *(f"{name}: tok/s · TTFT · ITL ms" for name in results.servers)]
    columns += [f"{OURS} ÷ {name}" for name in [*peers, "better peer"] if compares]
    lines = head(*columns)
    for (title, concurrency), cell in results.cells.items():
        cells = [title, str(concurrency), *(_figures(cell.get(name, [])) for name in results.servers)]
        if compares:
            ours, others = cell.get(OURS, []), [cell.get(name, []) for name in peers]
            cells += [
                _joined(paired_ratio(ours, peer, itemgetter(metric)) for metric in METRICS) for peer in others
            ]
            cells.append(_joined(better_ratio(ours, others, metric) for metric in METRICS))
        lines.append(row(cells))
    starts = (f"{name} {statistics.median(results.starts_s[name]):.1f}" for name in results.servers)
    lines += [
        "",
        "Median of the repetitions; TTFT and ITL are p50. Ratios in the same order: above 1 is better for tok/s,",
        "worse for TTFT and ITL. † some answers failed, ‡ other programs used the machine meanwhile.",
        f"Seconds from the command to the first answer of /health: {', '.join(starts)}.",
    ]
    return "\n".join(lines + _other_lines(results))


def _other_lines(results: Results) -> list[str]:
    """Special measurements, and servers that did not start."""
    lines: list[str] = []
    for name, findings in results.findings.items():
        lines += ["", f"**{name}** ({len(findings)} ×)", "", *head("", "median")]
        for key in findings[0]["values"]:
            values = [finding["values"][key] for finding in findings if key in finding["values"]]
            lines.append(row([key, f"{statistics.median(values):.4g}"]))
        failures = {failure for finding in findings for failure in finding["failures"]}
        lines += [f"failed: {failure}" for failure in sorted(failures)]
    lines += [f"did not run: {failure['server']} {failure['model']}" for failure in results.failures]
    return lines


def cpu_table(results: Results) -> str:
    """CPU seconds per 1,000 generated tokens, by role; medians. A role that is in no record has no column."""
    costs = {
        (*key, name): [_cpu_costs(record) for record in records if record["num_tokens"]]
        for key, cell in results.cells.items()
        for name, records in cell.items()
    }
    known = {name for each in costs.values() for cost in each for name in cost}
    columns = [name for name in (*ROLES, *TOTALS) if name in known]
    lines = head("row", "at once", "server", *columns)
    for (title, concurrency, server), each in costs.items():
        if each:
            found = ([cost[name] for cost in each if name in cost] for name in columns)
            cells = [f"{statistics.median(values):.2f}" if values else "–" for values in found]
            lines.append(row([title, str(concurrency), server, *cells]))
    return "\n".join([*lines, "", "CPU seconds per 1,000 generated tokens, median of the repetitions."])


def _cpu_costs(record: Record) -> dict[str, float]:
    """The costs per 1,000 tokens: by role, and TOTALS. Older records have no roles, only the totals."""
    totals = zip(TOTALS, (record["server_cpu_s"], record["client_cpu_s"]), strict=True)
    seconds = {**record.get("server_cpu_by_role_s", {}), **dict(totals)}
    return {name: 1000 * each / record["num_tokens"] for name, each in seconds.items()}


def _figures(records: Sequence[Record]) -> str:
    if not records:
        return "–"
    rate, ttft_s, itl_s = (median(records, metric) for metric in METRICS)
    failed = " †" if any(record["num_failed"] for record in records) else ""
    shared = " ‡" if median(records, "other_cores") > SHARED_CORES else ""
    return f"{rate:.1f} · {1e3 * ttft_s:.0f} · {1e3 * itl_s:.1f}{failed}{shared}"


def _joined(ratios: Iterable[float | None]) -> str:
    return " · ".join("–" if value is None else f"{value:.2f}" for value in ratios)
