"""Grafana boards over the metrics of docs/metrics.md: an overview, and one for each role.

`boards` returns them as JSON values; `python -m deploy.generate` writes them into deploy/chart/dashboards.
Every door reports the workers that it sees, so figures of workers are taken as the largest over all doors
(`_each`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cluster.types.members import Role
from deploy.grafana import COLUMNS, Panel, Rows, board

RATE = "$__rate_interval"
QUEUED = "Embedding rows (encode), prompt tokens (prefill), sequences (others)."
CODED = "KV in fewer bits, if transfer.codec says so."
SPARED = "KV that the receiver had already. What arrived coded is not kept."
TTFT = "epdg_time_to_first_token_seconds"


def boards() -> dict[str, dict[str, Any]]:
    """Returns boards by file name without its ending."""
    found = {"overview": board("epdg-overview", "epdg / Overview", _overview())}
    for role in Role:
        name = role.value.replace("_", "-")
        found[name] = board(f"epdg-{name}", f"epdg / {role.deployment}", _pool(role))
    return found


def _rate(metric: str, labels: str = "") -> str:
    return f"rate({metric}{{{labels}}}[{RATE}])"


def _model_rate(metric: str) -> str:
    return _rate(metric, 'model_name="$model"')


def _quantiles(metric: str) -> list[tuple[str, str]]:
    series = f"sum by (le) ({_model_rate(metric + '_bucket')})"
    return [(f"histogram_quantile({q}, {series})", f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def _mean(metric: str) -> str:
    return f"sum({_model_rate(metric + '_sum')}) / sum({_model_rate(metric + '_count')})"


def _each(series: str, labels: str = "pool, replica") -> str:
    return f"max by ({labels}) ({series})"


def _by_pool(series: str) -> list[tuple[str, str]]:
    return [(f"sum by (pool) ({_each(series)})", "{{pool}}")]


def _overview() -> Rows:
    return [
        ("Requests", _requests()),
        ("Where the time to the first token goes", _first_tokens()),
        ("Pools", _pools()),
        ("Caches and transfers", _caches()),
        ("Doors", _doors()),
    ]


def _requests() -> list[Panel]:
    by_reason = f"sum by (finished_reason) ({_model_rate('epdg_requests_total')}) > 0"
    refused = f"sum by (admission_class, reason) ({_rate('epdg_admission_refusals_total')})"
    good = _rate(f"{TTFT}_bucket", 'model_name="$model", le="$target"')
    return [
        Panel(
            "Ended, by reason",
            "reqps",
            [(by_reason, "{{finished_reason}}")],
            "OverloadedError: refused with 429. Reasons without a request are left out.",
            is_stacked=True,
        ),
        Panel("Time to first token", "s", _quantiles(TTFT)),
        Panel("Gap between tokens", "s", _quantiles("epdg_inter_token_latency_seconds")),
        Panel(
            "Tokens",
            "count:tokens/s",
            [
                (f"sum({_model_rate('epdg_prompt_tokens_total')})", "prompt"),
                (f"sum({_model_rate('epdg_prompt_tokens_cached_total')})", "of it cached"),
                (f"sum({_model_rate('epdg_generation_tokens_total')})", "generated"),
            ],
        ),
        Panel(
            "First tokens within the target",
            "percentunit",
            [(f"sum({good}) / sum({_model_rate(TTFT + '_count')})", "share")],
            "The target is chosen above.",
        ),
        Panel(
            "In work and waiting",
            "short",
            [
                ("sum(epdg_door_flights)", "in work"),
                ("sum(epdg_door_waiting)", "wait for admission"),
                ("sum(epdg_door_unplaced)", "wait for a worker to join"),
            ],
        ),
        Panel("Whole request", "s", _quantiles("epdg_e2e_request_latency_seconds")),
        Panel(
            "Answers, by status",
            "reqps",
            [(f"sum by (status) ({_rate('epdg_http_responses_total')})", "{{status}}")],
            is_stacked=True,
        ),
        Panel("Refused, by class and reason", "reqps", [(refused, "{{admission_class}}: {{reason}}")]),
    ]


def _first_tokens() -> list[Panel]:
    stages = f"sum by (stage) ({_model_rate('epdg_ttft_stage_seconds_sum')})"
    return [
        Panel(
            "Mean time to first token, by stage",
            "s",
            [(f"{stages} / on () group_left () sum({_model_rate(TTFT + '_count')})", "{{stage}}")],
            "The stages sum to the mean.",
            12,
            True,
        ),
        Panel(
            "Predicted and actual, mean",
            "s",
            [(_mean("epdg_predicted_time_to_first_token_seconds"), "predicted"), (_mean(TTFT), "actual")],
            width=12,
        ),
        Panel(
            "Prediction error and coverage",
            "percentunit",
            [
                ("avg(epdg_ttft_prediction_error_ratio)", "error"),
                ("avg(epdg_ttft_prediction_coverage_ratio)", "inside the interval (0.9 is right)"),
            ],
            width=12,
        ),
        Panel(
            "Learnt factors",
            "short",
            [("avg by (pool, hardware) (epdg_prediction_factor)", "{{pool}} {{hardware}}")],
            "Predicted durations are multiplied by them. Far from 1: the hardware changes its speed.",
            12,
        ),
    ]


def _pools() -> list[Panel]:
    num_workers = f"count by (pool) ({_each('epdg_worker_running')})"
    busy = f"sum by (pool) ({_each(_rate('epdg_worker_busy_seconds_total'))}) / {num_workers}"
    used, blocks = (
        f"sum by (pool) ({_each(name)})" for name in ("epdg_worker_used_blocks", "epdg_worker_blocks")
    )
    return [
        Panel(
            "Busy",
            "percentunit",
            [(busy, "{{pool}}")],
            "Part of the time in which the workers compute. One answer alone keeps a decode worker busy.",
            12,
        ),
        Panel("Memory held by requests", "percentunit", [(f"{used} / {blocks}", "{{pool}}")], width=12),
        Panel("Workers", "short", [(num_workers, "{{pool}}")], width=6),
        Panel("In work", "short", _by_pool("epdg_worker_running"), width=6),
        Panel(
            "Waiting",
            "short",
            _by_pool("epdg_worker_waiting"),
            "For memory, embeddings or KV. A pool that only grows here is the bottleneck.",
            6,
        ),
        Panel(
            "Queued work",
            "short",
            _by_pool("epdg_worker_queued_units"),
            QUEUED,
            6,
        ),
        Panel("Blocks held by requests", "short", _by_pool("epdg_worker_used_blocks")),
        Panel("Blocks kept for reuse", "short", _by_pool("epdg_worker_cached_blocks")),
        Panel(
            "Workers that do not move",
            "short",
            [(f"max by (pool) (epdg_door_silent_workers) and on (pool) {num_workers}", "{{pool}}")],
        ),
    ]


def _caches() -> list[Panel]:
    cached, prompt = "epdg_prompt_tokens_cached_total", "epdg_prompt_tokens_total"
    items = _each(_rate("epdg_encoder_items_total"), "replica, result")
    return [
        Panel(
            "Prompt tokens from the prefix cache",
            "percentunit",
            [(f"sum({_model_rate(cached)}) / sum({_model_rate(prompt)})", "share")],
        ),
        Panel(
            "Media items, by result",
            "count:items/s",
            [(f"sum by (result) ({items})", "{{result}}")],
            is_stacked=True,
        ),
        Panel("KV in the second tier", "bytes", _by_pool("epdg_tier_bytes")),
        Panel("Sent raw", "Bps", _by_pool(_rate("epdg_transfer_raw_bytes_total"))),
        Panel("Sent coded", "Bps", _by_pool(_rate("epdg_transfer_coded_bytes_total")), CODED),
        Panel("Spared", "Bps", _by_pool(_rate("epdg_transfer_spared_bytes_total")), SPARED),
    ]


def _doors() -> list[Panel]:
    lag = "epdg_door_event_loop_lag_seconds"
    return [
        Panel(
            "Event loop delay, mean",
            "s",
            [(f"{_rate(lag + '_sum')} / {_rate(lag + '_count')}", "{{instance}}")],
            width=6,
        ),
        Panel("Bodies in work", "bytes", [("epdg_door_body_bytes", "{{instance}}")], width=6),
        Panel(
            "Refused keys",
            "reqps",
            [(f"sum by (status) ({_rate('epdg_door_key_refusals_total')})", "{{status}}")],
            "401: no valid key; 403: a key for other paths; 429: beyond the key's limits",
            6,
        ),
        Panel(
            "Lost workers",
            "short",
            [
                (f"sum(increase(epdg_door_silences_total[{RATE}]))", "stopped moving"),
                (f"sum(increase(epdg_door_replays_total[{RATE}]))", "requests taken over"),
                (f"sum(increase(epdg_door_quarantined_total[{RATE}]))", "quarantined"),
                (f"sum(increase(epdg_door_crashed_requests_total[{RATE}]))", "errors of a door"),
            ],
            width=6,
        ),
    ]


def _pool(role: Role) -> Rows:
    """Makes a row per replica. Of a worker that encodes and does more, the encoder reports as pool `encode`;
    its board shows both."""
    pools = (
        f'pool=~"encode|{role.value}"' if role.encodes and len(role.phases) > 1 else f'pool="{role.value}"'
    )
    legend = "{{pool}} {{replica}}"

    def per_replica(title: str, metric: str, description: str = "", unit: str = "short") -> Panel:
        series = f"{metric}{{{pools}}}" if not metric.endswith("_total") else _rate(metric, pools)
        return Panel(title, unit, [(_each(series), legend)], description)

    load = [
        per_replica("Busy", "epdg_worker_busy_seconds_total", unit="percentunit"),
        per_replica("In work", "epdg_worker_running"),
        per_replica("Waiting", "epdg_worker_waiting", "For memory, embeddings or KV."),
        per_replica("Queued work", "epdg_worker_queued_units", QUEUED),
        per_replica("Blocks held by requests", "epdg_worker_used_blocks"),
        per_replica("Blocks kept for reuse", "epdg_worker_cached_blocks"),
    ]
    if len(role.phases) > 1:
        assigned = _each(f"epdg_worker_assigned{{{pools}}}", "pool, replica, phase")
        described = "1: new requests use the worker for this phase."
        load.append(
            Panel("Assigned phases", "short", [(assigned, "{{phase}} {{replica}}")], described, COLUMNS)
        )
    rows: list[tuple[str, Sequence[Panel]]] = [
        ("Load", load),
        ("Transfer", list(_transfers(role, per_replica))),
    ]
    if role.encodes:
        rows.append(("Encoder", _encoder()))
    if role.decodes:
        rows.append(("Decode", _decode()))
    return rows


def _transfers(role: Role, per_replica: Any) -> Iterator[Panel]:
    yield per_replica("Open transfers", "epdg_worker_open_leases")
    if role.encodes or role.prefills:
        yield per_replica("Media in work", "epdg_worker_media_bytes", unit="bytes")
        yield per_replica("Sent raw", "epdg_transfer_raw_bytes_total", unit="Bps")
    if role.prefills:
        yield per_replica("Sent coded", "epdg_transfer_coded_bytes_total", CODED, "Bps")
    if role.prefills or role.decodes:
        yield per_replica("Spared", "epdg_transfer_spared_bytes_total", SPARED, "Bps")
        yield per_replica("KV in the second tier", "epdg_tier_bytes", unit="bytes")


def _encoder() -> list[Panel]:
    """The series name no pool: of all workers that encode."""
    items = _each(_rate("epdg_encoder_items_total"), "replica, result")
    return [
        Panel(
            "Media items",
            "count:items/s",
            [(items, "{{result}} {{replica}}")],
            "Of all workers that encode.",
            12,
        ),
        Panel(
            "Embedding rows",
            "count:rows/s",
            [(_each(_rate("epdg_encoder_rows_total"), "replica"), "{{replica}}")],
            "Of all workers that encode.",
            12,
        ),
    ]


def _decode() -> list[Panel]:
    """The series name no pool: of all workers that decode."""
    accepted, drafted = (
        f"sum({_each(_rate(f'epdg_decode_{what}_tokens_total'), 'replica')})"
        for what in ("accepted", "draft")
    )
    return [
        Panel(
            "Preemptions",
            "reqps",
            [(_each(_rate("epdg_decode_preemptions_total"), "replica"), "{{replica}}")],
            "Of all workers that decode. More than a few: too few KV blocks.",
            12,
        ),
        Panel("Drafts that were right", "percentunit", [(f"{accepted} / {drafted}", "share")], width=12),
    ]
