"""Plans as a table, a plot, values for the chart and a Serve configuration. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cluster.types.members import Role
from deploy.simulator.charts import WIDTH, box, label, svg
from deploy.simulator.hardware import ACCELERATORS, Model, num_kv_blocks
from deploy.simulator.layouts import ROLES
from deploy.simulator.planner import Plan

LEFT, BAR, VALUES = 260, 15, 150
_ENABLED = (Role.ENCODE, Role.PREFILL, Role.DECODE)  # pools that the chart starts by default
COLOUR, ESTIMATE_COLOUR = "#2f6fb0", "#b5d3a8"


def size_lines(model: Model, accelerators: Iterable[str]) -> list[str]:
    """The memory of a language worker on each of these."""
    lines = []
    for name in accelerators:
        blocks = num_kv_blocks(model, ACCELERATORS[name])
        room = f"{blocks * model.block_size:,} tokens of KV" if blocks >= 0 else "too little memory"
        lines.append(f"{model.name} on {name}: {model.weight_bytes / 1e9:.1f} GB of weights, {room}")
    return lines


def plan_table(plans: Sequence[Plan]) -> list[str]:
    """The best first. E, P, D, PD, EPD: workers of each role; `*`: decode workers compute short prompts
    themselves where that is sooner."""
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
        rate = f"below {each.rate:.2f}" if each.is_limit else f"{each.rate:.2f}"
        lines.append(f"| {each.name} | {rate} | {each.estimate:.2f} | {times} |")
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
        below = "below " * each.is_limit
        body.append(label(x, y + BAR - 4, f"{below}{each.rate:.2f} of {each.estimate:.2f}"))
        y += BAR
    return svg(y + BAR, body)


def plan_values(best: Plan, promise: str) -> str:
    """A values file for deploy/chart. Raises ValueError for several kinds of GPUs, because a pool of the
    chart has one."""
    name, counts = _pools(best)
    pools = [f"  {role}: {{enabled: true, pods: {count}}}" for role, count in counts.items()]
    pools += [f"  {role}: {{enabled: false}}" for role in _ENABLED if role not in counts]
    return "\n".join([f"# {_heading(best, promise)}", "device: cuda", f"pools: # {name}", *pools, ""])


def plan_config(best: Plan, promise: str, model: Model, command: str) -> str:
    """A Serve configuration for one machine with these GPUs. Raises ValueError for several kinds of GPUs."""
    name, counts = _pools(best)
    settings = {
        "roles": f"[{', '.join(counts)}]",
        "device": "cuda",
        "tensor_parallel_size": str(ACCELERATORS[name].num_devices),
    }
    return "\n".join(
        [
            f"# {model.name} on {_heading(best, promise)}.",
            f"# {command}",
            "# Its curves are rooflines over data sheets.",
            "proxy_location: HeadOnly",
            "http_options: {host: 127.0.0.1, port: 8000}",
            "logging_config: {log_level: WARNING, enable_access_log: false}",
            "applications:",
            "  - name: epdg",
            "    route_prefix: /",
            "    import_path: deploy.app:build",
            "    args:",
            *(f"      {key}: {value}" for key, value in settings.items()),
            "    deployments:",
            *(
                f"      - {{name: {role.deployment}, num_replicas: {count}}}"
                for role, count in counts.items()
            ),
            "      - {name: Door, num_replicas: 1, ray_actor_options: {num_cpus: 1}}",
            "",
        ]
    )


def _pools(best: Plan) -> tuple[str, dict[Role, int]]:
    """Returns the kind of GPU, and the number of replicas of each role that has some."""
    if len(best.division) != 1:
        raise ValueError("a file can be written for one kind of GPU only")
    ((name, layout),) = best.division
    counts = {ROLES[kind]: count for kind, count in layout.counts.items() if count}
    if Role.ENCODE in counts:  # an encoder takes one GPU, whatever the others take: each of a group has one
        counts[Role.ENCODE] *= ACCELERATORS[name].num_devices
    return name, counts


def _heading(best: Plan, promise: str) -> str:
    return f"{best.name}, simulated: {best.rate:.2f} requests/s with {promise}"
