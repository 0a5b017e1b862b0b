"""The account of a request as its client gets it: complete, and equal to the time on the wall."""

from __future__ import annotations

import gzip
import http.server
import json
import queue
import random
import threading
import time

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.workload import make_case
from cluster.config.settings import ClusterArgs
from router.api.app import build_api
from tests.flow.local_cluster import LocalCluster, local_cluster
from tests.flow.test_law import cluster_args

HEADERS = {"x-epdg-ledger": "1"}
SLACK_MS = 1.0


def client_of(cluster: LocalCluster) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_api(cluster.door))
    return httpx.AsyncClient(transport=transport, base_url="http://door", timeout=60)


def shown(args: ClusterArgs) -> ClusterArgs:
    """With the names of workers."""
    return args.model_copy(update={"door": args.door.model_copy(update={"show_workers": True})})


@pytest.mark.parametrize("kind", ["text", "image", "video", "audio"])
async def test_the_stages_sum_to_the_wall_time_of_the_first_token(kind):
    case = make_case(random.Random(5), kind)
    async with local_cluster(shown(cluster_args(64))) as cluster, client_of(cluster) as client:
        body = {
            "model": cluster.door.models.model_id,
            "messages": case.messages,
            "temperature": 0,
            "max_tokens": 4,
        }
        for is_first in (True, False):
            started_at = time.monotonic()
            answer = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
            wall_ms = 1e3 * (time.monotonic() - started_at)
            (ledger,) = answer.raise_for_status().json()["ledger"]
            actual = dict(ledger["actual_ms"])
            tail_ms = actual.pop("kv_transfer") + actual.pop("first_step")
            assert sum(actual.values()) == pytest.approx(ledger["ttft_ms"], abs=SLACK_MS)
            assert min(actual.values()) > -SLACK_MS
            assert ledger["ttft_ms"] + tail_ms < wall_ms
            assert actual["prefill"] > 0 and tail_ms > 0
            assert (
                ledger["predicted_ms"]["low"]
                <= ledger["predicted_ms"]["ttft"]
                <= ledger["predicted_ms"]["high"]
            )
            assert ledger["placement"]["decode"].startswith("d0")
            if kind != "text" and is_first:  # later its tokens may be in the prefix cache
                (item,) = ledger["items_ms"]
                assert item["encode"] > 0
            assert answer.headers["x-epdg-ledger"].startswith(f"ttft;dur={ledger['ttft_ms']}")


async def test_the_ledger_of_a_stream_comes_at_its_end_and_in_its_headers():
    case = make_case(random.Random(6), "image")
    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        body = {
            "model": cluster.door.models.model_id,
            "messages": case.messages,
            "max_tokens": 4,
            "stream": True,
        }
        answer = await client.post("/v1/chat/completions", json=body, headers=HEADERS)
        lines = [line for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "data: [DONE]"
        (ledger,) = json.loads(lines[-2].removeprefix("data: "))["ledger"]
        assert answer.headers["x-epdg-ledger"].startswith(f"ttft;dur={ledger['ttft_ms']}")
        assert set(ledger["actual_ms"]) > {"prefill", "first_step"}


class Collector(http.server.BaseHTTPRequestHandler):
    """Of OpenTelemetry spans; keeps what it is sent."""

    sent: queue.Queue[ExportTraceServiceRequest]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.sent.put(ExportTraceServiceRequest.FromString(body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


async def test_a_collector_gets_the_stages_of_every_request():
    class Kept(Collector):
        sent = queue.Queue()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Kept) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        args = cluster_args(64)
        door = args.door.model_copy(
            update={"otlp_traces_endpoint": f"http://127.0.0.1:{server.server_port}/v1/traces"}
        )
        async with (
            local_cluster(args.model_copy(update={"door": door})) as cluster,
            client_of(cluster) as client,
        ):
            body = {"model": cluster.door.models.model_id, "prompt": "a b c", "max_tokens": 4}
            body["min_tokens"] = 4
            trace_parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
            answer = await client.post("/v1/completions", json=body, headers={"traceparent": trace_parent})
            answer.raise_for_status()
        sent = Kept.sent.get(timeout=60)  # closing the door has sent it
        server.shutdown()
    spans = [
        span for resource in sent.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]
    assert {"prefill", "first_step", "decode"} <= {span.name for span in spans}
    assert {span.trace_id.hex() for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
