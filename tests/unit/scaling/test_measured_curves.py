"""The planner's curves of an H100 give the times that an H100 took."""

import json
from itertools import chain
from pathlib import Path

import pytest

from deploy.simulator.hardware import H100, VL_7B, curves

RECORDS = Path(__file__).parents[3] / "bench/gpu/results-2026-11-27.jsonl"
COMMIT = "1ca1cc9f"
CONTEXT = 2048


@pytest.fixture(scope="module")
def measured_s() -> dict[str, float]:
    records = map(json.loads, RECORDS.read_text().splitlines())
    of_commit = (each for each in records if each["commit"] == COMMIT and "us" in each)
    return {each["what"]: each["us"] * 1e-6 for each in of_commit}


def test_steps_of_seven_billion_parameters(measured_s: dict[str, float]) -> None:
    worker = curves(VL_7B, H100, "pd")
    assert worker.prefill is not None and worker.decode is not None
    prompts = {f"7b step of {num} prompt tokens": worker.prefill.seconds(num, num / 2) for num in (512, 2048)}
    answers = {
        f"7b decode at {num}, context {CONTEXT}": worker.decode.seconds(num, CONTEXT) for num in (1, 32, 64)
    }
    for what, seconds in chain(prompts.items(), answers.items()):
        assert seconds == pytest.approx(measured_s[what], rel=0.06), what


def test_images_in_a_tower_of_twelve_of_thirty_two_layers(measured_s: dict[str, float]) -> None:
    encode = curves(VL_7B, H100, "e").encode
    assert encode is not None
    (curve,) = set(encode.values())
    num_parameters = 245.7e6  # of the tower in bench/gpu/encoders.py, a quarter of its merger
    part = num_parameters / VL_7B.num_vision_parameters
    for num, what in ((1, "1 image of 224²"), (16, "16 images of 224²")):
        rows = num * 256 / 4
        seconds = 12 / 32 * curve.fixed_s + part * curve.per_unit_s * rows
        assert seconds == pytest.approx(measured_s[what], rel=0.1), what
