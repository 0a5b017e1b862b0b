"""A 429 says what was measured and what the limit is, in the texts that docs/admission.md lists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from cluster import overload
from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from router.admission.answers import AdmissionRefusal, Admitted, Capacity, Queued, RefusalReason
from router.admission.fair_queue import AdmissionTicket
from router.admission.queue import PLANNED_SHARE, SPEED_WINDOW_S, AdmissionQueue
from router.http.errors import error_body

PAGE = Path(__file__).parents[3] / "docs" / "admission.md"
TEXTS = (
    overload.would_wait(12.34, "batch", 5.0, 4.0),
    overload.has_waited(5.0, "batch", 5.0),
    overload.would_miss_target(3.21, "interactive", 5.0, 1.6),
    overload.has_missed_target(3.1, 1.9, "interactive", 5.0),
    overload.lacks_blocks(50, 12, 400),
    overload.queue_is_full(700, "batch", 1024),
    overload.made_room(700, "batch", 1024),
    overload.body_bytes(600, 400, 1000),
    overload.kept_bytes(600, 400, 1000),
    overload.kept_readers(32),
    overload.media_bytes(1100, "tenant", 1000),
    overload.no_slot("downloads of media", 30.0, 32, 32),
    overload.no_slot("processes that open long media", 60.0, 3, 2),
    overload.no_slot("threads that parse large bodies", 60.0, 3, 2),
    overload.encoder_rows(9000, 8192),
)


def ticket(
    name: str, *, tenant: str = "", work_s: float = 1.0, num_blocks: int = 1, ttft_s: float = 1.0
) -> AdmissionTicket:
    return AdmissionTicket(name, tenant, "all", True, work_s, num_blocks, ttft_s, arrived_at=0.0)


def busy_queue(
    *, max_wait_s: float = 60.0, target_ttft_s: float = 0.0, max_queued: int = 9
) -> AdmissionQueue:
    """One prefill worker with as much work as it takes, half of 100 KV blocks used, and one request that
    waits."""
    only = AdmissionClassArgs(name="all", max_wait_s=max_wait_s, target_ttft_s=target_ttft_s)
    queue = AdmissionQueue(AdmissionArgs(classes=(only,), max_queued=max_queued), 0.0, Capacity(1, 1, 100))
    for idx in range(2):
        queue.offer(ticket(f"busy {idx}", num_blocks=25), 0.0)
    queue.offer(ticket("waits", work_s=3.0), 0.0)
    return queue


def refusal(queue: AdmissionQueue, offered: AdmissionTicket, now: float = 0.0) -> str:
    answer = queue.offer(offered, now)
    assert isinstance(answer, AdmissionRefusal)
    return answer.to_error().message


def test_the_page_lists_every_text():
    listed = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert listed == [text.removeprefix("the server is busy: ") for text in TEXTS]


def test_the_page_shows_the_body_of_the_answer():
    error = AdmissionRefusal(12, RefusalReason.WAIT, TEXTS[0]).to_error()
    shown = re.findall(r'^{"error": .*}$', PAGE.read_text(), re.MULTILINE)
    assert [json.loads(each) for each in shown] == [json.loads(error_body(error))]


def test_a_predicted_wait_is_refused_with_the_wait_the_class_and_its_limit():
    queue = busy_queue(max_wait_s=3.0)
    expected = overload.would_wait(3.0 / 1.1, "all", 3.0, PLANNED_SHARE * 3.0)  # 1.1: the queue's speed
    assert refusal(queue, ticket("next", work_s=2.5)) == expected
    assert refusal(queue, ticket("long", num_blocks=60)).endswith(overload.lacks_blocks(60, 50, 100))


# Workers that encode, that prefill, and that do both
TOPOLOGIES = {"E/PD": (1, 2, 0), "EP/D": (2, 2, 2), "EPD": (3, 3, 3), "E and EPD": (2, 1, 1)}


@pytest.mark.parametrize(("topology", "cluster_s"), [*zip(TOPOLOGIES, (1.0, 0.75, 0.5, 0.75), strict=True)])
def test_a_predicted_wait_counts_the_time_of_a_worker_once(topology, cluster_s):
    """Of requests with a second of encoding and half a second of prefill. `cluster_s`: what the cluster takes
    for one of them while all workers have work."""
    num_encoders, num_prefills, num_both = TOPOLOGIES[topology]
    num_admitted = 2 * min(num_encoders, num_prefills)  # one in work and one behind it
    speed = 1 + (num_admitted - 1) * cluster_s / SPEED_WINDOW_S
    max_wait_s = 15.5 * cluster_s / speed / PLANNED_SHARE
    only = AdmissionClassArgs(name="all", max_wait_s=max_wait_s)
    capacity = Capacity(num_encoders, num_prefills, 1000, num_both)
    queue = AdmissionQueue(AdmissionArgs(classes=(only,)), 0.0, capacity)
    offered = [
        AdmissionTicket(f"r{idx}", "", "all", False, 1.5, 1, 1.5, 0.0, encode_s=1.0)
        for idx in range(num_admitted + 17)
    ]
    answers = [queue.offer(each, 0.0) for each in offered]
    assert answers[:-1] == [Admitted()] * num_admitted + [Queued()] * 16
    expected = overload.would_wait(16 * cluster_s / speed, "all", max_wait_s, PLANNED_SHARE * max_wait_s)
    assert isinstance(answers[-1], AdmissionRefusal) and answers[-1].to_error().message == expected


def test_a_target_that_would_be_missed_is_named_with_what_it_leaves():
    queue = busy_queue(target_ttft_s=6.0)
    expected = overload.would_miss_target(3.0 / 1.1, "all", 6.0, PLANNED_SHARE * 2.0)
    assert refusal(queue, ticket("next", ttft_s=4.0)) == expected


@pytest.mark.parametrize(
    ("target_ttft_s", "expected"),
    [(0.0, overload.has_waited(4.5, "all", 4.0)), (5.0, overload.has_missed_target(4.5, 1.0, "all", 5.0))],
)
def test_a_request_that_waited_in_vain_is_told_how_long(target_ttft_s, expected):
    queue = busy_queue(max_wait_s=4.0 + target_ttft_s, target_ttft_s=target_ttft_s)
    [(_, answer)] = queue.expired(4.5)
    assert answer.message == expected


def test_a_full_queue_says_how_many_wait_and_how_many_of_them_are_the_clients():
    queue = busy_queue(max_queued=2)
    assert queue.offer(ticket("second"), 0.0) == Queued()
    assert refusal(queue, ticket("third")) == overload.queue_is_full(2, "all", 2)
    assert queue.offer(ticket("other", tenant="other"), 0.0) == Queued()
    [(_, answer)] = queue.expired(0.0)
    assert answer.message == overload.made_room(2, "all", 2)
