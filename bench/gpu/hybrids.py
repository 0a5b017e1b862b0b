"""What steps of a hybrid model cost on a GPU: recorded and from Python, with our kernels for the mixers
and with transformers' own code.

A random model of Qwen3.5's form. us: until the device has the logits. Beside the times with our kernels:
which kernels each step launches.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from bench.gpu.kernels import kernels_of
from bench.gpu.machine import DeviceSpeed, median_s, release
from bench.hybrids import Steps, make, mixers_of, without_kernels
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.step_inputs import StepSizes

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
            most, mixed = max(answers), prompts if way == KERNELS else ()  # own code: answers alone
            sizes = RecordedSizes(
                RecordedSizes.up_to(most, 0).answers,
                [StepSizes(count, most + 4, most + 4) for count in mixed],
            )
            recording = recording_of(model, sizes)
            steps = Steps(model, max(answers), recording, -(-max(prompts) // model.block_size) + 1)
            works = [(f"decode at {count}", partial(steps.answers, count), True) for count in answers]
            works += [
                (f"prompt of {count}", partial(steps.prompt, count), count in mixed) for count in prompts
            ]
            for what, work, can_be_recorded in works:
                for is_recorded in (False, True) if recording is not None and can_be_recorded else (False,):
                    call = partial(work, is_recorded=is_recorded)
                    name = f"hybrid {what}, {way}, {'recorded' if is_recorded else 'from Python'}"
                    yield {"what": name, "us": 1e6 * median_s(call, speed.device, ROUNDS)}
                    if way == KERNELS:
                        yield {"what": name, "kernels_of": kernels_of(call, speed.device).record()}
            del steps, recording, works
            release(speed.device)
