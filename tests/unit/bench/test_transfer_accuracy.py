"""The demo model's answers over KV that travelled: raw answers are those of the whole model, and damage is
seen."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from bench.transfer.accuracy import Comparison, ModelHalves, measure
from bench.transfer.report import accuracy_table
from deploy.demo_model.training.build import load
from deploy.demo_model.training.evaluate import answer, draw_samples
from deploy.demo_model.training.speech import WordBank
from kv_transfer.codecs.pending import done
from kv_transfer.codecs.quantisation import GROUP_TOKENS
from kv_transfer.codecs.wire_memory import Wire

DEMO = Path(__file__).parents[3] / "deploy" / "demo_model"
TASK, SEED = "describe the video", 3
NO_WORDS = WordBank([])


@pytest.fixture(scope="module")
def halves() -> ModelHalves:
    return ModelHalves(DEMO)


def records(halves, carriers):
    found = measure(halves, NO_WORDS, SEED, 2, carriers, ["long"], [TASK])
    return {record["codec"]: record for record in found}


def test_raw_answers_are_those_of_generate(halves):
    whole, asked = load(DEMO), []
    for task in ("two images in order", "text: count", TASK):
        (sample,) = draw_samples(task, SEED, NO_WORDS, 1)
        (said,) = answer(*whole, [sample])
        asked.append(dataclasses.replace(halves.ask(sample, "short", random.Random(0)), answer=said))
    score = Comparison(halves, []).compare(asked, "short")["raw"]
    assert score.right == score.samples == score.same_answers == 3
    assert score.same_top == score.positions > 20


def test_int8_codes_whole_groups_and_counts_what_travelled(halves):
    found = records(halves, ["raw", "int8"])
    raw, int8 = found["raw"], found["int8"]
    assert raw["same_top"] == raw["positions"] == int8["positions"] > 2 * 8
    assert raw["same_answers"] == raw["samples"] == int8["samples"] == int8["coded_prompts"] == 2
    assert raw["divergence"] == raw["coded_tokens"] == raw["coded_bytes"] == 0 < int8["divergence"] < 0.1
    assert int8["coded_tokens"] % GROUP_TOKENS == 0
    assert int8["prompt_tokens"] - 2 * GROUP_TOKENS < int8["coded_tokens"] <= int8["prompt_tokens"]
    assert int8["coded_bytes"] + int8["raw_bytes"] < raw["raw_bytes"] / 2


def test_a_codec_that_destroys_everything_is_seen(halves, monkeypatch):
    def destroy(self, wire_ids, groups):
        for segment in self._kv.segments:
            segment[[block for group in groups for block in group]] = 0
        return done(None)

    monkeypatch.setattr(Wire, "decode", destroy)
    found = records(halves, ["int8"])
    raw, damaged = found["raw"], found["int8"]
    assert raw["right"] == damaged["lost"] == 2
    assert damaged["same_top"] < 0.9 * damaged["positions"]
    assert damaged["same_answers"] == damaged["right"] == 0
    assert damaged["divergence"] > 0.5


def test_the_table_adds_up_the_tasks_and_shows_what_was_lost():
    counts = {"prompts": "long", "samples": 10, "positions": 100, "prompt_tokens": 1280}
    raw = counts | {"codec": "raw", "right": 10, "same_top": 100, "same_answers": 10, "coded_prompts": 0}
    coded = counts | {"codec": "int8", "right": 8, "same_top": 97, "same_answers": 7, "coded_prompts": 5}
    coded |= {"coded_tokens": 640, "lost": 2, "won": 0}
    lines = accuracy_table(one | {"task": task} for task in ("shape", "text") for one in (raw, coded))
    assert lines[-2] == "| long | text | 128 | 50% · 50% | 10 · 8 of 10 | 2, 0 | 100 | 97.00% (3) | 70.00% |"
    assert lines[-1] == "| long | all | 128 | 50% · 50% | 20 · 16 of 20 | 4, 0 | 200 | 97.00% (6) | 70.00% |"
