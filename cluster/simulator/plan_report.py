"""Plans as a table, a plot, and values for the chart. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.simulator.charts import box, label, svg
from cluster.simulator.planner import Plan

WIDTH, LEFT, BAR, VALUES = 760, 260, 15, 150
COLOUR, ESTIMATE_COLOUR = "#2f6fb0", "#b5d3a8"


def plan_table(plans: Sequence[Plan]) -> list[str]:
    """The best first. E, P, D: workers of each phase; `*`: decode workers compute short prompts themselves
    where that is sooner."""
    lines = [
        "| division | requests/s | by arithmetic | TTFT p50, ms | p99 | TPOT p99, ms | tokens/s |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in plans:
        found = each.summary
        times = (
            f"{1e3 * found.ttft_p50_s:.0f} | {1e3 * found.ttft_p99_s:.0f} | {1e3 * found.tpot_p99_s:.1f} | "
            f"{found.output_tokens_per_s:.0f}"
            if found
            else "– | – | – | –"
        )
        lines.append(f"| {each.name} | {each.rate:.2f} | {each.estimate:.2f} | {times} |")
    return lines


def plan_plot(plans: Sequence[Plan], title: str) -> str:
    """A bar for each division that was simulated, over the rate that arithmetic alone promised."""
    y, body = 26.0, [label(8, 16, title)]
    most = max(max(each.rate, each.estimate) for each in plans) or 1.0
    scale = (WIDTH - LEFT - VALUES) / most
    for each in plans:
        body.append(label(8, y + BAR - 4, each.name))
        body.append(box(LEFT, y, scale * each.estimate, BAR - 3, ESTIMATE_COLOUR))
        body.append(box(LEFT, y + 3, scale * each.rate, BAR - 9, COLOUR))
        x = LEFT + scale * max(each.rate, each.estimate) + 5
        body.append(label(x, y + BAR - 4, f"{each.rate:.2f} of {each.estimate:.2f}"))
        y += BAR
    return svg(WIDTH, y + BAR, body)


def plan_values(best: Plan, promise: str) -> str:
    """A values file for deploy/chart. Raises ValueError for several kinds of GPUs, because a pool of the
    chart has one."""
    if len(best.division) != 1:
        raise ValueError("values can be written for one kind of GPU only")
    ((name, layout),) = best.division
    counts = {"encode": layout.num_encode, "prefill": layout.num_prefill, "decode": layout.num_decode}
    pools = (
        f"  {pool}: {{pods: {count}}}" if count else f"  {pool}: {{enabled: false}}"
        for pool, count in counts.items()
    )
    told = f"# {best.name}, simulated: {best.rate:.2f} requests/s with {promise}"
    return "\n".join([told, "device: cuda", f"pools: # {name}", *pools, ""])
