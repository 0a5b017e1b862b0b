"""Every kind of quantised checkpoint either computes what its weights stand for, or is refused by name. Both
halves, on tiny models; the reference is transformers' own whole model with dequantised weights in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.config.checkpoint import check_weights
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.cpu.library import load
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.loading import Half, fingerprint, load_half
from tests.flow.quantised_folders import (
    FP8_ENTRY,
    MXFP4_ENTRY,
    Checkpoint,
    declared,
    dequantised,
    fp8,
    in_fp8,
    in_fp8_blocks,
    in_int8,
    in_mxfp4,
    is_expert,
    is_linear,
    plain,
    quantised,
    whole_omni,
)
from tests.flow.quantised_formats import FORMS
from tests.flow.tiny_models import TEXT_FAMILIES

FAMILIES = ("llama", "qwen2_5_omni", "qwen3_omni", "qwen3_vl_moe", "gpt_oss_sinks_window")
HYBRIDS = ("qwen3_5", "qwen3_5_moe")
OMNIS = ("qwen2_5_omni", "qwen3_omni")
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
COMPRESSED = FORMS["compressed fp8 by rows"].entry
IDS = torch.tensor([[5, 77, 12, 250, 9, 31]])


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: plain(name, tmp_path_factory.mktemp(name)) for name in (*FAMILIES, *HYBRIDS)}


def halves_of(family: str) -> tuple[Half, ...]:
    return (Half.LANGUAGE,) if family in TEXT_FAMILIES else tuple(Half)


def check_exact(checkpoint: Checkpoint, expected: Checkpoint, folder: Path, halves: tuple[Half, ...]) -> None:
    """`expected`: with plain weights, whole."""
    checkpoint.save(folder / "quantised")
    reference = expected.model_class.from_pretrained(expected.save(folder / "plain"), dtype=torch.float32)
    theirs = dict(reference.named_parameters())
    for half in halves:
        ours = load_half(folder / "quantised", half, dtype=torch.float32, device="cpu")
        for name, parameter in ours.named_parameters():
            assert parameter.dtype is torch.float32
            assert torch.equal(parameter, theirs[name])
        if half is Half.LANGUAGE:
            with torch.inference_mode():
                logits = [model(input_ids=IDS).logits for model in (ours, reference)]
            torch.testing.assert_close(*logits, rtol=1e-5, atol=1e-5)


def check_refused(checkpoint: Checkpoint, folder: Path, halves: tuple[Half, ...], reason: str) -> None:
    checkpoint.save(folder)
    for half in halves:
        with pytest.raises(ConfigError, match=reason) as error:
            load_half(folder, half, dtype=torch.float32, device="cpu")
        assert "unquantised checkpoint" in str(error.value) and "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------------- what
# is served


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name != "gpt_oss_sinks_window"), *HYBRIDS])
def test_fp8_in_blocks_is_what_it_stands_for(family: str, originals, tmp_path: Path) -> None:
    checkpoint = declared(fp8(originals[family]), FP8_ENTRY)
    check_exact(checkpoint, dequantised(fp8(originals[family])), tmp_path, halves_of(family))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_that_were_left_in_16_bits_have_the_dtype_of_the_others(
    dtype: torch.dtype, originals, tmp_path: Path
) -> None:
    left = ["lm_head", "model.layers.1.mlp.up_proj"]
    checkpoint = quantised(
        originals["llama"],
        in_fp8_blocks,
        lambda name: is_linear(name) and name.removesuffix(".weight") not in left,
    )
    for name, tensor in checkpoint.tensors.items():
        if tensor.dtype is torch.float32:
            checkpoint.tensors[name] = tensor.bfloat16()
    expected = dequantised(checkpoint).tensors
    declared(checkpoint, {**FP8_ENTRY, "modules_to_not_convert": left}).save(tmp_path)
    half = load_half(tmp_path, Half.LANGUAGE, dtype=dtype, device="cpu")
    for name, parameter in half.named_parameters():
        assert parameter.dtype is dtype and torch.equal(parameter, expected[name].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts_are_what_they_stand_for(dtype: torch.dtype, originals, tmp_path: Path) -> None:
    checkpoint = quantised(originals["gpt_oss_sinks_window"], in_mxfp4, is_expert)
    expected = dequantised(checkpoint)
    check_exact(declared(checkpoint, MXFP4_ENTRY), expected, tmp_path, (Half.LANGUAGE,))
    half = load_half(tmp_path / "quantised", Half.LANGUAGE, dtype=dtype, device="cpu")
    assert {parameter.dtype for parameter in half.parameters()} == {dtype}
    assert check_weights(tmp_path / "quantised").num_parameters == sum(
        tensor.numel() for tensor in expected.tensors.values()
    )


@pytest.mark.parametrize("family", OMNIS)
@pytest.mark.parametrize("path", ["", "thinker_config", "thinker_config.text_config"])
def test_the_entry_of_a_whole_omni_counts_for_its_part_wherever_it_stands(
    family: str, path: str, originals, tmp_path: Path
) -> None:
    part = fp8(originals[family])
    checkpoint = declared(whole_omni(part, family), FP8_ENTRY, path)
    check_exact(checkpoint, dequantised(part), tmp_path, tuple(Half))


@pytest.mark.parametrize("entry", [{"bits": 4}, {}, {"quant_method": None}])
def test_an_entry_that_names_no_method_is_none(entry: dict, originals, tmp_path: Path) -> None:
    checkpoint = declared(originals["llama"].copied(), entry)
    check_exact(checkpoint, originals["llama"], tmp_path, (Half.LANGUAGE,))


def test_dequantised_weights_and_their_original_have_fingerprints_of_their_own(
    originals, tmp_path: Path
) -> None:
    originals["qwen2_5_omni"].save(tmp_path / "plain")
    checkpoint = fp8(originals["qwen2_5_omni"])
    declared(checkpoint, FP8_ENTRY).save(tmp_path / "fp8")
    declared(checkpoint, {**FP8_ENTRY, "modules_to_not_convert": ["lm_head"]}).save(tmp_path / "other")
    found: dict[str, set[str]] = {}
    for name in ("plain", "fp8", "other"):
        for half in Half:
            model = load_half(tmp_path / name, half, dtype=torch.float32, device="cpu")
            found.setdefault(name, set()).add(fingerprint(model.config, torch.float32))
    assert all(len(each) == 1 for each in found.values())
    assert len(set.union(*found.values())) == 3


@pytest.mark.skipif(load() is None, reason="no native kernels for this CPU, or no compiler")
def test_dequantised_weights_are_mapped_from_a_file_of_packed_ones(originals, tmp_path: Path) -> None:
    declared(fp8(originals["llama"]), FP8_ENTRY).save(tmp_path)
    cache = WeightCache(tmp_path / "cache", 1 << 30)
    plain, cold, warm = (
        LanguageModel.load(tmp_path, dtype=torch.float32, weight_cache=each) for each in (None, cache, cache)
    )
    assert list((tmp_path / "cache").glob("*.weights"))
    assert plain.fingerprint == cold.fingerprint == warm.fingerprint
    expected, *others = map(_logits, (plain, cold, warm))
    assert all(torch.equal(expected, other) for other in others)


def _logits(model: LanguageModel) -> Tensor:
    kv = BlockMemory(model.kv_layout, 4)
    with torch.inference_mode():
        return model.forward([SequenceChunk(IDS[0].tolist(), torch.arange(6), 0, [0])], kv)


# ---------------------------------------------------------------------------------------------------- what
# is refused


@pytest.mark.parametrize("family", ["llama", "qwen2_5_omni", "qwen3_vl_moe"])
@pytest.mark.parametrize(
    ("matrix", "entry", "reason"),
    [
        (in_fp8, MODELOPT, r"quantised as modelopt FP8_PB_WO in config\.json \(tensor .*proj\.weight"),
        (in_fp8, {"quant_method": "newest"}, r"quantised as newest in config\.json \(tensor .*proj\.weight"),
        (in_fp8, {"quant_method": "compressed-tensors", "format": "float-quantized"}, "float-quantized"),
        (in_fp8, FP8_ENTRY, r"proj\.weight \(F8_E4M3 .* not fp8 in blocks of 16 × 16: .* is missing"),
        (in_fp8, None, r"proj\.weight \(F8_E4M3\), which no quantization_config explains"),
        (in_fp8_blocks, None, r"proj\.weight \(F8_E4M3\), which no quantization_config explains"),
        (in_int8, None, r"proj\.weight \(I8\), which no quantization_config explains"),
    ],
)
def test_scales_that_would_be_left_out_are_refused(
    family: str, matrix: Callable, entry: dict | None, reason: str, originals, tmp_path: Path
) -> None:
    checkpoint = quantised(originals[family], matrix, is_linear)
    if entry is not None:
        declared(checkpoint, entry)
    check_refused(checkpoint, tmp_path, halves_of(family), reason)


@pytest.mark.parametrize("family", OMNIS)
def test_an_older_export_of_modelopt_is_refused_by_its_own_file(family, originals, tmp_path: Path) -> None:
    checkpoint = whole_omni(quantised(originals[family], in_fp8, is_linear), family)
    content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO"}}
    checkpoint.other_files["hf_quant_config.json"] = content
    check_refused(checkpoint, tmp_path, tuple(Half), r"modelopt FP8_PB_WO in hf_quant_config\.json")


@pytest.mark.parametrize("entry", [{**MODELOPT, "quant_algo": "FP8"}, COMPRESSED])
def test_fp8_experts_in_one_tensor_are_refused_in_other_formats(entry, originals, tmp_path: Path) -> None:
    def in_fused(weight: Tensor) -> dict[str, Tensor]:
        scales = weight.abs().amax((1, 2)) / 448
        codes = (weight / scales[:, None, None]).to(torch.float8_e4m3fn)
        return {"": codes, "_weight_scale": scales, "_input_scale": torch.ones(())}

    checkpoint = quantised(originals["qwen3_vl_moe"], in_fused, is_expert)
    reason = r"experts\.\w+_proj \(F8_E4M3 .* only \.weight, "
    check_refused(declared(checkpoint, entry), tmp_path, tuple(Half), reason)


@pytest.mark.parametrize("family", ["llama", "qwen2_5_omni"])
def test_inverted_scales_are_refused_by_name(family: str, originals, tmp_path: Path) -> None:
    checkpoint = declared(fp8(originals[family]), FP8_ENTRY)
    name = next(name for name in reversed(checkpoint.tensors) if name.endswith("_scale_inv"))
    checkpoint.tensors[name] = 1 / checkpoint.tensors[name]
    check_refused(checkpoint, tmp_path, halves_of(family), f"{name} gives weights of about .* inverted")


def test_inverted_scales_of_mxfp4_are_refused_by_name(originals, tmp_path: Path) -> None:
    checkpoint = quantised(originals["gpt_oss_sinks_window"], in_mxfp4, is_expert)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("_scales"):
            checkpoint.tensors[name] = 254 - tensor
    check_refused(
        declared(checkpoint, MXFP4_ENTRY), tmp_path, (Half.LANGUAGE,), "_scales gives weights of about"
    )


def test_mxfp4_without_an_entry_is_refused(originals, tmp_path: Path) -> None:
    checkpoint = quantised(originals["gpt_oss_sinks_window"], in_mxfp4, is_expert)
    check_refused(checkpoint, tmp_path, (Half.LANGUAGE,), "no quantization_config explains")


def test_codes_in_a_pickled_file_are_refused(originals, tmp_path: Path) -> None:
    checkpoint = quantised(originals["llama"], in_int8, is_linear)
    checkpoint.save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(checkpoint.tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ConfigError, match=r"proj\.weight \(torch\.int8\), which no quantization_config explains"
    ):
        load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu")
    torch.save(originals["llama"].tensors, tmp_path / "pytorch_model.bin")
    load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("error", [ImportError, AttributeError, NotImplementedError, KeyError, OSError])
def test_whatever_transformers_raises_while_it_reads_is_a_configuration_error_with_its_cause(
    error: type[Exception], originals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise error("autoawq is not installed")

    originals["llama"].save(tmp_path)
    monkeypatch.setattr(hf.LlamaForCausalLM, "from_pretrained", fail)
    with pytest.raises(ConfigError, match=f"cannot load .* {error.__name__}: .*autoawq is not installed"):
        load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu")
