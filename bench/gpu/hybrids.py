"""What steps of a hybrid model cost on a GPU: recorded and from Python, with our kernels for the mixers
and with transformers' own code.

Random models of Qwen3.5's form, and of Nemotron-H's with Mamba 2. s: until one is written, loaded (kernels
compiled and compared with its modules), its steps recorded. us: until the device has the logits. What tells
most comes first. Beside the times with our kernels: which kernels each step launches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from transformers import NemotronHConfig

from bench.gpu.kernels import kernels_of
from bench.gpu.machine import DeviceSpeed, median_s, release
from bench.hybrids import VOCAB_SIZE, Steps, mixers_of, seconds, without_kernels, write, write_config
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.step_inputs import StepSizes, answers_of
from cluster.model.language import LanguageModel

ROUNDS = 10
BLOCKS = ["linear_attention", "mlp"] * 5 + ["linear_attention", "full_attention"]  # of Nemotron-H
# hidden size, layers and vocabulary of Qwen3.5's form; answers of steps, tokens of prompts
SIZES, REHEARSED = (2048, 24, VOCAB_SIZE, (1, 16, 64), (512, 2048)), (256, 4, 999, (1, 2), (280,))
KERNELS, OWN_CODE = "kernels", "transformers' code"


def measure(speed: DeviceSpeed, rehearse: bool) -> Iterator[dict[str, object]]:
    hidden, layers, vocab_size, *steps = REHEARSED if rehearse else SIZES
    writes = {
        "hybrid": lambda folder: write(hidden, layers, folder, speed.dtype, speed.device, vocab_size),
        "Mamba 2": lambda folder: write_config(nemotron(rehearse), folder, speed.dtype, speed.device),
    }
    for what, written in writes.items():
        yield from _measure(what, written, speed, *steps)


def nemotron(rehearse: bool) -> NemotronHConfig:
    """Nemotron-H-8B's form with 12 layers of 52, six of them Mamba 2."""
    blocks = BLOCKS[-4:] if rehearse else BLOCKS
    sizes = (256, 999, 512, 2, 4, 8, 2) if rehearse else (4096, VOCAB_SIZE, 21_504, 8, 32, 128, 8)
    hidden, vocab_size, inner, kv_heads, heads, mamba_heads, groups = sizes
    return NemotronHConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=inner, layers_block_type=blocks,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=128, mamba_num_heads=mamba_heads,
        mamba_head_dim=64, ssm_state_size=128, n_groups=groups,
    )  # fmt: skip


def _measure(
    what: str, written: Callable[[Path], None], speed: DeviceSpeed, answers: Sequence[int],
    prompts: Sequence[int],
) -> Iterator[dict[str, object]]:  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        took_s, _ = seconds(partial(written, Path(folder)))
        yield {"what": f"{what}: write", "s": took_s}
        release(speed.device)
        load = partial(LanguageModel.load, Path(folder), dtype=speed.dtype, device=speed.device)
        took_s, model = seconds(load)
    yield {"what": f"{what}: load", "s": took_s}
    replaced = sum(forward.kernel is not None for forward in mixers_of(model))
    yield {"what": f"{what}: mixers with kernels", "replaced": replaced, "of": len(mixers_of(model))}
    for record in _steps(model, KERNELS, answers, prompts, speed.device):
        yield {**record, "what": f"{what}: {record['what']}"}
    with without_kernels(model):
        for record in _steps(model, OWN_CODE, answers, prompts, speed.device):
            yield {**record, "what": f"{what}: {record['what']}"}


def _steps(
    model: LanguageModel, way: str, answers: Sequence[int], prompts: Sequence[int], device: torch.device
) -> Iterator[dict[str, object]]:
    most, mixed = max(answers), prompts if way == KERNELS else ()  # own code: answers alone
    sizes = RecordedSizes(
        [answers_of(count) for count in answers], [StepSizes(count, most + 4, most + 4) for count in mixed]
    )
    num_blocks = -(-max(prompts) // model.block_size) + 1
    took_s, recording = seconds(partial(recording_of, model, sizes))
    yield {"what": f"record the largest steps, {way}", "s": took_s}
    took_s, steps = seconds(partial(Steps, model, most, recording, num_blocks))
    yield {"what": f"record all steps, {way}", "s": took_s}
    of_answers = {f"decode at {count}": partial(steps.answers, count) for count in answers}
    of_prompts = {f"prompt of {count}": partial(steps.prompt, count) for count in prompts}
    recorded = {} if recording is None else of_answers | (of_prompts if recording.sizes.mixed else {})
    plain = dict([*of_answers.items()][:1]) | of_prompts
    calls = {f"{what}, {way}, recorded": partial(each, is_recorded=True) for what, each in recorded.items()}
    calls |= {f"{what}, {way}, from Python": each for what, each in plain.items()}
    for what, call in calls.items():
        yield {"what": what, "us": 1e6 * median_s(call, device, ROUNDS)}
    for what, call in calls.items() if way == KERNELS else ():
        yield {"what": what, "kernels_of": kernels_of(call, device).record()}
    del steps, recording, of_answers, of_prompts, recorded, plain, calls
    release(device)
