"""What steps of a hybrid model cost on a GPU: recorded and from Python, with our kernels for the mixers
and with transformers' own code.

A random model of Qwen3.5's form. us: until the device has the logits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from bench.gpu.machine import DeviceSpeed, median_s, release
from bench.hybrids import Steps, make, mixers_of, without_kernels
from cluster.model.cuda.graphs import RecordedSizes, recording_of

ROUNDS = 10
# hidden size, layers, answers of steps, tokens of prompts
SIZES, REHEARSED = (2048, 24, (1, 16, 64), (512, 2048)), (256, 4, (1, 2), (280,))
KERNELS, OWN_CODE = "kernels", "transformers' code"


def measure(speed: DeviceSpeed, rehearse: bool) -> Iterator[dict[str, object]]:
    hidden, layers, answers, prompts = REHEARSED if rehearse else SIZES
    with tempfile.TemporaryDirectory() as folder:
        model = make(hidden, layers, Path(folder), speed.dtype, speed.device)
    replaced = sum(forward.kernel is not None for forward in mixers_of(model))
    yield {"what": "mixers with kernels", "replaced": replaced, "of": len(mixers_of(model))}
    for way in (KERNELS, OWN_CODE):
        with nullcontext() if way == KERNELS else without_kernels(model):
            recording = recording_of(model, RecordedSizes.up_to(max(answers), 0))
            steps = Steps(model, max(answers), recording, -(-max(prompts) // model.block_size) + 1)
            for count in answers:
                for is_recorded in (False, True) if recording is not None else (False,):
                    step_s = median_s(
                        partial(steps.answers, count, is_recorded=is_recorded), speed.device, ROUNDS
                    )
                    how = "recorded" if is_recorded else "from Python"
                    yield {"what": f"hybrid decode at {count}, {way}, {how}", "us": 1e6 * step_s}
            for count in prompts:
                step_s = median_s(partial(steps.prompt, count), speed.device, ROUNDS)
                yield {"what": f"hybrid prompt of {count}, {way}, from Python", "us": 1e6 * step_s}
            del steps, recording
            release(speed.device)
