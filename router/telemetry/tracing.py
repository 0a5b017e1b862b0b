"""The timeline of a request as OpenTelemetry spans, sent to a collector by OTLP over HTTP.

There is one span for the request, from its arrival at the door to its last token. Its parent is the client's
span if the client sent a `traceparent`. Its children are the timeline's stages that took time, end to end.
Attributes follow OpenTelemetry's conventions for generative AI where there is one. OpenTelemetry's own
environment variables (OTEL_…) set sampling, headers and similar options.

Spans are made on the event loop when a request has ended, and sent from a thread. Spans that the collector
does not accept in time are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from cluster.clock import Clock
from router.calls import Usage
from router.telemetry.timeline import RequestTimeline

SHORTEST_S = 1e-6  # shorter stages have no span
SEND_TIMEOUT_S = 2.0  # retries included
ANSWERED = ("stop", "length", "cancelled")  # outcomes that are not errors


class Tracing:
    def __init__(self, model_id: str, clock: Clock, processor: SpanProcessor):
        """`clock`: that of the timelines."""
        self._model_id = model_id
        self._clock = clock
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "epdg-door"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("epdg")

    def ended(self, timeline: RequestTimeline, outcome: str, usage: Usage) -> None:
        """Is called when a request has ended. `outcome`: a finish reason or the name of an error. With
        several choices, `outcome` and `usage` are the first one's."""
        now, wall_s = self._clock.now(), time.time()

        def at(instant: float) -> int:
            return int(1e9 * (wall_s + instant - now))

        root = self._tracer.start_span(
            f"generate_content {self._model_id}",
            propagate.extract({"traceparent": timeline.trace_parent}),
            SpanKind.SERVER,
            self._attributes(timeline, outcome, usage),
            start_time=at(timeline.arrived_at),
        )
        if outcome not in ANSWERED:
            root.set_status(Status(StatusCode.ERROR, outcome))
        self._add_stages(root, timeline, now, at)
        root.end(at(now))

    def close(self) -> None:
        """Sends the remaining spans, for a limited time. Blocks."""
        self._provider.shutdown()

    def _add_stages(
        self, root: Span, timeline: RequestTimeline, now: float, at: Callable[[float], int]
    ) -> None:
        context = trace.set_span_in_context(root)
        began = timeline.arrived_at
        for name, seconds in (timeline.stages() | timeline.tail()).items():
            if seconds >= SHORTEST_S:
                self._tracer.start_span(name, context, start_time=at(began)).end(at(began + seconds))
            began += max(0.0, seconds)
        if timeline.second_token_at is not None and now > began:
            self._tracer.start_span("decode", context, start_time=at(began)).end(at(now))

    def _attributes(self, timeline: RequestTimeline, outcome: str, usage: Usage) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": "generate_content",
            "gen_ai.request.model": self._model_id,
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.response.finish_reasons": [outcome],
        }
        if timeline.ttft_s is not None:
            attributes["gen_ai.server.time_to_first_token"] = timeline.ttft_s
        decision = timeline.decision
        if decision is not None:
            placement = decision.placement
            attributes |= {
                "epdg.predicted_time_to_first_token": timeline.predicted_ttft_s or 0.0,
                "epdg.encoders": list(placement.encoders),
                "epdg.prefill": placement.prefill,
                "epdg.decode": placement.decode,
                "epdg.codec": placement.codec,
            }
        return attributes


def tracing_to(endpoint: str, model_id: str, clock: Clock) -> Tracing:
    """Returns tracing to a collector. `endpoint`: its address, for example
    http://localhost:4318/v1/traces."""
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=SEND_TIMEOUT_S)
    return Tracing(model_id, clock, BatchSpanProcessor(exporter))
