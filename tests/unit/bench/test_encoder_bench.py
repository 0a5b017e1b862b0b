"""The arithmetic of bench/encoder: loads, steps of the baseline, what is read from a cluster, tables. No server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import clusters, metrics
from bench.client import TimedAnswer
from bench.encoder import mixed, report, reuse
from bench.encoder.__main__ import COMMANDS, make_parser
from bench.encoder.clients import required, tally
from bench.encoder.crowd import ENCODER_ITEMS
from bench.encoder.models import CALL_ARGUMENTS, processor_config
from bench.encoder.overlap import Texts, slow_down
from bench.encoder.synchronous import SynchronousDoor, SynchronousEngine, fill_step
from bench.engine.prompts import Prompts
from bench.records import append, read
from cluster.config.settings import ClusterArgs
from cluster.errors import RequestError
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.api.app import build_api
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model"
METRICS = """\
# TYPE epdg_encoder_items counter
epdg_encoder_items_total{pool="encode",replica="a",result="encoded"} 3.0
epdg_encoder_items_total{pool="encode",replica="b",result="encoded"} 4.0
epdg_encoder_items_total{pool="encode",replica="a",result="cached"} 9.0
"""


def a_record(text: str = "red", failure: str = "") -> TimedAnswer:
    return TimedAnswer("image", 1.0, [1.5], 2.0, num_tokens=1, texts={0: text}, failure=failure)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 64))
def test_a_step_of_the_baseline_is_full_or_takes_everybody_in_order(
    missing: list[int], max_tokens: int
) -> None:
    counts = fill_step(missing, max_tokens)
    assert sum(counts) == min(sum(missing), max_tokens)
    assert counts[:-1] == missing[: len(counts) - 1] and 0 < counts[-1] <= missing[len(counts) - 1]


def one_token(prompt: tuple[int, ...], max_tokens: int = 1) -> GenerateRequest:
    return GenerateRequest("r", Prompt(prompt), (SamplingParams(),), StopParams(max_tokens))


def test_the_baseline_answers_the_same_however_long_its_steps_are() -> None:
    prompts = [tuple(range(10 + idx, 60 + 3 * idx)) for idx in range(3)]

    async def answers(max_batch_tokens: int) -> list[tuple[int, ...]]:
        args = ClusterArgs.model_validate(
            {"model": str(DEMO), "prefill": {"max_batch_tokens": max_batch_tokens, "kv_blocks": 64}}
        )
        engine = SynchronousEngine(args, torch.float32)
        streams = [
            engine.generate(ClientRequest(one_token(prompt), (), (), RequestTimeline(0.0)))[0]
            for prompt in prompts
        ]
        async with asyncio.timeout(60):
            return [event.token_ids for stream in streams async for event in stream]

    whole, cut = asyncio.run(answers(2048)), asyncio.run(answers(32))
    assert whole == cut and [len(token_ids) for token_ids in whole] == [1, 1, 1]


async def test_the_baseline_streams_its_token_over_http() -> None:
    args = ClusterArgs.model_validate({"model": str(DEMO), "prefill": {"kv_blocks": 64}})
    door = SynchronousDoor(args, SynchronousEngine(args, torch.float32))
    messages = [{"role": "user", "content": "hello"}]
    asked = {"model": args.model_id, "messages": messages, "max_tokens": 1, "stream": True}
    transport = httpx.ASGITransport(app=build_api(door))
    async with asyncio.timeout(60), httpx.AsyncClient(transport=transport, base_url="http://door") as client:
        answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200 and answer.text.count('"content":') and "[DONE]" in answer.text


def test_the_baseline_refuses_longer_answers() -> None:
    with pytest.raises(RequestError):
        asked = ClientRequest(one_token((1,), max_tokens=2), (), (), RequestTimeline(0.0))
        SynchronousEngine.generate(object.__new__(SynchronousEngine), asked)


def test_the_video_stands_early_in_the_middle_and_late() -> None:
    places = [mixed.place_of(repetition, 4, 31) for repetition in range(4)]
    assert places == [4, 12, 20, 28]


def test_no_system_and_no_burst_always_begins() -> None:
    orders = [mixed.order_of(repetition, ["text", "video"], ["a", "b"]) for repetition in range(4)]
    assert len({order[0] for order in orders}) == 4 and all(len(set(order)) == 4 for order in orders)


def test_a_burst_with_the_video_has_the_same_texts_and_one_more() -> None:
    load = mixed.BurstLoad(num_text=3, text_words=8, num_frames=4, side=32)
    burst = load.with_video(Prompts(0), 2, "key")
    assert [request.kind for request in burst] == ["text", "text", "video", "text"]
    assert [request for request in burst if request.kind == "text"] == load.texts(Prompts(0), "key")


def test_only_the_prefix_turn_has_the_beginning_of_the_turn_before() -> None:
    cold, warm, known = (reuse.turn(Prompts(0), name, [], 0) for name in reuse.TURNS)
    beginnings, questions = (
        [each.messages[0]["content"][place] for each in (cold, warm, known)] for place in (0, -1)
    )
    assert beginnings[0] != beginnings[1] == beginnings[2]
    assert len({part["text"] for part in questions}) == 3


def test_refusals_are_no_failures_and_answers_are_compared() -> None:
    records = [
        a_record(),
        a_record(),
        a_record("blue"),
        a_record(failure="HTTP 429: later"),
        a_record(failure="gone"),
    ]
    found = tally(records)
    assert (found.num_answered, found.num_refused, found.num_failed, found.num_different) == (3, 1, 1, 2)
    assert found.failures == ("gone",)


def test_times_of_failed_requests_are_not_used() -> None:
    assert required([a_record()]) == [a_record()]
    with pytest.raises(RuntimeError, match="image: gone"):
        required([a_record(), a_record(failure="gone")])


def test_counters_are_summed_over_replicas_and_may_be_missing() -> None:
    assert metrics.counter(METRICS, ENCODER_ITEMS, result="encoded") == 7.0
    assert metrics.counter(METRICS, ENCODER_ITEMS) == 16.0
    assert metrics.counter(METRICS, "epdg_nothing_total") is None
    assert metrics.grown("", METRICS, ENCODER_ITEMS, result="cached") == 9.0
    assert metrics.grown(METRICS, METRICS, ENCODER_ITEMS, result="cached") == 0.0
    assert metrics.grown(METRICS, "", ENCODER_ITEMS) is None


def test_a_cluster_differs_from_the_deployed_one_in_what_was_asked_for() -> None:
    args = clusters.settings(["prefill.kv_blocks=512", "prefill.step_target_s=0.1", "transport=collective"])
    config = clusters.configuration(args, {"Door": 2}, port=1234)
    (application,) = config["applications"]
    replicas = {each["name"]: each["num_replicas"] for each in application["deployments"]}
    assert replicas == {"Encode": 1, "Prefill": 1, "Decode": 1, "Door": 2}
    assert config["http_options"]["port"] == 1234
    assert ClusterArgs.model_validate(application["args"]).prefill.kv_blocks == 512


def test_texts_have_about_as_many_tokens_as_asked_for() -> None:
    from cluster.text.tokenizer import TextProcessor

    texts, tokenizer = Texts(str(DEMO), 0), TextProcessor.load(DEMO)
    counts = [len(tokenizer.text_prompt(texts.part(2048)["text"])) for _ in range(3)]
    assert all(abs(count - 2048) < 2048 * 0.05 for count in counts)


def test_a_slow_runner_only_takes_longer() -> None:
    class Runner:
        def encode(self, modality, pieces):
            return [modality, *pieces]

    runner: Any = Runner()
    slow_down(runner, 0.0)
    assert runner.encode("image", ["a", "b"]) == ["image", "a", "b"]


@given(st.floats(0.001, 10), st.floats(0.001, 10))
def test_best_is_no_worse_than_the_sum_and_no_better_than_the_longest_part(
    text_s: float, image_s: float
) -> None:
    for case, num_images in (("one", 1), ("two", 2)):
        best, worst = report.hidden_bounds(case, text_s, image_s)
        assert max(text_s, num_images * image_s) <= best * (1 + 1e-9) <= worst * (1 + 1e-6)


def test_the_processor_of_the_large_encoders_keeps_what_it_does_not_change() -> None:
    import json

    demo = json.loads((DEMO / "processor_config.json").read_text())
    made = processor_config(demo)
    assert made["processor_class"] == demo["processor_class"]
    assert made["image_processor"]["patch_size"] == 14 != demo["image_processor"]["patch_size"]
    assert made["video_processor"]["size"] == CALL_ARGUMENTS["videos_kwargs"]["size"]
    assert made["feature_extractor"]["n_samples"] == 480_000


def test_records_are_kept_as_they_come_and_say_where_they_are_from(tmp_path: Path) -> None:
    def broken():
        yield {"type": "curve", "batch": 1}
        raise RuntimeError("stopped")

    out = tmp_path / "results.jsonl"
    with pytest.raises(RuntimeError):
        append(out, broken())
    (record,) = read([out])
    assert record["batch"] == 1 and record["machine"] and record["date"]


ORIGIN = {"machine": "2 cores", "commit": "abc", "date": "2026-11-21"}


def curve(batch: int, repetition: int, seconds: float) -> report.Record:
    return {
        "type": "curve", "model": "m", "million_parameters": 2.1, "dtype": "float32", "threads": 2, "modality": "image",
        "batch": batch, "repetition": repetition, "seconds": seconds, "cpu_s": seconds, "rows": 10 * batch, **ORIGIN,
    }  # fmt: skip


CURVE = [*(curve(1, idx, seconds) for idx, seconds in enumerate((0.010, 0.030, 0.020))),
         *(curve(4, idx, seconds) for idx, seconds in enumerate((0.020, 0.060, 0.040)))]  # fmt: skip


def test_a_batch_is_compared_with_single_items_of_the_same_repetition() -> None:
    assert (
        report.curve_table(CURVE)[-1]
        == "| m | 2 | float32, 2 | image | 4 | 40.0 | 10.0 | 0.50 | 1000 | 50% |"
    )


def burst(system: str, name: str, ttfts_s: list[float], answers: list[str]) -> report.Record:
    return {
        "type": "mixed", "system": system, "model": "m", "dtype": "float32", "load": "2 texts", "burst": name,
        "repetition": 0, "place": 1, "kinds": ["text", "video", "text"] if name == "video" else ["text", "text"],
        "answers": answers, "ttfts_s": ttfts_s, **ORIGIN,
    }  # fmt: skip


def test_means_of_bursts_are_compared_between_and_within_systems() -> None:
    records = [
        burst("cluster", "text", [1.0, 1.0], ["a", "b"]), burst("cluster", "video", [1.0, 4.0, 1.0], ["a", "v", "c"]),
        burst("synchronous", "text", [1.0, 1.0], ["a", "b"]), burst("synchronous", "video", [1.0, 4.0, 5.0], ["a", "v", "d"]),
    ]  # fmt: skip
    ours, theirs, ratio = report.mixed_table(records)[-3:]
    assert ours == "| m in float32, 2 texts | cluster | 4000 | 2000 | 1000 | 1000 | 1.00 | 1000 | |"
    assert theirs.startswith("| m in float32, 2 texts | synchronous | 4000 | 3333 | 3000 | 1000 | 3.00 |")
    assert ratio == "| m in float32, 2 texts | ratio | 1.00 | 0.60 | 0.33 | 1.00 | | | 4 of 5 |"


def test_later_turns_are_compared_with_the_first_of_their_repetition() -> None:
    shared = {
        "type": "reuse",
        "model": "m",
        "media": "video",
        "prompt_tokens": 500,
        "prefix_tokens": 16,
        "items_encoded": None,
    }
    records = [
        {**shared, "turn": turn, "repetition": idx, "ttft_s": ttft_s * (idx + 1)}
        for idx in range(3)
        for turn, ttft_s in (("cold", 0.9), ("encoder cache", 0.3))
    ]
    assert report.reuse_table(records)[-1] == "| m | video | encoder cache | 500 | 16 | – | 600 | 3.00 |"


CROWD = {
    "requests": 200,
    "seconds": 5.0,
    "num_answered": 199,
    "num_refused": 1,
    "num_failed": 0,
    "num_different": 1,
}


def test_a_crowd_shows_how_often_was_encoded() -> None:
    record = {"type": "single", "door_cpu_s": [1.0, 2.0], "items_encoded": 1.0, **CROWD}
    assert report.single_table([record])[-1] == "| 200 | 1.0 · 2.0 | 1 | 199 | 1 | 0 | 1 | 5.0 |"


def test_a_flood_that_needs_more_than_its_budget_is_named() -> None:
    sizes = {"resident_bytes": 100 << 20, "peak_bytes": 180 << 20, "budget_bytes": 64 << 20}
    lines = report.flood_table(
        [{"type": "flood", **sizes, **CROWD}, {"type": "flood", **sizes, **CROWD, "peak_bytes": 160 << 20}]
    )
    assert lines[-2] == "| 200 | 199 | 1 | 0 | 100 | 180 | 80 | 64 | no | 5.0 |"
    assert lines[-1] == "| 200 | 199 | 1 | 0 | 100 | 160 | 60 | 64 | yes | 5.0 |"


def test_what_overlaps_is_compared_with_the_longest_part_and_the_sum() -> None:
    times = {"text": 0.3, "image": 0.2, "one": 0.33, "two": 0.5}
    records = [
        {
            "type": "overlap",
            "model": "m",
            "text_tokens": 2048,
            "case": case,
            "repetition": 0,
            "ttft_s": ttft_s,
        }
        for case, ttft_s in times.items()
    ]
    assert report.overlap_table(records)[2:] == [
        "| m | 2048 | one | 330 | 300 | 500 | 1.10 | 0.66 | 300 | 200 |",
        "| m | 2048 | two | 500 | 400 | 700 | 1.25 | 0.71 | 300 | 200 |",
    ]


def test_tables_name_every_kind_and_its_origin_and_nothing_that_is_not_there() -> None:
    lines = report.tables(CURVE)
    assert lines[0] == "**curve** (2 cores, commit abc, 2026-11-21)" and lines[2:-1] == report.curve_table(
        CURVE
    )


@pytest.mark.parametrize(
    "command", sorted(set(COMMANDS) - {"models", "synchronous", "serve", "accuracy", "table"})
)
def test_every_measurement_runs_without_further_arguments(command: str) -> None:
    args = make_parser().parse_args([command, "--out", "results.jsonl"])
    assert args.repeats > 1 and args.command in COMMANDS


def test_a_command_behind_serve_is_left_to_it() -> None:
    args = make_parser().parse_args(
        ["serve", "--doors", "2", "single", "--out", "r.jsonl", "--requests", "5"]
    )
    assert args.doors == 2 and args.then == ["single", "--out", "r.jsonl", "--requests", "5"]


def test_a_wrong_command_behind_serve_is_refused_before_a_cluster_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.encoder.__main__.running", lambda _: pytest.fail("a cluster has started"))
    with pytest.raises(SystemExit, match="2"):
        COMMANDS["serve"](make_parser().parse_args(["serve", "flood"]))
    assert "required: --out" in capsys.readouterr().err
