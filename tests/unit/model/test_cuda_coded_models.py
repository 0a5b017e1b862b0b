"""Whole tiny models of quantised checkpoints whose linears compute from their codes, in Triton's interpreter,
which has to be asked for: TRITON_INTERPRET=1. Greedy tokens are those of `generate` with the dequantised
weights; what the loader does with the codes needs no interpreter."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.config.checkpoint import check_weights, weight_files
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.coded_loading import CodedLoading
from cluster.model.cuda.coded_choice import CODED_KERNELS
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs, merged_codes
from cluster.model.dequantising import plain_tensors
from cluster.model.language import LanguageModel
from cluster.model.language_parts import LanguageParts, on_kernels, probed_parts
from cluster.model.layers.codes import CodedExperts, CodedKernels, CodedLinear, Codes
from cluster.model.loading import Half, load_half
from cluster.model.support import text_of
from tests.fakes.slow_params import often
from tests.flow.quantised_folders import (
    FP8_ENTRY,
    MXFP4_ENTRY,
    Checkpoint,
    declared,
    dequantised,
    fused_fp8,
    in_fp8_blocks,
    in_mxfp4,
    is_expert,
    is_linear,
    plain,
    quantised,
    with_entries,
)
from tests.flow.quantised_formats import FORMS, in_form
from tests.unit.model.test_cuda_whole_layer import (
    ATTENTION,
    LAYERS,
    MLP,
    WHOLE,
    generated,
    greedy,
    what_is_fused,
)

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
CASES = (  # family, format, what is fused
    ("llama", "W4A16", WHOLE),
    ("llama", "modelopt fp8", WHOLE),
    ("qwen2", "AWQ", WHOLE),
    ("qwen2", "compressed fp8 in blocks", WHOLE),
    ("qwen3", "GPTQ of 8 bits", WHOLE),
    ("qwen3", "NVFP4", WHOLE),
    ("qwen3_moe", "compressed NVFP4", ATTENTION),
    ("phi3_window", "W4A16 with zeros", WHOLE),
    ("qwen2_5_vl", "compressed fp8 by rows", WHOLE),
    ("gemma2_softcap_window", "GPTQ", LAYERS),
    ("qwen3_moe", "AWQ", ATTENTION),
    ("gpt_oss_sinks_window", "MXFP4", ATTENTION),
    ("qwen3_moe", "fp8 in blocks", ATTENTION),
    ("cohere2_logit_scale", "fp8 with static scales", None),
    ("deepseek_v3_mla", "W4A16 by rows", MLP),
    ("qwen3_vl_moe", "one tensor in blocks of 16, transposed", ATTENTION),
    ("qwen3_vl_moe", "AWQ for each", ATTENTION),
    ("gpt_oss_sinks_window", "compressed fp8 in blocks for each", ATTENTION),
    ("mistral4_mla", "one tensor with a scale for a matrix", MLP),
)
ONE_TENSOR = {  # of experts, in fp8: rows and columns of a block, whether columns come first
    "one tensor in blocks of 16, transposed": (16, True),
    "one tensor in blocks of 48, transposed": (48, True),  # the last ones are not full
    "one tensor in blocks of 48": (48, False),
    "one tensor with a scale for a matrix": (0, False),
}
HOLDING = {  # experts, unlike the others
    "gpt_oss_sinks_window": {"columns_first": True, "alternates": True}, "aria": {"columns_first": True},
}  # fmt: skip


def product_of_plain(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    return nn.functional.linear(x, codes.plain(x.dtype), bias)


def is_of_text(name: str) -> bool:
    return is_linear(name) and "visual" not in name and "vision_tower" not in name and "projector" not in name


def folders(family: str, form: str, folder: Path) -> tuple[Path, Checkpoint]:
    """A quantised checkpoint, and the plain one that it stands for."""
    original = plain(family, folder / "original")
    if form == "MXFP4":
        stored = declared(quantised(original, in_mxfp4, is_expert), MXFP4_ENTRY)
        expected = dequantised(stored)
    elif form in ONE_TENSOR:
        block, is_hub = ONE_TENSOR[form]
        stored, expected = fused_fp8(original, block, is_hub=is_hub)
    elif form.endswith(" for each"):  # whose plain checkpoints have experts in one tensor
        entries = with_entries(original, **HOLDING.get(family, {}))
        stored, _ = in_form(entries, FORMS[form.removesuffix(" for each")], is_of_text)
        expected = whole(stored, folder / "entries")
    elif form == "fp8 in blocks":  # as the official folders
        stored = declared(quantised(original, in_fp8_blocks, is_of_text), FP8_ENTRY)
        expected = dequantised(stored)
    else:
        stored, expected = in_form(original, FORMS[form], is_of_text)
    expected = expected.copied()
    expected.config.pop("quantization_config", None)
    expected.save(folder / "plain")
    return stored.save(folder / "stored"), expected


def whole(stored: Checkpoint, folder: Path) -> Checkpoint:
    """As it is dequantised."""
    path, of_text = stored.save(folder), "vision_config" not in stored.config
    halves = [
        load_half(path, half, dtype=torch.float32, device="cpu")
        for half in ([Half.LANGUAGE] if of_text else Half)
    ]
    tensors = {name: tensor for half in halves for name, tensor in half.state_dict().items()}
    return Checkpoint(stored.config, tensors, stored.model_class)


def coded(model: nn.Module) -> dict[str, CodedLinear]:
    return {name: each for name, each in model.named_modules() if isinstance(each, CodedLinear)}


def experts_of_plain(experts: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Gated, one expert after the other."""
    out = torch.zeros_like(x)
    for expert in range(len(experts.down_proj)):
        token, place = (chosen == expert).nonzero(as_tuple=True)
        first, second = (own.of(expert).plain(x.dtype) for own in (experts.gate_up_proj, experts.down_proj))
        has_bias = experts.has_bias
        first_bias = experts.gate_up_proj_bias[expert] if has_bias else None
        rows = experts._apply_gate(nn.functional.linear(x[token], first, first_bias))
        products = nn.functional.linear(rows, second, experts.down_proj_bias[expert] if has_bias else None)
        out.index_add_(0, token, products * weights[token, place, None])
    return out


OF_PLAIN = CodedKernels(product_of_plain, experts_of_plain)


def coded_experts(model: nn.Module) -> dict[str, CodedExperts]:
    return {name: each for name, each in model.named_modules() if isinstance(each, CodedExperts)}


def load(folder: Path, kernels: CodedKernels = OF_PLAIN, dtype: torch.dtype = torch.float32):
    return load_half(folder, Half.LANGUAGE, dtype=dtype, device="cpu", coded=kernels)


def fused(folder: Path) -> LanguageParts:
    parts = probed_parts(load(folder, CODED_KERNELS), 16, "auto")
    with torch.inference_mode():
        merge_inputs(parts.model, torch.device("cpu"))
    attention = CudaAttention(TorchAttention(), num_processors=2)
    kernels = CudaLayerKernels(torch.float32, attention, is_timed=False)
    return on_kernels(replace(parts, attention=attention), kernels)


@interpreted
@pytest.mark.parametrize(("family", "form", "what"), often(CASES, (CASES[1], CASES[2], CASES[9], CASES[11])))
def test_a_model_of_codes_gives_the_tokens_of_generate(
    family: str, form: str, what: str | None, tmp_path: Path
) -> None:
    stored, expected = folders(family, form, tmp_path)
    parts = fused(stored)
    assert what_is_fused(parts) == what
    model = LanguageModel(parts)
    assert greedy(model, BlockMemory(model.kv_layout, 4)) == generated(
        expected.model_class.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    )


@pytest.mark.parametrize("form", ["AWQ", "modelopt fp8", "W4A16 with zeros", "GPTQ of 8 bits"])
@pytest.mark.parametrize("family", ["llama", "qwen2_5_vl", "qwen3_moe"])
def test_linears_and_experts_keep_their_codes_and_all_else_is_plain(
    family: str, form: str, tmp_path: Path
) -> None:
    stored, _ = folders(family, form, tmp_path)
    model, expected = (
        load(stored),
        load_half(tmp_path / "plain", Half.LANGUAGE, dtype=torch.float32, device="cpu"),
    )
    names = {name for name in expected.state_dict() if is_of_text(name) and ".experts." not in name}
    linears, experts = coded(model), coded_experts(model)
    assert {f"{name}.weight" for name in linears} == names
    assert {*experts} == {name for name in expected.state_dict() if ".experts." in name}
    for name, parameter in expected.named_parameters():
        if name in experts:
            found = experts[name].codes.plain(torch.float32).view(parameter.shape)
        else:
            found = (
                linears[name.removesuffix(".weight")].weight if name in names else model.get_parameter(name)
            )
        assert torch.equal(found, parameter), name


@pytest.mark.parametrize(
    ("family", "form"),
    [
        *(("qwen3_vl_moe", form) for form in (*ONE_TENSOR, "AWQ for each")),
        ("mistral4_mla", [*ONE_TENSOR][3]),
        *(("gpt_oss_sinks_window", f"{form} for each") for form in ("AWQ", "compressed fp8 in blocks")),
    ],
)
def test_experts_in_either_layout_keep_their_codes(family: str, form: str, tmp_path: Path) -> None:
    stored, _ = folders(family, form, tmp_path)
    model = load(stored)
    expected = load_half(tmp_path / "plain", Half.LANGUAGE, dtype=torch.float32, device="cpu").state_dict()
    experts = coded_experts(model)
    names = {name for name in expected if ".experts." in name and "shared" not in name}
    assert {*experts} == {name for name in names if not name.endswith("_bias")}
    for name, each in experts.items():
        weight = expected[name].mT if family in HOLDING else expected[name]
        assert torch.equal(each.codes.plain(torch.float32).view(weight.shape), weight), name
    if form in ONE_TENSOR:  # what a worker plans; all else is plain
        kept = sum(each.codes.nbytes - 4 * expected[name].numel() for name, each in experts.items())
        plain_bytes = sum({each.data_ptr(): each.nbytes for each in expected.values()}.values())
        assert probed_parts(model, 16, "auto").weight_bytes == plain_bytes + kept


def test_the_memory_that_a_worker_plans_is_that_of_the_codes(tmp_path: Path) -> None:
    stored, _ = folders("llama", "AWQ", tmp_path)
    parts = probed_parts(load(stored), 16, "auto")
    plain_parts = probed_parts(
        load_half(stored, Half.LANGUAGE, dtype=torch.float32, device="cpu"), 16, "auto"
    )
    linears = coded(parts.model).values()
    weights = [each.out_features * each.in_features for each in linears]
    # half a byte for each of 128 columns; a scale and a zero of 3 bytes for 16 weights
    codes = sum(64 * each.out_features + size * 3 // 16 for each, size in zip(linears, weights, strict=True))
    assert parts.weight_bytes == plain_parts.weight_bytes - 4 * sum(weights) + codes
    assert parts.scratch_bytes == 2 * 4 * max(weights) and plain_parts.scratch_bytes == 0


@pytest.mark.parametrize("form", ["AWQ", "modelopt fp8", "compressed fp8 in blocks"])
def test_codes_with_one_input_become_neighbours(form: str, tmp_path: Path) -> None:
    stored, _ = folders("llama", form, tmp_path)
    model = load(stored)
    before = {name: each.weight for name, each in coded(model).items()}
    merge_inputs(model, torch.device("cpu"))
    assert all(torch.equal(each.weight, before[name]) for name, each in coded(model).items())
    layer: Any = model.model.layers[1]
    attention, mlp = layer.self_attn, layer.mlp
    for linears in (
        [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
    ):  # fmt: skip
        whole = merged_codes([linear.codes for linear in linears])
        assert whole is not None and whole.numbers.data_ptr() == linears[0].numbers.data_ptr()
        expected = torch.cat([linear.weight for linear in linears])
        assert torch.equal(whole.plain(torch.float32), expected)
    assert merged_codes([mlp.up_proj.codes, attention.o_proj.codes]) is None


def test_a_projection_that_differs_from_its_neighbours_is_not_merged(tmp_path: Path) -> None:
    """Exporters leave single modules plain."""
    stored, expected = in_form(
        plain("llama", tmp_path / "original"),
        FORMS["W4A16"],
        lambda name: is_linear(name) and "k_proj" not in name,
    )
    model = load(stored.save(tmp_path / "stored"))
    merge_inputs(model, torch.device("cpu"))
    attention: Any = model.model.layers[0].self_attn
    assert type(attention.k_proj) is nn.Linear and type(attention.q_proj) is CodedLinear
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(attention.k_proj.weight, expected.tensors[name])


@pytest.mark.parametrize("form", ["modelopt fp8", "W4A16"])
def test_codes_that_are_not_finite_are_refused_by_name(form: str, tmp_path: Path) -> None:
    stored, _ = in_form(plain("llama", tmp_path / "original"), FORMS[form], is_linear)
    name = "model.layers.1.mlp.up_proj.weight"
    if form == "W4A16":
        stored.tensors[f"{name}_scale"][-1, 0] = torch.nan
    else:
        stored.tensors[name].view(torch.uint8)[-1, 0] = 0xFF
    with pytest.raises(ConfigError, match=name):
        load(stored.save(tmp_path / "stored"))


def test_a_weight_from_which_transformers_computes_is_plain(tmp_path: Path, caplog) -> None:
    """Here a reader that doubles one of the weights: what is in the model are no numbers of its rows."""
    stored, _ = folders("llama", "AWQ", tmp_path)
    caplog.set_level("INFO")
    doubled, num_reads = "model.layers.0.mlp.up_proj.weight", []
    quantisation = check_weights(stored).quantisation
    assert quantisation is not None
    with plain_tensors(weight_files(stored), quantisation, torch.float32) as tensors:
        expected = 2 * tensors[doubled][...]
        codes = CodedLoading(tensors, text_of, product_of_plain, torch.device("cpu"))

        def read() -> tuple[hf.PreTrainedModel, dict]:
            num_reads.append(1)
            model = hf.LlamaForCausalLM(hf.LlamaConfig.from_pretrained(stored))
            codes.take_places(model, [])
            for name, _ in [*model.named_parameters()]:
                path, _, leaf = name.rpartition(".")
                own = 2 * tensors[name][...] if name == doubled else tensors[name][...]
                model.get_submodule(path).register_parameter(leaf, nn.Parameter(own, requires_grad=False))
            return model, {}

        model, _ = codes.load(read)
    assert len(num_reads) == 2 and f"cannot keep their codes: {doubled}" in caplog.text
    assert torch.equal(model.get_parameter(doubled), expected)
    assert len(coded(model)) == 20


def wrong_for_many_rows(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    return product_of_plain(x, codes, bias) * (1 if len(x) < 17 else 1.1)


def fails_for_wide_rows(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    if codes.width > 64:
        raise RuntimeError("does not compile")
    return product_of_plain(x, codes, bias)


def test_a_linear_whose_product_is_wrong_becomes_plain_and_is_named(tmp_path: Path, caplog) -> None:
    stored, _ = folders("llama", "AWQ", tmp_path)
    expected = {name: each.weight for name, each in coded(load(stored)).items()}
    model = load(stored, replace(OF_PLAIN, product=wrong_for_many_rows))
    assert not coded(model)
    for name, weight in expected.items():
        assert torch.equal(model.get_submodule(name).get_parameter("weight"), weight)
    assert "NIBBLE of 96 × 64: dequantised, because its product of 17 rows is wrong by 10.0%" in caplog.text


def wrong_experts(experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    return 1.1 * experts_of_plain(experts, x, chosen, weights)


@pytest.mark.parametrize(("family", "form"), [("qwen3_moe", "AWQ"), ("gpt_oss_sinks_window", "MXFP4")])
def test_experts_whose_products_are_wrong_become_plain_and_are_named(
    family: str, form: str, tmp_path: Path, caplog
) -> None:
    stored, _ = folders(family, form, tmp_path)
    model = load(stored, replace(OF_PLAIN, experts=wrong_experts))
    assert not coded_experts(model) and "its product of 1 rows is wrong by 10.0%" in caplog.text
    whole = load_half(tmp_path / "plain", Half.LANGUAGE, dtype=torch.float32, device="cpu")
    for name, parameter in whole.named_parameters():
        if ".experts." in name:
            assert torch.equal(model.get_parameter(name), parameter), name


def test_experts_that_differ_in_more_than_their_numbers_are_plain(tmp_path: Path, caplog) -> None:
    """Here the scales of one of them have another dtype; and one has a plain matrix."""
    caplog.set_level("INFO")
    stored, expected = in_form(plain("qwen3_moe", tmp_path / "original"), FORMS["W4A16"], is_linear)
    name = "model.layers.{}.mlp.experts.2.{}_proj"
    stored.tensors[name.format(0, "down") + ".weight_scale"] = (
        stored.tensors[name.format(0, "down") + ".weight_scale"].half()
    )  # fmt: skip
    for part in ("packed", "scale", "shape"):
        del stored.tensors[name.format(2, "up") + f".weight_{part}"]
    left = name.format(2, "up") + ".weight"
    stored.tensors[left] = expected.tensors[left]
    experts = coded_experts(model := load(stored.save(tmp_path / "stored")))
    assert sum("layers.0." in each for each in experts) == 0 and "cannot keep their codes" in caplog.text
    assert sum("layers.1." in each for each in experts) == 2 and not any(
        "layers.2." in each for each in experts
    )
    found = model.get_parameter("model.layers.2.mlp.experts.gate_up_proj")[2]
    assert torch.equal(
        found, torch.cat([expected.tensors[name.format(2, each) + ".weight"] for each in ("gate", "up")])
    )


def test_a_kernel_that_fails_leaves_the_other_linears_their_codes(tmp_path: Path, caplog) -> None:
    stored, _ = folders("llama", "AWQ", tmp_path)
    model = load(stored, replace(OF_PLAIN, product=fails_for_wide_rows))
    assert len(coded(model)) == 18 and type(model.model.layers[0].mlp.down_proj) is nn.Linear
    assert "64 × 96: dequantised, because its kernel for 1 rows fails: does not compile" in caplog.text
