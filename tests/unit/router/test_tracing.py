"""A ledger as spans: end to end, under the client's own, and true to the ledger."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from cluster.types.timings import EncodeTiming, PrefillTiming
from router.calls import Usage
from router.policy import Decision, ItemPrediction, Placement, Prediction
from router.telemetry.timeline import RequestTimeline
from router.telemetry.tracing import Tracing
from tests.fakes.clock import ManualClock

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
MS = 1_000_000  # nanoseconds


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(spans):
    clock = ManualClock()
    clock.at = 12.0
    tracing = Tracing("demo", clock, SimpleSpanProcessor(spans))
    yield tracing
    tracing.close()


def a_ledger(trace_parent: str = "") -> RequestTimeline:
    """From 10.0 to the first token at 10.5 and the second at 10.6."""
    prediction = Prediction(0.1, 0.2, 0.2, 0.4, 0.01, 0.02, 0.3, 0.7, (ItemPrediction(0.05, 0.1, 0.01),))
    ledger = RequestTimeline(10.0, trace_parent)
    ledger.prepared(10.0, 10.02)
    ledger.placed(10.02, Decision(Placement(("e0",), "p0", "d0", "int8"), prediction, ()))
    ledger.started(10.03)
    ledger.encoded(0, EncodeTiming(encoding_s=0.1, sending_s=0.02), cached=False)
    ledger.token(10.5, PrefillTiming(media_s=0.15, queued_s=0.1, computing_s=0.2), 0.0)
    ledger.token(10.6, None, 0.03)
    return ledger


def by_name(spans: InMemorySpanExporter) -> dict:
    return {span.name: span for span in spans.get_finished_spans()}


def test_the_stages_follow_each_other_and_fill_the_time_of_their_request(tracing, spans):
    tracing.ended(a_ledger(), "stop", Usage(prompt_tokens=7, completion_tokens=9))
    found = by_name(spans)
    root = found.pop("generate_content demo")
    assert list(found) == [
        "probe", "route", "encode_queue", "encode", "embedding_transfer", "prefill_queue", "prefill", "delivery",
        "kv_transfer", "first_step", "decode",
    ]  # fmt: skip
    at = root.start_time
    for span in found.values():
        assert span.parent.span_id == root.context.span_id
        assert span.start_time == pytest.approx(at, abs=MS / 100)
        at = span.end_time
    assert at == pytest.approx(root.end_time, abs=MS / 100)
    assert root.end_time - root.start_time == pytest.approx(2000 * MS, abs=MS / 100)
    prefill = found["prefill"]
    assert prefill.end_time - prefill.start_time == pytest.approx(200 * MS, abs=MS / 100)


def test_a_span_says_what_was_predicted_and_who_served(tracing, spans):
    tracing.ended(a_ledger(), "stop", Usage(prompt_tokens=7, completion_tokens=9))
    said = by_name(spans)["generate_content demo"].attributes
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (7, 9)
    assert said["gen_ai.response.finish_reasons"] == ("stop",)
    assert said["gen_ai.server.time_to_first_token"] == pytest.approx(0.5)
    assert said["epdg.predicted_time_to_first_token"] == pytest.approx(0.43)
    assert (said["epdg.encoders"], said["epdg.prefill"], said["epdg.decode"], said["epdg.codec"]) == (
        ("e0",),
        "p0",
        "d0",
        "int8",
    )


def test_a_request_belongs_to_its_client_s_trace(tracing, spans):
    tracing.ended(a_ledger(f"00-{TRACE}-{PARENT}-01"), "stop", Usage(7, 9))
    root = by_name(spans)["generate_content demo"]
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE, PARENT)


@pytest.mark.parametrize("nonsense", ["", "00-xyz", "00-" + "0" * 32 + "-" + "0" * 16 + "-01", "\x00" * 50])
def test_a_client_s_nonsense_begins_a_trace_of_our_own(tracing, spans, nonsense):
    tracing.ended(a_ledger(nonsense), "stop", Usage(7, 9))
    assert by_name(spans)["generate_content demo"].parent is None


def test_what_was_refused_is_an_error_without_a_first_token(tracing, spans):
    ledger = RequestTimeline(10.0)
    ledger.prepared(10.0, 10.02)
    tracing.ended(ledger, "OverloadedError", Usage(7, 9))
    found = by_name(spans)
    root = found.pop("generate_content demo")
    assert root.status.status_code is StatusCode.ERROR and root.status.description == "OverloadedError"
    assert "gen_ai.server.time_to_first_token" not in root.attributes
    assert list(found) == ["probe"]
