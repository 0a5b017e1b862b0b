"""The step benchmark on a tiny model: what it counts, and that its parts are the model's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import step as bench
from bench.rounds import MIN_ROUNDS, in_turns
from bench.step import ModelStep, StepReport, StepTiming
from cluster.model.cpu.library import load
from cluster.model.language import LanguageModel

HIDDEN, MIDDLE, LAYERS, VOCABULARY, KV_WIDTH = 64, 96, 3, 128, 32
LAYER_WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * KV_WIDTH + 3 * MIDDLE)
HEAD_WEIGHTS = HIDDEN * VOCABULARY
STEPS = [ModelStep(1, 20, 1), ModelStep(3, 40, 1), ModelStep(1, 0, 33)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers as hf  # behind cluster.model, which prepares torchvision for it

    path = tmp_path_factory.mktemp("models") / "tiny"
    config = hf.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=MIDDLE, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    hf.Qwen2ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def report(folder: Path) -> StepReport:
    return bench.measure(folder, STEPS, torch.float32, 0.0, bandwidth_bytes=1 << 20)


def test_every_step_has_a_row_with_every_column(report: StepReport) -> None:
    lines = bench.table(report.timings).splitlines()
    assert all(name in lines[0] for name in bench.COLUMNS)
    assert [line[:20].strip() for line in lines[1:]] == ["decode 1 x 20", "decode 3 x 40", "prefill 33"]
    assert all(len(line[20:].split()) == len(bench.COLUMNS) for line in lines[1:])


def test_the_parts_and_the_rest_make_the_whole(report: StepReport) -> None:
    for timing in report.timings:
        assert timing.linears_s + timing.attention_s + timing.rest_s == pytest.approx(timing.whole_s)
        assert timing.floor_s == pytest.approx(timing.num_bytes / report.bandwidth)
        assert min(timing.linears_s, timing.attention_s, timing.whole_s) > 0
        assert load() is None or (timing.kernels_s or 0) > 0
    assert report.best_bandwidth >= report.bandwidth


def test_bytes_are_those_of_all_linears_the_head_and_the_contexts(report: StepReport) -> None:
    weights = 4 * (LAYERS * LAYER_WEIGHTS + HEAD_WEIGHTS)
    token = 4 * LAYERS * 2 * KV_WIDTH
    assert [timing.num_bytes - weights for timing in report.timings] == [20 * token, 120 * token, 0]


def test_operations_are_two_per_weight_and_token_and_the_head_runs_once_a_sequence(
    report: StepReport,
) -> None:
    tokens = [1, 3, 33]
    wanted = [
        2 * (count * LAYERS * LAYER_WEIGHTS + step.batch * HEAD_WEIGHTS)
        for count, step in zip(tokens, STEPS, strict=True)
    ]
    assert [timing.num_operations for timing in report.timings] == wanted


def test_the_attention_alone_writes_where_the_whole_step_does(folder: Path) -> None:
    model = LanguageModel.load(folder, dtype=torch.float32, block_size=bench.BLOCK_SIZE)
    parts, step = bench.ModelParts(folder, torch.float32, load()), ModelStep(2, 17, 1)
    written = []
    for make in (lambda kv: parts.attention_work(kv, step), lambda kv: bench.whole_work(model, kv, step)):
        kv = bench.random_kv(model, [step])
        before = [segment.clone() for segment in kv.segments]
        with torch.inference_mode():
            make(kv)()
        pairs = zip(kv.segments, before, strict=True)
        written.append([(now != old).any(-1).any(-1).nonzero().tolist() for now, old in pairs])
    assert written[0] == written[1] == [[[1, 1], [3, 1]]] * (2 * LAYERS)


def test_all_take_turns_and_the_first_round_does_not_count() -> None:
    calls: list[str] = []
    times = in_turns([lambda: calls.append("a"), lambda: calls.append("b")], 0.0)
    assert calls == ["a", "b"] * (MIN_ROUNDS + 1)
    assert [len(taken) for taken in times] == [MIN_ROUNDS] * 2


def test_what_is_outside_is_measured_in_the_step_or_else_the_rest() -> None:
    times = (ModelStep(4, 200, 1), 10, 20, 1.0, 2.0, 3.0, 10.0)
    assert StepTiming(*times).outside_ratio == 0.5
    assert StepTiming(*times, kernels_s=9.0).outside_ratio == pytest.approx(0.1)


@pytest.mark.skipif(load() is None, reason="no native kernels for this CPU, or no compiler")
def test_a_mixed_step_is_timed_beside_its_parts(folder: Path) -> None:
    model = LanguageModel.load(folder, dtype=torch.float32, block_size=bench.BLOCK_SIZE)
    step = ModelStep(3, 20, 1)
    kv = bench.random_kv(model, [replace(step, new=7)])
    works = bench.mixed_works(model, kv, step, 7)
    logits: dict[str, Any] = {name: work() for name, work in works.items()}
    assert torch.equal(logits["decode"], logits["one-token"])
    assert torch.equal(logits["mixed"], torch.cat([logits["one-token"][:2], logits["chunk"]]))
    rows = [line.split() for line in bench.host_table(model, works, 0.0).splitlines()[1:]]
    assert [row[0] for row in rows] == list(works)
    assert all(0 < float(host) < float(whole) for _, host, _, whole in rows)
