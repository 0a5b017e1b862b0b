"""What a door exports of its workers, of admission and of requests that have ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from cluster.types.curves import Link
from cluster.types.members import Member, Role
from cluster.types.messages import LoadReport, PhasesAssigned
from deploy.serving.gauges import WorkerGauges
from router.admission.answers import RefusalReason
from router.admission.controller import AdmissionTotals
from router.admission.fair_queue import AdmissionTicket
from router.telemetry.metrics import DoorMetrics
from router.telemetry.timeline import RequestTimeline


def lines(metrics: DoorMetrics) -> dict[str, float]:
    text = metrics.render().decode()
    pairs = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def flow() -> MagicMock:
    found = MagicMock(num_running=2, num_waiting=3)
    found.calibration = SimpleNamespace(accuracy=SimpleNamespace(num_observed=0), factors={})
    return found


def test_busy_time_and_capacity_of_a_worker_and_of_its_encoder():
    member = Member(replica_id="w1", role=Role.WHOLE, address="", model="m", layout="", num_blocks=40)
    loads = {
        Role.WHOLE: LoadReport(num_used_blocks=10, busy_s=7.5),
        Role.ENCODE: LoadReport(is_of_encoder=True, busy_s=2.5),
    }
    links = {"w2": Link(1e-4, 1.34e11), "": Link(1e-4, 1e10)}
    peer: Any = SimpleNamespace(member=member, loads=loads, assigned=PhasesAssigned((), 0), links=links)
    found = lines(DoorMetrics("m", lambda: [peer], flow()))
    assert found['epdg_worker_busy_seconds_total{pool="whole",replica="w1"}'] == 7.5
    assert found['epdg_worker_busy_seconds_total{pool="encode",replica="w1"}'] == 2.5
    assert found['epdg_worker_blocks{pool="whole",replica="w1"}'] == 40
    assert found['epdg_kv_cache_usage_perc{pool="whole",replica="w1"}'] == 0.25
    assert 'epdg_worker_blocks{pool="encode",replica="w1"}' not in found
    written = {name: value for name, value in found.items() if name.startswith("epdg_transfer_link")}
    assert written == {'epdg_transfer_link_bytes_per_second{reader="w2",replica="w1"}': 1.34e11}
    assert not any("lora" in name for name in found)  # no adapter is served
    assert (found["epdg_num_requests_running"], found["epdg_num_requests_waiting"]) == (2, 3)


def test_refusals_are_counted_by_class_and_reason_and_zeros_are_there():
    totals = AdmissionTotals()
    ticket = AdmissionTicket("r", "", "batch", is_text=False, work_s=3.0, num_blocks=1, ttft_s=1.0,
                             arrived_at=0.0, encode_s=1.0)  # fmt: skip
    totals.offered(ticket)
    totals.refused(ticket, RefusalReason.FULL)
    found = lines(DoorMetrics("m", list, flow(), totals, ["interactive", "batch"]))
    assert found['epdg_admission_requests_total{admission_class="batch"}'] == 1
    assert found['epdg_admission_refusals_total{admission_class="batch",reason="full"}'] == 1
    assert found['epdg_admission_refusals_total{admission_class="interactive",reason="wait"}'] == 0
    assert (totals.encode_s, totals.prefill_s, totals.prefill_s2) == (1.0, 2.0, 4.0)


def test_the_parts_of_an_ended_request_sum_to_its_latency():
    metrics, timeline = DoorMetrics("m", list, flow()), RequestTimeline(10.0)
    metrics.observe_ended(timeline, 11.0, 5, 0)  # without a first token: not counted
    timeline.prepared(10.5, 11.0)
    timeline.placed(12.0, MagicMock())
    timeline.token(14.0, None, 0.0)
    metrics.observe_ended(timeline, 20.0, 100, 7)
    found = lines(metrics)
    sums = {name: found[f'epdg_{name}_sum{{model_name="m"}}'] for name in (
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    )}  # fmt: skip
    assert list(sums.values()) == [10.0, 1.0, 2.0, 6.0, 100.0, 7.0]
    assert found['epdg_e2e_request_latency_seconds_count{model_name="m"}'] == 1


def test_a_replicas_busy_ratio_is_of_the_time_since_the_last_look():
    clock: Any = SimpleNamespace(now=lambda: clock.at, at=100.0)
    gauges = WorkerGauges(num_blocks=8, clock=clock)
    told: dict[str, float] = {}
    for name in ("_busy", "_memory", "_running", "_waiting"):
        setattr(gauges, name, SimpleNamespace(set=lambda value, name=name: told.update({name: value})))
    gauges.set([LoadReport(busy_s=50.0)])  # before its start: nothing is known
    clock.at = 104.0
    gauges.set([LoadReport(busy_s=51.0, num_used_blocks=2, num_running=1), LoadReport(num_waiting=3)])
    assert told == {"_busy": pytest.approx(0.25), "_memory": 0.25, "_running": 1, "_waiting": 3}


def test_every_reason_is_exported_before_a_request_ended_with_it():
    """Otherwise `rate` would not see the first error of its kind, and no alert either."""
    metrics = DoorMetrics("m", list, flow())
    series = 'epdg_requests_total{{finished_reason="{}",model_name="m"}}'.format
    for reason in ("stop", "length", "tool_calls", "cancelled", "InternalError", "UnavailableError"):
        assert lines(metrics)[series(reason)] == 0
    metrics.finished("InternalError")
    assert lines(metrics)[series("InternalError")] == 1


def test_gaps_between_tokens_are_counted_as_the_client_library_counts():
    """In the buckets of a histogram, with bounds that belong to the bucket below them."""
    metrics, registry = DoorMetrics("m", list, flow()), CollectorRegistry()
    buckets = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5]
    own = Histogram(
        "epdg_inter_token_latency_seconds", "", ("model_name",), buckets=buckets, registry=registry
    )
    for gap_s in (0.0, 0.001, 0.0011, 0.02, 0.02, 2.5, 2.6, 100.0):
        metrics.tokens.gap(gap_s)
        own.labels("m").observe(gap_s)
    metrics.tokens.num += 9
    expected = [line for line in generate_latest(registry).decode().splitlines() if line.startswith("epdg")]
    found = metrics.render().decode().splitlines()
    assert [line for line in expected if "_created" not in line and line not in found] == []
    assert 'epdg_generation_tokens_total{model_name="m"} 9.0' in found
