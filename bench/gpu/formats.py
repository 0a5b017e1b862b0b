"""Steps of 7B's shape with linears that keep their codes, against bfloat16. Codes are random: no checkpoint
is written or read. Everything after the loading is a worker's: the comparison of products, fused layers,
recorded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from bench.gpu.machine import DeviceSpeed, release
from bench.gpu.models import SHAPES, ModelShape, config_of
from bench.gpu.steps import BLOCK_SIZE, WorkerSteps, blocks_of
from cluster.config.adapters import NO_ADAPTERS, AdapterRoom
from cluster.kvcache.memory import BlockMemory
from cluster.model.adapters import AdapterSlots
from cluster.model.attention_cuda import CudaAttention
from cluster.model.cuda.coded_choice import keep_right_codes
from cluster.model.cuda.coded_products import whole_product
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs
from cluster.model.language import LanguageModel
from cluster.model.language_parts import on_kernels, probed_parts
from cluster.model.layers.codes import RUN, WORDS, CodedLinear, CodedProduct, CodeKind, Codes
from cluster.worker.language import Language

PLAIN, FP8, NIBBLES = "bf16", "fp8 in blocks of 128", "4 bits in groups of 128, with zeros"
MXFP4, NVFP4 = "MXFP4", "NVFP4"
ANSWERS, CONTEXT, PROMPTS = (1, 16, 64), 2048, (512, 2048)
_STD = 0.02  # of a weight
_E4M3_END, _E4M3_STD = 0x70, 32.0  # of codes that are drawn: from 0 to below 128
_NIBBLE_STD, _E2M1_STD = 4.6, 2.9
_EXPONENT = 120  # of MXFP4's scales, plus 127: its codes are about 3


@dataclass(frozen=True)
class Form:
    kind: CodeKind
    group: int
    scale_rows: int = 1
    has_zeros: bool = False
    scales: torch.dtype = torch.bfloat16

    def codes(self, num_rows: int, width: int, device: torch.device) -> Codes:
        grid = -(-num_rows // self.scale_rows), -(-width // self.group)
        if self.kind in (CodeKind.NIBBLE, CodeKind.E2M1):
            shape = num_rows, -(-width // RUN), WORDS
            numbers = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, device=device)
        else:
            numbers = torch.randint(_E4M3_END, (num_rows, width), dtype=torch.uint8, device=device)
        std = _STD / {CodeKind.NIBBLE: _NIBBLE_STD, CodeKind.E2M1: _E2M1_STD}.get(self.kind, _E4M3_STD)
        scales = torch.full(grid, std, dtype=self.scales, device=device)
        if self.scales == torch.uint8:
            scales.fill_(_EXPONENT)
        zeros = torch.full(grid, 8, dtype=torch.uint8, device=device) if self.has_zeros else None
        return Codes(self.kind, numbers, scales, zeros, width, self.group, self.scale_rows)


FORMS: dict[str, Form | None] = {
    PLAIN: None,
    FP8: Form(CodeKind.E4M3, 128, 128),
    NIBBLES: Form(CodeKind.NIBBLE, 128, has_zeros=True),
    NVFP4: Form(CodeKind.E2M1, 16, scales=torch.float32),
}

EXPERT_FORMS: dict[str, Form] = {
    FP8: Form(CodeKind.E4M3, 128, 128),
    NIBBLES: Form(CodeKind.NIBBLE, 128, has_zeros=True),
    MXFP4: Form(CodeKind.E2M1, 32, scales=torch.uint8),
}


def measure(speed: DeviceSpeed, rehearse: bool) -> Iterator[dict[str, object]]:
    """`right`: the part of the linears whose products are those of their plain weights."""
    shape = SHAPES["tiny" if rehearse else "7b"]
    context, answers, prompts = (32, (1, 2), (24,)) if rehearse else (CONTEXT, ANSWERS, PROMPTS)
    for name, form in FORMS.items():
        model = model_of(form, shape, speed, by_torch if rehearse else whole_product)
        if form is not None:
            before = _num_coded(model)
            keep_right_codes(model, speed.dtype, experts_forward)
            yield {"what": f"{name}, right", "right": _num_coded(model) / before}
        num_blocks = max(answers) * blocks_of(context + 1) + blocks_of(max(prompts))
        language = language_of(model, max(answers), max(prompts), num_blocks)
        steps = WorkerSteps(language, shape, speed)
        for batch in answers:
            work = steps.decode(batch, context)
            yield _record(f"{name}, decode at {batch}", steps, work, batch, 0)
        for chunk in prompts:
            work = steps.mixed(0, context, chunk)
            yield _record(f"{name}, prompt of {chunk}", steps, work, 0, chunk)
        del model, language, steps, work
        release(speed.device)


def by_torch(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    return F.linear(x, codes.plain(x.dtype), bias)


def _record(
    what: str, steps: WorkerSteps, work: Callable[[], Tensor], num_answers: int, chunk: int
) -> dict[str, object]:
    timing = steps.timed(what, work, num_answers, CONTEXT, chunk)
    how = "recorded" if timing.kernels.num_replays else "from Python"
    gib = steps.language.model.weight_bytes / (1 << 30)
    times = {"us": 1e6 * timing.seconds, "step_us": 1e6 * timing.step_s}
    return {"what": what, "how": how, **times, "weights_gib": gib}


def model_of(
    form: Form | None, shape: ModelShape, speed: DeviceSpeed, product: CodedProduct
) -> hf.PreTrainedModel:
    with torch.device(speed.device):
        model = hf.AutoModelForCausalLM.from_config(config_of(shape), dtype=speed.dtype)
    model = model.eval().requires_grad_(False)
    linears = [
        (parent, name, linear)
        for parent in model.model.modules()
        for name, linear in parent.named_children()
        if type(linear) is nn.Linear
    ]
    while form is not None and linears:  # each goes before the next is made
        parent, name, linear = linears.pop()
        codes = form.codes(linear.out_features, linear.in_features, speed.device)
        setattr(parent, name, CodedLinear(codes, linear.bias, product))
    merge_inputs(model, speed.device)
    return model


def language_of(
    model: hf.PreTrainedModel, max_answers: int, max_prompt_tokens: int, num_blocks: int,
    adapters: AdapterRoom = NO_ADAPTERS,
) -> Language:  # fmt: skip
    """The model as a worker runs it."""
    parts = probed_parts(model, BLOCK_SIZE, "auto")
    if adapters.num_slots:
        weight = parts.embed.weight
        parts = replace(parts, adapters=AdapterSlots(parts.text, adapters, weight.device, weight.dtype))
    if isinstance(parts.attention, CudaAttention):
        parts = on_kernels(parts, CudaLayerKernels(parts.embed.weight.dtype, parts.attention))
    language = LanguageModel(parts)
    recording = recording_of(language, RecordedSizes.up_to(max_answers, max_prompt_tokens))
    num_padding = 0 if recording is None else recording.num_blocks
    kv = BlockMemory(language.kv_layout, num_blocks + num_padding, language.device)
    steps = language if recording is None else recording.over(language, kv)
    return Language(language, steps, kv, num_blocks, None)


def _num_coded(model: nn.Module) -> int:
    return sum(isinstance(module, CodedLinear) for module in model.modules())
