"""The arithmetic of the live measurements: loads, intervals, tables, what is read from an answer, emulated
devices. No server."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.client import read_stream
from bench.router import live, live_report, overload
from bench.router.client import Answer, Call
from bench.router.devices import EMULATED, Device, _Encoder, _Steps, num_rows, step_s
from bench.router.driver import steady_rate
from bench.router.loads import GROUP_SIZE, PHASES, arrivals, first_shapes, grouped
from bench.router.workers import SERVICES, specs
from cluster.model.language import SequenceChunk
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.media import Modality
from cluster.types.members import Role


def a_call(kind: str = "text") -> Call:
    return Call(0.0, kind, b'{"model":"m"}', 4)


def an_answer(ttft_s: float = 0.2, started_at: float = 0.0, wait_ms: float = 0.0, **fields: Any) -> Answer:
    ledger = {
        "ttft_ms": 1e3 * ttft_s,
        "actual_ms": {"fetch": 1.0, "probe": 2.0, "admission": wait_ms, "route": 3.0, "prefill": 10.0},
        "predicted_ms": {"ttft": 150.0, "low": 100.0, "high": 300.0},
    }
    first_at = started_at + ttft_s
    return Answer("text", started_at, first_at=first_at, num_tokens=4, ledger=ledger, call=a_call(), **fields)


def a_refusal(retry_after_s: float | None = 2.0) -> Answer:
    return Answer("text", status=429, retry_after_s=retry_after_s, failure="HTTP 429: busy", call=a_call())


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n"


async def arriving(lines: list[bytes]) -> AsyncIterator[bytes]:
    for line in lines:
        yield line


def test_the_first_event_with_a_choice_is_the_first_token() -> None:
    answer = Answer("text", 10.0, call=a_call())
    lines = [
        b"\n",
        event(choices=[{"delta": {"role": "assistant"}}]),
        event(choices=[{"delta": {"content": "a"}}]),
    ]
    lines += [
        event(choices=[], ledger=[{"ttft_ms": 500.0}]),
        event(choices=[], usage={"completion_tokens": 4, "prompt_tokens": 9}),
    ]
    instants = iter([11.0, 12.0, 13.0, 14.0])
    asyncio.run(read_stream(arriving([*lines, b"data: [DONE]\n"]), answer, lambda: next(instants)))
    assert (answer.ttft_s, answer.num_tokens, answer.num_prompt_tokens) == (1.0, 4, 9)
    assert answer.ledger == {"ttft_ms": 500.0} and not answer.failure


def test_an_error_in_the_stream_is_the_failure_of_its_answer() -> None:
    answer = Answer("text", call=a_call())
    asyncio.run(read_stream(arriving([event(error={"message": "lost"})]), answer, lambda: 1.0))
    assert "lost" in answer.failure


def test_what_was_predicted_is_compared_with_the_time_from_placing_on() -> None:
    answer = an_answer(ttft_s=0.2)
    assert answer.placed_ttft_s == pytest.approx(0.194)
    assert answer.predicted_s == pytest.approx((0.144, 0.094, 0.294))
    assert Answer("text", call=a_call(), ledger={"ttft_ms": 1.0}).predicted_s is None


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_a_phase_asks_the_same_of_every_policy_and_other_things_in_the_next_repetition(phase: Any) -> None:
    shapes = first_shapes(phase, 50, "1 0")
    assert shapes == first_shapes(phase, 50, "1 0") != first_shapes(phase, 50, "1 1")
    assert all(shape.num_text_tokens > 0 for shape in shapes)


def test_one_member_of_each_group_is_cold_and_it_is_the_first() -> None:
    kinds: dict[int | None, list[str]] = {}
    for shape in islice(grouped(random.Random(3)), 8 * GROUP_SIZE):
        kinds.setdefault(shape.group, []).append(shape.kind)
    assert set(map(tuple, kinds.values())) == {("cold", *["warm"] * (GROUP_SIZE - 1))}


@settings(max_examples=30)
@given(st.floats(0.5, 200), st.integers(1, 300), st.integers())
def test_arrivals_are_ascending_and_as_many_as_asked(rate: float, count: int, seed: int) -> None:
    instants = arrivals(rate, count, random.Random(seed))
    assert len(instants) == count and instants == sorted(instants) and instants[0] > 0


def test_arrivals_come_at_their_rate() -> None:
    instants = arrivals(20.0, 4000, random.Random(1))
    gaps = [later - earlier for earlier, later in zip([0.0, *instants], instants, strict=False)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1 / 20, rel=0.05) and deviation == pytest.approx(mean, rel=0.05)


def test_a_steady_rate_leaves_out_what_began_and_ended_alone() -> None:
    ended_at = [0.0, 5.0, *(10 + 0.1 * number for number in range(11)), 30.0, 40.0]
    assert steady_rate(ended_at, 2) == pytest.approx(10.0)
    with pytest.raises(ValueError, match="too few"):
        steady_rate([1.0, 2.0, 3.0], 1)


def test_workers_of_any_role_can_be_named_and_do_what_their_role_says() -> None:
    options = live.make_parser().parse_args(["--out", "r.jsonl", "--workers", "encode=1,whole=2"])
    assert options.workers == {Role.ENCODE: 1, Role.WHOLE: 2}
    assert SERVICES.keys() == EMULATED.keys() == set(Role)
    for role, curves in EMULATED.items():
        assert (bool(curves.encode), curves.decode is not None) == (role.encodes, role.decodes)


def test_policies_take_turns_at_being_first() -> None:
    orders = [live.rotated(["a", "b", "c"], turn) for turn in range(4)]
    assert [order[0] for order in orders] == ["a", "b", "c", "a"]
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)


@settings(max_examples=15)
@given(st.lists(st.floats(0.01, 10), min_size=2, max_size=30))
def test_a_bootstrap_interval_lies_within_the_sample_and_is_the_same_each_time(values: list[float]) -> None:
    low, high = live_report.bootstrap([values], live_report.p50)
    assert min(values) <= low <= high <= max(values)
    assert (low, high) == live_report.bootstrap([values], live_report.p50)


def test_a_bootstrap_interval_of_the_median_covers_it_about_as_often_as_it_says() -> None:
    rng = random.Random(5)
    intervals = [
        live_report.bootstrap([[rng.gauss(10, 2) for _ in range(25)]], live_report.p50, seed)
        for seed in range(40)
    ]
    assert 0.85 <= sum(low <= 10 <= high for low, high in intervals) / 40 <= 1.0


def test_errors_are_relative_to_what_came_and_coverage_counts_the_borders() -> None:
    assert live_report.error_ratio([1.0, 3.0], [2.0, 2.0]) == 0.5
    assert live_report.coverage([1.0, 1.0, 1.0], [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == pytest.approx(2 / 3)


def a_block(policy: str, scale: float) -> dict[str, Any]:
    answers = [an_answer(scale * (0.1 + 0.001 * number)) for number in range(100)]
    place = {"type": "live", "devices": "emulated", "phase": "grouped", "policy": policy, "repetition": 0}
    kinds = {"kinds": ["cold", "warm"] * 50}
    return place | live.answer_fields(answers) | kinds


def test_the_table_divides_by_the_baseline_of_the_same_phase() -> None:
    lines = live_report.tables([a_block("joint", 0.5), a_block("least_loaded", 1.0)])
    (row,) = [line for line in lines if line.startswith("| grouped | joint | 100 | 75 |")]
    assert "| 0.50 | 0.50 (" in row
    assert sum(line.startswith("| grouped, cold |") for line in lines) == 2
    assert any(line.startswith("| all | joint | 100 |") for line in lines)


def test_a_block_with_a_failed_request_is_no_measurement() -> None:
    with pytest.raises(RuntimeError, match="busy"):
        live.answer_fields([an_answer(), a_refusal()])


def test_a_throttled_call_lasts_as_many_times_as_long_and_another_as_long_as_it_does() -> None:
    slept: list[float] = []
    clock = iter([0.0, 2.0, 5.0])
    device = Device(slowdown=3.0, clock=lambda: next(clock), sleep=slept.append)
    with device.throttled():
        pass
    device.slowdown = 1.0
    with device.throttled():
        pass
    assert slept == [4.0]


class _Nothing:
    """A model that cannot compute."""

    config, feature_width, dtype = None, 8, torch.float32


def a_chunk(count: int, before: int, *, num_logits: int) -> SequenceChunk:
    return SequenceChunk([0] * count, torch.arange(count), before, [0], num_logits=num_logits)


def test_an_emulated_step_sleeps_as_its_curve_says_layer_by_layer_and_answers_with_zeros() -> None:
    slept: list[float] = []
    device = Device(ServiceCurves(prefill=Curve(1.0, 0.1, 0.01)), slowdown=2.0, sleep=slept.append)
    steps = _Steps(_Nothing(), device, num_layers=4, vocab_size=7)  # type: ignore[arg-type]
    chunks = [a_chunk(10, 0, num_logits=1), a_chunk(10, 6, num_logits=0)]
    layers: list[int] = []
    no_kv: Any = None
    logits = steps.forward(chunks, no_kv, lambda layer_idx, ready=None, /: layers.append(layer_idx))
    assert logits.shape == (1, 7) and layers == [0, 1, 2, 3]
    assert step_s(Curve(1.0, 0.1, 0.01), chunks) == pytest.approx(1 + 20 * (0.1 + 0.01 * 3))
    assert sum(slept) == pytest.approx(2 * (1 + 20 * (0.1 + 0.01 * 3)))


def test_an_emulated_encoder_gives_each_item_as_many_rows_as_the_real_one() -> None:
    slept: list[float] = []
    model: Any = _Nothing()
    model.config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    encoder = _Encoder(model, Device(EMULATED[Role.ENCODE], sleep=slept.append))
    items = [{"image_grid_thw": torch.tensor([[1, 8, 8]])}, {"image_grid_thw": torch.tensor([[1, 4, 8]])}]
    assert [rows.shape for rows in encoder.encode(Modality.IMAGE, items)] == [(16, 8), (8, 8)]
    assert slept == [EMULATED[Role.ENCODE].encode[Modality.IMAGE].seconds(24)]
    assert num_rows({"video_grid_thw": torch.tensor([[4, 8, 8]])}, 2) == 64


def test_workers_are_named_by_their_role_and_real_ones_have_no_curves() -> None:
    found = specs({Role.ENCODE: 1, Role.PREFILL: 2}, None)
    assert [spec.replica_id for spec in found] == ["encode-0", "prefill-0", "prefill-1"]
    assert {spec.emulated for spec in found} == {None}
    assert {replica_id for phase in PHASES for replica_id in phase.slow} <= {
        spec.replica_id for spec in specs(live.COUNTS, None)
    }


def test_ten_of_eleven_requests_have_the_heavy_key_and_half_are_of_the_lower_class() -> None:
    senders = overload.draw_senders(5000, random.Random(2))
    assert sum(sender.key == "heavy" for sender in senders) / 5000 == pytest.approx(10 / 11, abs=0.02)
    assert sum(sender.of_class.name == "batch" for sender in senders) / 5000 == pytest.approx(0.5, abs=0.03)


def test_the_last_class_takes_every_priority_above() -> None:
    classes = overload.admission_settings(overload.CLASSES)["classes"]
    assert [each["max_priority"] for each in classes] == [0, None]


INTERACTIVE, BATCH = overload.CLASSES


def test_every_request_of_an_overload_is_counted_once_and_late_ones_are_no_goodput() -> None:
    heavy, light = overload.Sender("heavy", INTERACTIVE), overload.Sender("light", BATCH)
    sent = [
        (heavy, an_answer(0.5, started_at=0.0, wait_ms=100.0)),
        (heavy, an_answer(INTERACTIVE.target_ttft_s + 0.1, started_at=1.0)),  # too late for its class
        (light, an_answer(5.0, started_at=8.0)),  # when no more requests came
        (light, a_refusal()),
        (heavy, a_refusal(None)),
        (heavy, Answer("text", call=a_call(), failure="no answer in time")),
    ]
    for _, answer in sent[3:]:
        answer.started_at = 2.0
    record = overload.summary(sent, window_s=10.0)
    assert (record["answered"], record["refused"], record["failed"]) == (3, 2, 1)
    assert record["goodput"] == 0.1 and record["retry_after_s"] == [2.0, 2.0]
    assert record["groups"]["heavy interactive"]["answered"] == 2
    assert record["groups"]["light batch"]["refused"] == 1
    assert len(overload.table([record | {"factor": 3.0, "capacity": 10.0}])) == 2 + 1 + 4


def test_a_load_that_loses_nothing_has_no_fault_and_each_loss_is_named() -> None:
    sender = overload.Sender("heavy", INTERACTIVE)
    record = overload.summary([(sender, an_answer()), (sender, a_refusal())], 1.0)
    good = record | {"door_answered": 1, "held": []}
    assert overload.faults(good) == []
    assert len(overload.faults(good | {"held": ["a block"], "door_answered": 0, "failed": 1})) == 4
    waited = overload.summary([(sender, an_answer(5.0, wait_ms=3000.0))], 1.0) | {
        "door_answered": 1,
        "held": [],
    }
    assert overload.faults(waited) == ["1 requests that waited beyond their class's limit"]


def test_a_door_counts_ends_by_their_reason() -> None:
    text = "\n".join(
        [
            "# TYPE epdg_requests counter",
            'epdg_requests_total{model_name="m",finished_reason="length"} 3.0',
            'epdg_requests_total{model_name="m",finished_reason="stop"} 1.0',
        ]
    )
    assert overload.finished(text + "\n") == {"length": 3, "stop": 1}


def test_a_priority_becomes_a_field_of_the_body() -> None:
    call = overload.sent_by(overload.Sender("light", BATCH), a_call())
    assert json.loads(call.body) == {"priority": 1, "model": "m"}
    assert call.headers == {"authorization": "Bearer light"}
