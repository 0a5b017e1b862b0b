"""A door's metrics in Prometheus' text format. One registry per door, no globals. Runs on the door's event
loop.

Request metrics use the names of vLLM's, so that existing dashboards work. There is no work per token:
inter-token latency is observed once per event (one decode step of one request), counters once per request.
Gauges and the workers' totals: `state`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from cluster.errors import KINDS
from router.admission.answers import RefusalReason
from router.admission.controller import AdmissionTotals
from router.flow.request_flow import RequestFlow
from router.members import Peer
from router.telemetry.state import StateCollector
from router.telemetry.timeline import RequestTimeline

_TTFT_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

_LENGTH_BUCKETS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000,
)  # fmt: skip
_LATENCY_BUCKETS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_REASONS = ("stop", "length", "tool_calls", "cancelled")  # besides names of errors
# Histograms of a request that has ended; the names are vLLM's after the prefix
_ENDED = (
    ("e2e_request_latency_seconds", "Arrival at the door until the end of the answer", _LATENCY_BUCKETS_S),
    ("request_queue_time_seconds", "Waiting at the door for admission", _LATENCY_BUCKETS_S),
    ("request_prefill_time_seconds", "Admission until the first token", _LATENCY_BUCKETS_S),
    ("request_decode_time_seconds", "First token until the end of the answer", _LATENCY_BUCKETS_S),
    ("request_prompt_tokens", "Tokens of the prompt", _LENGTH_BUCKETS),
    ("request_generation_tokens", "Tokens of the first choice", _LENGTH_BUCKETS),
)


class DoorMetrics:
    def __init__(
        self,
        model_id: str,
        peers: Callable[[], Iterable[Peer]],
        flow: RequestFlow,
        admission: AdmissionTotals | None = None,
        classes: Sequence[str] = (),
        registry: CollectorRegistry | None = None,
        adapters: Callable[[], Mapping[str, str]] = dict,
    ):
        """`admission`: what it has counted; `classes`: the names of its classes. `adapters`: digests of those
        that are served now, by name."""
        self._registry = registry or CollectorRegistry()
        labels = {"labelnames": ("model_name",), "registry": self._registry}

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(f"epdg_{name}", text, buckets=buckets, **labels).labels(model_id)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"epdg_{name}", text, **labels).labels(model_id)

        text = "Arrival of the request at the door until its first token leaves it"
        self.ttft_s = histogram("time_to_first_token_seconds", text, _TTFT_BUCKETS_S)
        text = "The same as epdg_time_to_first_token_seconds, as predicted when the request was placed"
        self.predicted_ttft_s = histogram("predicted_time_to_first_token_seconds", text, _TTFT_BUCKETS_S)
        self._ended = {name: histogram(name, text, buckets) for name, text, buckets in _ENDED}
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        text = "Prompt tokens whose KV came from the prefix cache"
        self.cached_tokens = counter("prompt_tokens_cached", text)
        self._stage_s = Histogram(
            "epdg_ttft_stage_seconds",
            "Parts of the time to first token, which sum to it",
            ("model_name", "stage"),
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._finished = Counter(
            "epdg_requests",
            "Choices that ended, by reason: stop, length, cancelled, or the name of an error",
            ("model_name", "finished_reason"),
            registry=self._registry,
        )
        for reason in (*_REASONS, *KINDS):
            self._finished.labels(model_id, reason)  # a rate does not see the first count of a new series
        self._model_id = model_id
        self.tokens = TokenMetrics(model_id)
        self._registry.register(self.tokens)
        self._registry.register(StateCollector(peers, flow, adapters))
        self._registry.register(_Admission(admission or AdmissionTotals(), classes))

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model_id, reason).inc()

    def observe_timeline(self, timeline: RequestTimeline) -> None:
        """Is called when the first token of a request is out."""
        for stage, seconds in timeline.stages().items():
            self._stage_s.labels(self._model_id, stage).observe(seconds)
        if timeline.predicted_ttft_s is not None:
            self.predicted_ttft_s.observe(timeline.predicted_ttft_s)

    def observe_ended(self, timeline: RequestTimeline, now: float, num_prompt: int, num_tokens: int) -> None:
        """Is called when a request that got a first token has ended, however. `num_tokens`: those of the
        choice that keeps the timeline."""
        if timeline.first_token_at is None:
            return
        for name, value in (
            ("e2e_request_latency_seconds", now - timeline.arrived_at),
            ("request_queue_time_seconds", timeline.admitted_at - timeline.prepared_at),
            ("request_prefill_time_seconds", timeline.first_token_at - timeline.admitted_at),
            ("request_decode_time_seconds", now - timeline.first_token_at),
            ("request_prompt_tokens", num_prompt),
            ("request_generation_tokens", num_tokens),
        ):
            self._ended[name].observe(value)

    def first_tokens(self) -> dict[float, float]:
        """Returns how many first tokens came within so many seconds, by the bounds of the buckets; the last
        one is infinite."""
        (metric,) = self.ttft_s.collect()
        return {float(each.labels["le"]): each.value for each in metric.samples if "le" in each.labels}

    def render(self) -> bytes:
        return generate_latest(self._registry)


class TokenMetrics(Collector):
    """What is observed for every token event, in plain numbers: the client library's locks cost ten times as
    much, and the event loop needs none."""

    def __init__(self, model_id: str):
        self.num = 0  # tokens
        self._model_id = model_id
        self._num_gaps = [0] * (len(_ITL_BUCKETS_S) + 1)  # by bucket; the last one has no bound
        self._gaps_s = 0.0

    def gap(self, seconds: float) -> None:
        """Counts a gap between consecutive token events of one choice."""
        self._num_gaps[bisect_left(_ITL_BUCKETS_S, seconds)] += 1
        self._gaps_s += seconds

    def collect(self) -> Iterable[Metric]:
        gaps = HistogramMetricFamily(
            "epdg_inter_token_latency_seconds", "Gap between consecutive tokens", labels=("model_name",)
        )
        bounds = map(floatToGoString, (*_ITL_BUCKETS_S, inf))
        buckets = list(zip(bounds, accumulate(self._num_gaps), strict=True))
        gaps.add_metric([self._model_id], buckets, self._gaps_s)
        tokens = CounterMetricFamily("epdg_generation_tokens", "Generated tokens", labels=("model_name",))
        tokens.add_metric([self._model_id], self.num)
        return gaps, tokens


class _Admission(Collector):
    """What admission control has let wait or refused, by class. Zeros are exported, too."""

    def __init__(self, totals: AdmissionTotals, classes: Sequence[str]):
        self._totals, self._classes = totals, classes

    def collect(self) -> Iterable[Metric]:
        arrived = CounterMetricFamily(
            "epdg_admission_requests", "Requests that arrived, by class", labels=("admission_class",)
        )
        refused = CounterMetricFamily(
            "epdg_admission_refusals",
            "Requests that were refused with 429: wait (too long), target (would be missed), full, displaced",
            labels=("admission_class", "reason"),
        )
        for name in self._classes:
            arrived.add_metric([name], self._totals.num_offered[name])
            for reason in RefusalReason:
                refused.add_metric([name, reason.value], self._totals.num_refused[name, reason])
        yield arrived
        yield refused
