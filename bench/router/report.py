"""Tables from the records of `simulate`. Pure. Values are means over seeds with their 95 %
confidence intervals; ratios and regrets are taken within a seed."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bench.records import Record
from bench.router.cases import POLICY_NAMES, SPLITS, Family, OverloadCase
from bench.router.policies import ORACLE
from bench.tables import head
from deploy.simulator.results import interval

Cells = dict[tuple[Any, ...], dict[int, Record]]  # by seed


def tables(records: Sequence[Record]) -> list[str]:
    """Lines of Markdown: a table for every kind of record there is."""
    lines = []
    for kind, make in TABLES.items():
        found = [record for record in records if record["type"] == kind]
        if found:
            origins = "; ".join(dict.fromkeys(f"commit {r['commit']}, {r['date']}" for r in found))
            seeds = len({record["seed"] for record in found})
            lines += [f"**{kind}** ({seeds} seeds; {origins})", "", *make(found), ""]
    return lines


def policy_table(records: Iterable[Record]) -> list[str]:
    cells = _cells(records, "scenario", "policy")
    lines = head(
        "scenario", "policy", "TTFT mean, ms", "p50", "p99", "second token, mean", "regret to oracle", "reused",
        "MAPE", "coverage",
    )  # fmt: skip
    for scenario in dict.fromkeys(key[0] for key in cells):
        oracle = cells.get((scenario, ORACLE), {})
        for policy in POLICY_NAMES:
            cell = cells.get((scenario, policy))
            if cell is None:
                continue
            times = " | ".join(_milliseconds(cell, f"ttft_{which}_s") for which in ("mean", "p50", "p99"))
            regret = _ratios(cell, oracle, "ttft_mean_s", minus=1.0) if policy != ORACLE else "–"
            coverage = f"{_mean(cell, 'coverage'):.1%}" if policy != ORACLE else "–"
            lines.append(
                f"| {scenario} | {policy} | {times} | {_milliseconds(cell, 'second_mean_s')} | {regret} | "
                f"{_mean(cell, 'cached_share'):.0%} | {_mean(cell, 'mape'):.1%} | {coverage} |"
            )
    return lines


def overall_table(records: Iterable[Record]) -> list[str]:
    """A table over all scenarios: the geometric mean of what a policy's mean time to first token is to the
    oracle's. The oracle's error of prediction is what is left without knowing the future."""
    cells = _cells(records, "scenario", "policy")
    lines = head("policy", "÷ oracle, geometric mean", "worst scenario", "÷ oracle there", "MAPE", "coverage")
    for policy in POLICY_NAMES:
        ratios = {
            scenario: statistics.fmean(_pairs(cell, cells[scenario, ORACLE], "ttft_mean_s"))
            for (scenario, its), cell in cells.items()
            if its == policy and (scenario, ORACLE) in cells
        }
        if not ratios:
            continue
        worst = max(ratios, key=lambda name: ratios[name])
        of_policy = [cell for (_, its), cell in cells.items() if its == policy]
        mape, coverage = (
            statistics.fmean(_mean(cell, name) for cell in of_policy) for name in ("mape", "coverage")
        )
        if policy == ORACLE:
            lines.append(f"| {policy} | – | – | – | {mape:.1%} | – |")
            continue
        lines.append(
            f"| {policy} | {statistics.geometric_mean(ratios.values()):.3f} | {worst} | {ratios[worst]:.2f} | "
            f"{mape:.1%} | {coverage:.1%} |"
        )
    return lines


def split_table(records: Iterable[Record]) -> list[str]:
    """Highest rates; the ratio is that of the best any-role split to the best of the other two families."""
    cells = _cells(records, "slo", "workload", "split")
    names = [name for name in SPLITS if any(key[2] == name for key in cells)]
    lines = head("limits", "workload", *names, "device time allows", "any role ÷ best of the others")
    for slo, workload in dict.fromkeys(key[:2] for key in cells):
        found = {name: cells[slo, workload, name] for name in names if (slo, workload, name) in cells}
        shown = [_values(found[name], "rate", "{:.1f}") if name in found else "–" for name in names]
        ranked = sorted(found, key=lambda name: _mean(found[name], "rate"), reverse=True)
        ours, others = (
            [name for name in ranked if (SPLITS[name].family is Family.ANY) is is_any]
            for is_any in (True, False)
        )
        ratio = (
            f"{_ratios(found[ours[0]], found[others[0]], 'rate')} ({others[0]})" if ours and others else "–"
        )
        most = _mean(found[ranked[0]], "most")
        lines.append(f"| {slo} | {workload} | {' | '.join(shown)} | {most:.1f} | {ratio} |")
    return lines


def group_table(records: Iterable[Record]) -> list[str]:
    cells = _cells(records, "split", "rate")
    lines = head("cluster", "requests/s", "tokens/s", "TTFT p50, ms", "p99", "reused", "÷ in turn, tokens/s")
    for (split, rate), cell in cells.items():
        other = cells.get((split.replace("joint", "in turn"), rate), {})
        ratio = _ratios(cell, other, "output_tokens_per_s") if "joint" in split and other else "–"
        times = " | ".join(_milliseconds(cell, f"ttft_{which}_s") for which in ("p50", "p99"))
        lines.append(
            f"| {split} | {rate:.0f} | {_values(cell, 'output_tokens_per_s', '{:,.0f}')} | {times} | "
            f"{_mean(cell, 'cached_share'):.0%} | {ratio} |"
        )
    return lines


def overload_table(records: Iterable[Record]) -> list[str]:
    """`good`: prompt tokens, a second, of the requests whose first token came in the time of arrivals and
    within what their class is promised."""
    cells = _cells([{"layout": OverloadCase.layout} | r for r in records], "layout", "admission", "load")
    lines = head(
        "workers", "admission", "load", "requests/s", "good, tokens/s", "÷ peak", "refused", "TTFT p99, ms",
        "longest wait at the door, s",
    )  # fmt: skip
    for kind in dict.fromkeys(key[:2] for key in cells):
        of_kind = {load: cell for (*its, load), cell in cells.items() if tuple(its) == kind}
        peak = max(_mean(cell, "good_work") for cell in of_kind.values())
        for load, cell in of_kind.items():
            of_seeds = cell.values()
            refused = sum(r["num_refused"] for r in of_seeds) / sum(r["num_requests"] for r in of_seeds)
            waits = [
                f"{name} {max(r['longest_wait_s'][name] for r in of_seeds):.1f}"
                for name in next(iter(of_seeds))["longest_wait_s"]
            ]
            lines.append(
                f"| {kind[0]} | {'yes' if kind[1] else 'no'} | {load:g} | {_mean(cell, 'rate'):.0f} | "
                f"{_values(cell, 'good_work', '{:,.0f}')} | {_mean(cell, 'good_work') / peak:.0%} | {refused:.0%} | "
                f"{_milliseconds(cell, 'ttft_p99_s')} | {', '.join(waits)} |"
            )
    return lines


def _cells(records: Iterable[Record], *names: str) -> Cells:
    cells: Cells = {}
    for record in records:
        cells.setdefault(tuple(record[name] for name in names), {})[record["seed"]] = record
    return dict(sorted(cells.items(), key=lambda pair: [str(part) for part in pair[0][:-1]]))


def _column(cell: dict[int, Record], name: str) -> list[float]:
    return [record[name] for _, record in sorted(cell.items())]


def _mean(cell: dict[int, Record], name: str) -> float:
    values = _column(cell, name)
    return statistics.fmean(values) if values else 0.0


def _pairs(cell: dict[int, Record], other: dict[int, Record], name: str) -> list[float]:
    """Ratios within seeds that both have."""
    return [
        cell[seed][name] / other[seed][name] for seed in sorted(cell) if seed in other and other[seed][name]
    ]


def _values(cell: dict[int, Record], name: str, form: str) -> str:
    mean, half = interval(_column(cell, name))
    return f"{form.format(mean)} ± {form.format(half)}"


def _milliseconds(cell: dict[int, Record], name: str) -> str:
    mean, half = interval([1e3 * value for value in _column(cell, name)])
    digits = 1 if mean < 1000 else 0
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def _ratios(cell: dict[int, Record], other: dict[int, Record], name: str, minus: float = 0.0) -> str:
    """The ratios with a confidence interval; a difference to 1 in per cent."""
    values = [ratio - minus for ratio in _pairs(cell, other, name)]
    if not values:
        return "–"
    mean, half = interval(values)
    return f"{100 * mean:+.1f} ± {100 * half:.1f} %" if minus else f"{mean:.2f} ± {half:.2f}"


def both_policy_tables(records: Sequence[Record]) -> list[str]:
    return [*overall_table(records), "", *policy_table(records)]


TABLES: dict[str, Callable[[Sequence[Record]], list[str]]] = {
    "policies": both_policy_tables,
    "splits": split_table,
    "groups": group_table,
    "overload": overload_table,
}
