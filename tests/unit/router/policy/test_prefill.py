"""What is predicted of prefill: against the scheduler that prefill runs, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import RequestError
from cluster.scheduling.chunks import ChunkScheduler
from cluster.scheduling.keys import Ticket
from cluster.types.curves import Curve, Link, ServiceCurves
from cluster.types.members import Role
from router.policy import ClusterView, Placement, Prediction, RequestView, Worker
from router.policy.estimate import Estimate
from tests.fakes.placement import (
    BLOCK,
    ENCODE,
    LINK,
    MAX_TOKENS,
    PREFILL,
    SCHEDULING,
    cluster_of,
    curves_of,
    hashes,
    load,
    media,
    text,
)

AT_P0 = Placement((), "p0", "d0")


def predict(
    cluster: ClusterView, request: RequestView, now: float = 0.0, placement: Placement = AT_P0
) -> Prediction:
    return Estimate(request, cluster, now).prediction(placement)


def send(
    cluster: ClusterView, request: RequestView, placement: Placement = AT_P0, now: float = 0.0
) -> Prediction:
    prediction = predict(cluster, request, now, placement)
    cluster.started(request, placement, prediction, now)
    return prediction


def first_token_s(prompts: Sequence[RequestView]) -> float:
    """Of the last prompt, by prefill's own scheduler: the first one's step has begun when the others come."""
    chunks, computed, now = ChunkScheduler(SCHEDULING), dict.fromkeys((p.request_id for p in prompts), 0), 0.0
    tokens = {prompt.request_id: prompt.num_prompt_tokens for prompt in prompts}

    def add(prompt: RequestView) -> None:
        ticket = Ticket(prompt.request_id, 0.0, prompt.num_prompt_tokens, True, prompt.priority)
        chunks.add(ticket, prompt.num_prompt_tokens)

    waiting = list(prompts)
    add(waiting.pop(0))
    while True:
        step = chunks.schedule(MAX_TOKENS)
        now += PREFILL.seconds(sum(step.values()))
        for request_id, num_tokens in step.items():
            computed[request_id] += num_tokens
            if computed[request_id] < tokens[request_id]:
                chunks.set_computed(request_id, computed[request_id])
                continue
            chunks.remove(request_id)
            if request_id == prompts[-1].request_id:
                return now
        while waiting:
            add(waiting.pop(0))


@given(st.lists(st.tuples(st.integers(1, 2500), st.integers(0, 1)), min_size=1, max_size=8))
def test_text_comes_when_prefills_own_scheduler_gives_it(prompts):
    requests = [text(n, name=f"r{i}", priority=priority) for i, (n, priority) in enumerate(prompts)]
    cluster = cluster_of(num_encoders=0, num_prefills=1, num_decodes=1)
    predictions = [send(cluster, request) for request in requests]
    assert predictions[-1].ttft_s == pytest.approx(first_token_s(requests))


def test_an_idle_worker_computes_at_once():
    prediction = predict(cluster_of(), text(160))
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(160))
    assert (prediction.queue_s, prediction.media_s) == (0.0, 0.0)


def test_what_the_worker_reports_goes_before_and_the_running_step_is_partly_over():
    cluster = cluster_of()
    cluster.reported("p0", load(num_units=1500, num_requests=2), now=1.0)
    prediction = predict(cluster, text(160), now=1.05)
    rest_of_step_s = PREFILL.seconds(MAX_TOKENS) - 0.05
    assert prediction.ttft_s == pytest.approx(rest_of_step_s + PREFILL.seconds(500 + 160))
    assert prediction.queue_s + prediction.prefill_s == pytest.approx(prediction.ttft_s)


def test_a_report_that_counts_a_request_ends_its_charge_and_one_that_cannot_does_not():
    cluster = cluster_of()
    send(cluster, text(160, "a"), now=1.0)
    cluster.reported("p0", load(num_units=0), now=1.0005)
    assert cluster.prefills.sent_units[0] == 160, "it was on its way"
    cluster.reported("p0", load(num_units=160), now=1.01)
    assert (cluster.prefills.reported_units[0], cluster.prefills.sent_units[0]) == (160, 0)


def test_cached_blocks_cost_nothing_but_one_token_is_always_computed():
    cluster = cluster_of()
    cluster.blocks_changed("p0", hashes("text", 10), [])
    assert predict(cluster, text(160)).ttft_s == pytest.approx(PREFILL.seconds(16))
    cluster.blocks_changed("p0", [], hashes("text", 10)[5:6])
    assert predict(cluster, text(160)).ttft_s == pytest.approx(PREFILL.seconds(160 - 5 * 16))


def test_prompts_computed_beside_it_count():
    assert predict(cluster_of(), text(160, num_negative_tokens=40)).ttft_s == pytest.approx(
        PREFILL.seconds(200)
    )


def test_text_before_an_image_is_computed_while_it_is_encoded():
    request = media(400, num_before=600)
    prediction = predict(cluster_of(), request, placement=Placement(("e0",), "p0", "d0"))
    arrival_s = ENCODE.seconds(400) + LINK.seconds(request.media[0].num_bytes)
    assert prediction.items[0].arrival_s == pytest.approx(arrival_s)
    text_s = PREFILL.seconds(1300) + PREFILL.fixed_s  # in two steps
    assert prediction.ttft_s == pytest.approx(max(text_s, arrival_s + PREFILL.seconds(700)))


def test_a_little_text_before_an_image_is_computed_with_it():
    request = media(4000, num_before=5)
    assert PREFILL.seconds(5) < 2 * PREFILL.fixed_s
    prediction = predict(cluster_of(), request, placement=Placement(("e0",), "p0", "d0"))
    tail_s = prediction.ttft_s - prediction.items[0].arrival_s
    num_steps = -(-request.num_prompt_tokens // MAX_TOKENS)
    assert tail_s == pytest.approx(
        PREFILL.seconds(request.num_prompt_tokens) + (num_steps - 1) * PREFILL.fixed_s
    )


def test_an_item_within_the_cached_prefix_is_waited_for_by_nobody():
    cluster, request = cluster_of(), media(4000, num_before=64)
    cluster.blocks_changed("p0", request.block_hashes[: (64 + 1000) // 16 + 1], [])
    prediction = predict(cluster, request, placement=Placement(("e0",), "p0", "d0"))
    assert (prediction.media_s, prediction.items[0].arrival_s) == (0.0, 0.0)
    assert predict(cluster, request, placement=Placement(("e0",), "p1", "d0")).media_s > 0.3


def test_prompts_that_wait_for_their_media_stand_in_nobodys_way():
    cluster = cluster_of()
    send(cluster, media(4000, num_before=0), Placement(("e0",), "p0", "d0"))
    assert predict(cluster, text(160)).ttft_s == pytest.approx(PREFILL.seconds(160))


def test_of_a_prompt_that_waits_for_its_media_the_text_before_it_runs_at_once():
    cluster = cluster_of()
    send(cluster, media(4000, num_before=500), Placement(("e0",), "p0", "d0"), now=1.0)
    left_s = PREFILL.seconds(500) - 0.01
    assert predict(cluster, text(160), now=1.01).ttft_s == pytest.approx(left_s + PREFILL.seconds(160))
    cluster.reported("p0", load(num_units=1500, num_requests=1), now=1.0 + PREFILL.seconds(500))
    assert predict(cluster, text(160), now=1.1).ttft_s == pytest.approx(PREFILL.seconds(160))


def test_embeddings_that_are_late_are_not_taken_to_be_there():
    cluster = cluster_of()
    sent = send(cluster, media(400, num_before=0), Placement(("e0",), "p0", "d0"))
    late = sent.items[0].arrival_s + 0.01
    assert predict(cluster, text(160), now=late).ttft_s == pytest.approx(PREFILL.seconds(160))
    cluster.item_done("media", 0, came_at=late)
    assert predict(cluster, text(160), now=late).ttft_s == pytest.approx(PREFILL.seconds(100 + 160))


def test_a_prompt_whose_media_are_in_its_prefix_waits_for_nobodys_embeddings():
    cluster = cluster_of(num_prefills=1)
    cold, warm = media(4000, name="cold", num_before=0), media(4000, name="warm", num_before=40)
    cluster.blocks_changed("p0", warm.block_hashes, [])
    at_e0 = Placement(("e0",), "p0", "d0")
    assert send(cluster, cold, at_e0).items[0].arrival_s > 0.4
    prediction = predict(cluster, warm, now=0.2, placement=at_e0)
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(8))


def test_what_the_running_step_computes_of_a_prompt_is_there_when_its_turn_comes():
    cluster = cluster_of(num_prefills=1)
    first, second = text(640, "shared"), text(656, "shared")
    send(cluster, RequestView("first", 640, BLOCK, first.block_hashes), now=0.0)
    prediction = predict(cluster, second, now=0.05)
    assert prediction.queue_s == pytest.approx(PREFILL.seconds(640) - 0.05)
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(640) - 0.05 + PREFILL.seconds(16))
    other = predict(cluster, text(656, "other"), now=0.05)
    assert other.ttft_s == pytest.approx(PREFILL.seconds(640) - 0.05 + PREFILL.seconds(656))


def test_a_hybrids_prompt_goes_on_from_the_last_state_that_is_known_or_about_to_be():
    cluster = cluster_of(num_prefills=1)
    first, second = (text(640, "shared", snapshots=hashes("states", 40), **more) for more in ({}, {}))
    cluster.blocks_changed("p0", first.block_hashes[:30], [])
    assert predict(cluster, first).ttft_s == pytest.approx(PREFILL.seconds(640))
    cluster.blocks_changed("p0", first.snapshots[9:10], [])
    assert predict(cluster, first).ttft_s == pytest.approx(PREFILL.seconds(640 - 160))
    send(cluster, first, now=0.0)  # it leaves states at tokens 480 and 624
    prediction = predict(cluster, replace(second, request_id="second"), now=0.02)
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(480) - 0.02 + PREFILL.seconds(16))


def test_a_hybrids_states_travel_behind_its_kv():
    cluster = cluster_of(1, 1, 1)
    request = replace(text(1600), snapshots=hashes("states", 100))
    cluster.blocks_changed("d0", request.block_hashes, [])  # decode has all of the KV
    before = predict(cluster, request)
    cluster.state_bytes = 2e9
    assert predict(cluster, request).transfer_s == pytest.approx(before.transfer_s + 2e9 / LINK.bytes_per_s)


def test_who_has_most_of_it_cached_goes_before_longer_ones():
    cluster = cluster_of(num_prefills=1)
    send(cluster, text(1000, "running"))
    send(cluster, text(1000, "waiting"))
    known = text(4000, "known")
    cluster.blocks_changed("p0", known.block_hashes[:-1], [])
    assert predict(cluster, known).ttft_s < PREFILL.seconds(1000) + PREFILL.seconds(MAX_TOKENS) + 1e-9
    assert predict(cluster, text(4000, "new")).ttft_s > 0.6


def test_a_report_that_comes_in_the_midst_of_a_step_does_not_begin_it_anew():
    cluster = cluster_of()
    send(cluster, text(1000, "a"), now=1.0)
    cluster.reported("p0", load(num_units=1000, num_requests=1), now=1.05)
    assert predict(cluster, text(160), now=1.08).queue_s == pytest.approx(PREFILL.seconds(1000) - 0.08)
    cluster.reported("p0", load(num_units=300, num_requests=1), now=1.11)
    assert predict(cluster, text(160), now=1.12).queue_s == pytest.approx(PREFILL.seconds(300) - 0.01)


def test_text_does_not_wait_for_all_of_a_video_that_is_there():
    cluster = cluster_of()
    cluster.media_changed("e0", ["media-0"], [])
    cluster.measured("e0", curves_of(Role.ENCODE, link=Link(0.0, 1e15)))
    send(cluster, media(20_000, num_before=0), Placement(("e0",), "p0", "d0"), now=0.0)
    cluster.item_done("media", 0, came_at=0.005)
    prediction = predict(cluster, text(160, priority=1), now=0.01)
    assert prediction.ttft_s == pytest.approx(PREFILL.seconds(MAX_TOKENS)), (
        "a part of each step is kept for text"
    )


def test_a_class_of_lower_priority_goes_behind():
    cluster = cluster_of()
    for idx in range(4):
        send(cluster, text(1000, f"r{idx}", priority=1))
    urgent, patient = predict(cluster, text(160)), predict(cluster, text(160, priority=2))
    assert urgent.ttft_s < 0.35 < 0.4 < patient.ttft_s


def test_what_earlier_steps_computed_makes_tokens_dearer():
    cluster = cluster_of(num_prefills=1)
    curves = ServiceCurves(
        prefill=Curve(0.01, 1e-4, 1e-6), max_step_units=MAX_TOKENS, links={"": Link(0, 1e9)}
    )
    cluster.measured("p0", curves)
    assert predict(cluster, text(1000)).ttft_s == pytest.approx(0.01 + 1000 * 1e-4)
    seconds = [
        0.01 + num * (1e-4 + 1e-6 * context) for num, context in ((1000, 0), (1000, 1000), (1000, 2000))
    ]
    assert predict(cluster, text(3000)).ttft_s == pytest.approx(sum(seconds))


def test_an_unmeasured_worker_is_as_fast_as_its_hardware_else_as_its_role_else_a_token_takes_a_tenth_of_a_millisecond():
    cluster = cluster_of(num_prefills=0)
    for name, hardware in (("new", "h"), ("other", "g")):
        _add(cluster, name, hardware)
    assert _ttft(cluster, "new") == pytest.approx(160 * 1e-4)
    _add(cluster, "slow", "g", per_unit_s=3e-4)
    assert _ttft(cluster, "new") == _ttft(cluster, "other") == pytest.approx(160 * 3e-4)
    _add(cluster, "fast", "h", per_unit_s=1e-5)
    assert _ttft(cluster, "new") == pytest.approx(160 * 1e-5)
    assert _ttft(cluster, "other") == pytest.approx(160 * 3e-4)


def test_a_prompt_that_nobody_can_hold_is_refused_with_the_size_that_fits():
    cluster = cluster_of()
    with pytest.raises(RequestError, match="needs 320000 tokens of KV cache; a prefill worker holds 160000"):
        predict(cluster, text(160, num_prefill_blocks=20_000))


def _add(cluster: ClusterView, name: str, hardware: str, per_unit_s: float | None = None) -> None:
    cluster.add(Worker(name, Role.PREFILL, 100, hardware=hardware))
    if per_unit_s is not None:
        cluster.measured(name, ServiceCurves(prefill=Curve(0.0, per_unit_s)))


def _ttft(cluster: ClusterView, name: str) -> float:
    return predict(cluster, text(160), placement=Placement((), name, "d0")).ttft_s


@pytest.mark.parametrize(
    ("queued", "num_waiting"),
    [
        ([MAX_TOKENS, 100, 100, 100], 3.0),  # short prompts after one that fills the step count whole
        ([4 * MAX_TOKENS], 0.75),  # a long one by the part that is left
        ([MAX_TOKENS // 2, MAX_TOKENS], 1.0),  # the second one came when the step had begun
    ],
)
def test_a_prompt_costs_those_that_wait_by_what_is_left_of_each(queued, num_waiting):
    cluster = cluster_of()
    for number, num_tokens in enumerate(queued):
        send(cluster, text(num_tokens, name=f"queued {number}"))
    assert others_delayed(cluster) == pytest.approx(num_waiting, abs=0.02)


def test_a_prompt_with_media_counts_less_once_what_is_before_them_is_computed():
    cluster = cluster_of()
    send(cluster, media(400, num_before=400, name="image"), Placement(("e0",), "p0", "d0"))
    at_once = others_delayed(cluster)
    cluster.reported("p0", load(num_units=700, num_requests=1), now=0.2)
    cluster.reported("p0", load(num_units=500, num_requests=1), now=0.4)
    assert others_delayed(cluster, now=0.4) < at_once - 0.3


def test_a_prompt_costs_those_of_other_doors_that_wait():
    cluster = cluster_of()
    cluster.reported("p0", load(num_units=4 * MAX_TOKENS, num_requests=3), now=1.0)
    assert others_delayed(cluster, now=1.0) == pytest.approx(3 * 0.75, abs=0.02)


def others_delayed(cluster: ClusterView, now: float = 0.0) -> float:
    """For how many prompts at p0 the work of a new one counts."""
    prefills = Estimate(text(160), cluster, now).prefills
    return float(prefills.cost_s[0] / prefills.work_s[0])
