"""Steps of answers with LoRA adapters of rank 16 on all linears, against the same steps without: 0.5B's and
7B's shapes, everything after the loading as a worker does it. Adapters are random."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu.formats import language_of, model_of
from bench.gpu.machine import DeviceSpeed, release
from bench.gpu.models import SHAPES
from bench.gpu.steps import WorkerSteps, blocks_of
from cluster.config.adapters import AdapterRoom
from cluster.model.cuda.coded_products import whole_product
from cluster.model.slot_matrices import Update

NUM_ADAPTERS, RANK = 8, 16
CONTEXT, ANSWERS = 2048, (1, 8, 64)


@torch.inference_mode()
def measure(speed: DeviceSpeed, rehearse: bool) -> Iterator[dict[str, object]]:
    """price: a step's time with the adapters, less 1 of that without."""
    context, answers = (32, (1, 2)) if rehearse else (CONTEXT, ANSWERS)
    for name in ("tiny",) if rehearse else ("0.5b", "7b"):
        model = model_of(None, SHAPES[name], speed, whole_product)
        sizes = {
            path: (linear.in_features, linear.out_features)
            for path, linear in model.model.named_modules()
            if isinstance(linear, torch.nn.Linear)
        }
        num_blocks = max(answers) * blocks_of(context + 1)
        room = AdapterRoom(NUM_ADAPTERS, RANK, is_open=True)
        language = language_of(model, max(answers), 0, num_blocks, room)
        for slot in range(1, NUM_ADAPTERS + 1):
            updates = {
                path: Update(0.02 * torch.randn(RANK, inputs), 0.02 * torch.randn(outputs, RANK))
                for path, (inputs, outputs) in sizes.items()
            }
            language.model.write_adapter(slot, updates)
        steps = WorkerSteps(language, SHAPES[name], speed)
        for batch in answers:
            plain_s = None
            for number in (0, 1, NUM_ADAPTERS):
                what = f"{name}, decode at {batch}, {number} adapters"
                timing = steps.timed(what, steps.decode(batch, context, number), batch, context, 0)
                plain_s = plain_s or timing.step_s
                how = "recorded" if timing.kernels.num_replays else "from Python"
                times = {"us": 1e6 * timing.seconds, "step_us": 1e6 * timing.step_s}
                yield {"what": what, "how": how, **times, "price": timing.step_s / plain_s - 1}
        del model, language, steps
        release(speed.device)
