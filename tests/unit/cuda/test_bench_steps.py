"""bench.gpu's steps and its engine on the simulated device: what a machine that is lent for minutes runs must
not fail there for the first time. The profiler's part needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from bench.gpu import steps
from bench.gpu.kernels import KernelSums
from bench.gpu.machine import DeviceSpeed
from bench.gpu.models import SHAPES, write_checkpoint
from bench.gpu.offline import offline_requests
from bench.gpu.steps import StepSizes, attention_step, model_steps
from bench.gpu.throughput import EngineAlone
from tests.fakes.cuda_device import SimulatedCuda

SPEED = DeviceSpeed(torch.device("cuda"), torch.float32, 1e9, 1e9)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    def unprofiled(work, device) -> KernelSums:
        work()
        return KernelSums()

    with SimulatedCuda() as simulated:
        to = hf.PreTrainedModel.to

        def moved(model: hf.PreTrainedModel, place):
            return simulated.put(model) if torch.device(place).type == "cuda" else to(model, place)

        monkeypatch.setattr(hf.PreTrainedModel, "to", moved)
        monkeypatch.setattr(steps, "kernels_of", unprofiled)
        monkeypatch.setattr(steps, "ROUNDS", 1)
        yield simulated


def test_steps_and_attention_are_timed_on_a_device(device: SimulatedCuda) -> None:
    timings = list(model_steps("tiny", SPEED, "auto", StepSizes((1, 2), 32, chunk=24, beside=2, prompt=48)))
    assert [timing.what for timing in timings] == [
        "tiny decode at 1, context 32",
        "tiny decode at 2, context 32",
        "tiny step of 24 prompt tokens",
        "tiny step of 24 prompt tokens, decode at 2, context 32",
        "tiny step of 48 prompt tokens",
    ]
    assert all(timing.seconds > 0 and timing.bound_s > 0 for timing in timings)
    attention_step("tiny attention", "int8", 16, SHAPES["tiny"], 2, 32, SPEED)


def test_the_engine_alone_generates_every_token_on_a_device(device: SimulatedCuda, tmp_path: Path) -> None:
    write_checkpoint(SHAPES["tiny"], tmp_path, SPEED.device, SPEED.dtype)
    sizes = {"decode": {"max_batch_sequences": 2, "kv_blocks": 40}, "prefill": {"kv_blocks": 40}}
    engine, requests = EngineAlone(tmp_path, SPEED, **sizes), offline_requests(3, (5, 20), 99)
    assert engine.compute(requests) > 0
    assert engine.num_tokens == sum(request.num_tokens for request in requests)
