"""The native linears, gated MLPs and norms against torch's, in every variant that this CPU runs; building and
falling back; whole tiny models before and after `optimise`.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cluster.errors import InternalError
from cluster.model.cpu.library import Kernels, load
from cluster.model.cpu.modules import NativeRmsNorm, PackedGatedMlp, PackedLinear, PackedWeights, optimise
from tests.unit.model.native_kernels import LOADED, best_kernels, each_dtype, each_variant, needs_kernels

# Not imported above: transformers' model classes come after cluster.model, which prepares torchvision for
# them.
LlamaMLP = hf.models.llama.modeling_llama.LlamaMLP
GemmaRMSNorm = hf.models.gemma.modeling_gemma.GemmaRMSNorm
LlamaRMSNorm = hf.models.llama.modeling_llama.LlamaRMSNorm

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}  # relative, of a whole result

pytestmark = [needs_kernels, pytest.mark.usefixtures("seeded")]


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def exact(linear: nn.Linear, x: Tensor) -> Tensor:
    bias = None if linear.bias is None else linear.bias.double()
    return F.linear(x.double(), linear.weight.double(), bias)


# Linears


@each_variant
@each_dtype
@settings(max_examples=40)
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 12, 19, 191, 193, 400]),
    inputs=st.integers(1, 200),
    outputs=st.integers(1, 200),
    bias=st.booleans(),
)
def test_a_linear_of_any_shape_equals_torchs(kernels: Kernels, dtype, rows, inputs, outputs, bias):
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    x = torch.randn(rows, inputs).to(dtype)
    actual = PackedLinear(linear, kernels)(x)
    assert actual.dtype == dtype
    assert actual.shape == (rows, outputs)
    assert relative_error(actual, exact(linear, x)) < ROUNDING[dtype]


@each_variant
@each_dtype
def test_a_long_sum_over_several_chunks_equals_torchs(kernels: Kernels, dtype):
    linear = nn.Linear(9001, 33).to(dtype)
    for rows in (1, 9, 40):
        x = torch.randn(rows, 9001).to(dtype)
        assert relative_error(PackedLinear(linear, kernels)(x), exact(linear, x)) < 2 * ROUNDING[dtype]


@each_variant
@each_dtype
@pytest.mark.parametrize("int8", [False, True], ids=["lossless", "int8"])
def test_a_rows_result_depends_on_no_other_row_and_not_on_threads(kernels: Kernels, dtype, int8, two_threads):
    packed = PackedLinear(nn.Linear(1100, 300).to(dtype), kernels, int8=int8)
    x = torch.randn(250, 1100).to(dtype)
    together = packed(x)
    two_threads(1)
    assert torch.equal(packed(x), together)
    assert torch.equal(torch.cat([packed(row[None]) for row in x]), together)
    assert torch.equal(torch.cat([packed(rows) for rows in x.split(11)]), together)


@each_variant
def test_leading_dimensions_strides_and_empty_batches_are_kept(kernels: Kernels):
    linear = nn.Linear(24, 10)
    packed = PackedLinear(linear, kernels)
    x = torch.randn(4, 24, 3).transpose(1, 2)
    torch.testing.assert_close(packed(x), linear(x))
    assert packed(x[:0]).shape == (0, 3, 10)
    assert (packed.in_features, packed.out_features) == (24, 10)
    assert packed.bias is linear.bias
    assert (packed.weight.numel(), packed.weight.dtype) == (0, linear.weight.dtype)


@each_variant
@pytest.mark.parametrize(
    "x", [torch.zeros(2, 23), torch.zeros(2, 24, dtype=torch.bfloat16)], ids=["width", "dtype"]
)
def test_inputs_of_another_width_or_dtype_are_refused(kernels: Kernels, x: Tensor):
    with pytest.raises(InternalError):
        PackedLinear(nn.Linear(24, 10), kernels)(x)
    with pytest.raises(InternalError):
        NativeRmsNorm(LlamaRMSNorm(24), kernels)(x)


@each_variant
def test_not_a_number_and_infinity_stay_in_their_row(kernels: Kernels):
    packed = PackedLinear(nn.Linear(31, 70, bias=False).bfloat16(), kernels)
    x = torch.randn(9, 31).bfloat16()
    x[4, 7] = float("nan")
    x[6, 30] = float("inf")
    finite = packed(x).isfinite().all(-1)
    assert finite.tolist() == [row not in (4, 6) for row in range(9)]
    assert packed(x)[4].isnan().all()


@each_variant
@each_dtype
@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    inputs=st.integers(1, 150),
    outputs=st.integers(1, 100),
    scale=st.floats(1e-3, 1e3),
)
def test_int8_errors_stay_within_half_a_step_of_each_operand(
    kernels: Kernels, dtype, rows, inputs, outputs, scale
):
    linear = nn.Linear(inputs, outputs).to(dtype)
    x = (scale * torch.randn(rows, inputs)).to(dtype)
    expected = exact(linear, x)
    error = (PackedLinear(linear, kernels, int8=True)(x).double() - expected).abs()
    x_peak, w_peak = x.double().abs().amax(1, keepdim=True), linear.weight.double().abs().amax(1)
    x_sum, w_sum = x.double().abs().sum(1, keepdim=True), linear.weight.double().abs().sum(1)
    half_x, half_w = x_peak / 254, w_peak / 254
    bound = half_x * w_sum + half_w * x_sum + inputs * half_x * half_w
    assert (error <= 1.01 * bound + ROUNDING[dtype] * expected.abs() + 1e-6 * scale).all()


@each_variant
def test_int8_takes_rows_and_weights_of_zeros(kernels: Kernels):
    linear = nn.Linear(40, 20)
    linear.weight[3] = 0
    x = torch.randn(3, 40)
    x[1] = 0
    y = PackedLinear(linear, kernels, int8=True)(x)
    torch.testing.assert_close(y[1], linear.bias)
    torch.testing.assert_close(y[:, 3], linear.bias[3].expand(3))


# ------------------------------------------------------------------------------------------------- gated MLPs
# and norms


def mlp_of(hidden: int, intermediate: int, dtype: torch.dtype) -> LlamaMLP:
    config = hf.LlamaConfig(
        hidden_size=hidden, intermediate_size=intermediate, head_dim=8, num_attention_heads=1
    )
    mlp = LlamaMLP(config).to(dtype).eval()
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn_like(parameter) / parameter.shape[1] ** 0.5)
    return mlp


@each_variant
@each_dtype
@pytest.mark.parametrize(
    ("rows", "hidden", "intermediate"), [(1, 64, 96), (7, 33, 50), (13, 70, 129), (200, 32, 1)]
)
def test_a_gated_mlp_equals_torchs(kernels: Kernels, dtype, rows, hidden, intermediate):
    mlp = mlp_of(hidden, intermediate, dtype)
    x = 3 * torch.randn(1, rows, hidden).to(dtype)
    assert relative_error(PackedGatedMlp(mlp, kernels)(x), mlp(x)) < ROUNDING[dtype]


@each_variant
def test_a_gated_mlp_rounds_where_torch_rounds(kernels: Kernels):
    mlp = mlp_of(64, 512, torch.bfloat16)
    x = 2 * torch.randn(64, 64).bfloat16()
    actual = PackedWeights(kernels, mlp.gate_proj.weight, up=mlp.up_proj.weight)(x)
    expected = F.silu(mlp.gate_proj(x)) * mlp.up_proj(x)
    assert (actual != expected).float().mean() < 0.01


@each_variant
def test_silu_is_right_far_from_zero(kernels: Kernels):
    mlp = mlp_of(1, 1, torch.float32)
    for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.weight.fill_(1.0)
    x = torch.tensor([-1e4, -100.0, -88.0, -20.0, -1e-6, 0.0, 1e-6, 20.0, 88.0, 1e4])[:, None]
    torch.testing.assert_close(PackedGatedMlp(mlp, kernels)(x), F.silu(x) * x, rtol=2e-6, atol=1e-30)


@each_variant
@each_dtype
@pytest.mark.parametrize("width", [1, 15, 64, 200, 896])
@pytest.mark.parametrize("shifted", [False, True])
def test_an_rms_norm_equals_transformers(kernels: Kernels, dtype, width, shifted):
    norm = (GemmaRMSNorm if shifted else LlamaRMSNorm)(width, eps=1e-5).to(dtype)
    norm.weight.copy_(torch.randn(width))
    x = 4 * torch.randn(3, 70, width).to(dtype)
    actual, expected = NativeRmsNorm(norm, kernels, shifted=shifted)(x), norm(x)
    assert relative_error(actual, expected) < (1e-6 if dtype == torch.float32 else 1e-4)


# Whole models

_TINY: dict[str, Any] = {
    "vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": None, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
_TINY_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
FAMILIES = {
    "qwen2": lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_TINY, tie_word_embeddings=True)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_TINY)),
    "gemma": lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**_TINY)),
    "qwen2_moe": lambda: hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(**_TINY, **_TINY_MOE)),
}


def tiny(family: str) -> hf.PreTrainedModel:
    model = FAMILIES[family]().eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def optimised(model: hf.PreTrainedModel, **options) -> hf.PreTrainedModel:
    model = copy.deepcopy(model)
    head = optimise(model.model, model.lm_head, **{"kernels": best_kernels, **options})
    assert head is not None
    model.lm_head = head
    return model


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    return sum(type(module) is kind for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_answers_the_same_tokens_after_optimise(family):
    model: Any = tiny(family)
    native: Any = optimised(model)
    ids = torch.randint(1, 131, (3, 9))
    options = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(native.generate(ids, **options), model.generate(ids, **options))
    torch.testing.assert_close(native(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_all_that_is_understood_is_replaced_and_a_tied_embedding_stays():
    native = optimised(tiny("qwen2"))
    assert count(native, nn.Linear) == 0
    assert count(native, PackedGatedMlp) == 2
    assert count(native, NativeRmsNorm) == 5
    assert native.get_input_embeddings().weight.shape == (131, 64)


def test_norms_may_add_one_and_mlps_with_gelu_stay_what_they_are():
    native = optimised(tiny("gemma"))
    norms = [module for module in native.modules() if isinstance(module, NativeRmsNorm)]
    assert [norm.is_shifted for norm in norms] == [True] * 5
    assert count(native, PackedGatedMlp) == 0
    assert count(native, PackedLinear) == 2 * 7 + 1


class DoublingLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class SquaringMlp(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) ** 2


def test_what_computes_something_else_is_not_replaced():
    model = nn.ModuleDict({
        "subclass": DoublingLinear(8, 8),
        "float16": nn.Linear(8, 8).half(),
        "mlp": SquaringMlp(hf.LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1)),
    })  # fmt: skip
    assert optimise(model, DoublingLinear(8, 8), best_kernels) is None
    assert [type(model[name]) for name in model] == [DoublingLinear, nn.Linear, SquaringMlp]
    assert count(model["mlp"], PackedLinear) == 3


def test_a_listened_to_linear_is_not_replaced():
    linear = nn.Linear(8, 8)
    linear.register_forward_hook(lambda *_: None)
    assert optimise(nn.ModuleDict({"linear": linear}), linear, best_kernels) is None


def test_int8_weights_change_logits_little_but_are_used():
    model = tiny("llama")
    native = optimised(model, weight_dtype="int8")
    ids = torch.randint(1, 131, (2, 20))
    assert 1e-4 < relative_error(native(ids).logits, model(ids).logits) < 0.1


def test_the_process_has_one_openmp_runtime():
    lines = Path("/proc/self/maps").read_text().splitlines()
    files = {line.split()[-1] for line in lines if ".so" in line}
    assert len([path for path in files if Path(path).name.startswith(("libgomp", "libomp", "libiomp"))]) == 1


def test_the_best_variant_is_loaded_once():
    kernels = load()
    assert kernels is load()
    assert kernels is not None
    assert kernels.variant == next(iter(LOADED))
