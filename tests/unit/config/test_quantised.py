"""Whether weights are plain, by the configuration and by the headers of the weight files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.config.checkpoint import check_configuration, check_weights
from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from tests.fakes.model_folders import text_folder, whole_omni_folder, write_tensors

Tensors = dict[str, tuple[str, tuple[int, ...]]]
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4"}
Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.0.mlp.experts"


def fp8_tensors(
    rows: int = 256, columns: int = 128, grid: tuple[int, int] = (2, 1), dtype: str = "F32"
) -> Tensors:
    return {f"{Q}.weight": ("F8_E4M3", (rows, columns)), f"{Q}.weight_scale_inv": (dtype, grid)}


def folder_of(tmp_path: Path, tensors: Tensors, entry: object = None, **changes: Any) -> Path:
    if entry is not None:
        changes["quantization_config"] = entry
    folder = text_folder(tmp_path / "m", **changes)
    write_tensors(folder, tensors)
    return folder


def check_refused(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern) as error:
        check_weights(folder)
    assert "\n" not in str(error.value) and "checkpoint" in str(error.value)


@pytest.mark.parametrize(
    "entry", [FP8, {**FP8, "modules_to_not_convert": ["lm_head"]}, {"quant_method": "fp8"}]
)
@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_fp8_in_blocks_is_served_and_counted_without_scales(tmp_path, entry, dtype):
    tensors = {**fp8_tensors(dtype=dtype), "lm_head.weight": ("BF16", (10, 128))}
    weights = check_weights(folder_of(tmp_path, tensors, entry))
    assert str(weights.quantisation) == "fp8 in blocks of 128 × 128"
    assert weights.num_parameters == 256 * 128 + 10 * 128


def test_mxfp4_experts_of_gpt_oss_are_served_and_counted_by_the_half_byte(tmp_path):
    tensors = {
        f"{EXPERTS}.down_proj_blocks": ("U8", (4, 64, 3, 16)),
        f"{EXPERTS}.down_proj_scales": ("U8", (4, 64, 3)),
        f"{EXPERTS}.down_proj_bias": ("BF16", (4, 64)),
    }  # fmt: skip
    folder = folder_of(tmp_path, tensors, MXFP4, model_type="gpt_oss")
    assert check_weights(folder).num_parameters == 4 * 64 * 96 + 4 * 64
    tensors[f"{EXPERTS}.down_proj_scales"] = ("U8", (4, 64, 2))
    write_tensors(folder, tensors)
    check_refused(folder, r"down_proj_blocks \(U8 \[4, 64, 3, 16\]\), which is not MXFP4: .* do not fit")


def test_mxfp4_of_another_model_type_is_refused(tmp_path):
    tensors: Tensors = {f"{EXPERTS}.down_proj_blocks": ("U8", (4, 64, 3, 16))}
    check_refused(
        folder_of(tmp_path, tensors, MXFP4), r"quantised as mxfp4 in config\.json .*down_proj_blocks"
    )


@pytest.mark.parametrize(("rows", "grid"), [(192, (2, 1)), (1000, (8, 1)), (320, (3, 1)), (576, (5, 1))])
def test_fp8_need_not_fill_its_last_blocks(tmp_path, rows, grid):
    weights = check_weights(folder_of(tmp_path, fp8_tensors(rows, 128, grid), FP8))
    assert weights.quantisation is not None and weights.num_parameters == rows * 128


@pytest.mark.parametrize(
    ("rows", "grid"), [(256, (2,)), (256, (1, 1)), (320, (2, 1)), (256, (4, 1)), (256, ())]
)
def test_fp8_with_other_blocks_than_declared_is_refused(tmp_path, rows, grid):
    folder = folder_of(tmp_path, fp8_tensors(rows, 128, grid), FP8)
    check_refused(
        folder, rf"q_proj\.weight \(F8_E4M3 \[{rows}, 128\]\), .* do not fit a weight of \[{rows}, 128\]"
    )


PACKED = {
    f"{Q}.qweight": ("I32", (64, 16)),
    f"{Q}.qzeros": ("I32", (1, 16)),
    f"{Q}.scales": ("F16", (1, 128)),
}
FORMATS: list[tuple[dict, Tensors, str]] = [
    ({"quant_method": "awq", "bits": 4}, PACKED, "awq 4 bit .*qweight"),
    ({"quant_method": "gptq", "bits": 8}, {**PACKED, f"{Q}.g_idx": ("I32", (64,))}, "gptq 8 bit .*qweight"),
    (
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {
            f"{Q}.weight_packed": ("I32", (64, 16)), f"{Q}.weight_scale": ("BF16", (64, 4)),
            f"{Q}.weight_shape": ("I64", (2,)),
        },
        "compressed-tensors pack-quantized .*weight_packed",
    ),
    (
        {"load_in_4bit": True, "quant_method": "bitsandbytes"},
        {f"{Q}.weight": ("U8", (4096, 1)), f"{Q}.weight.absmax": ("F32", (128,))},
        r"bitsandbytes 4 bit .*q_proj\.weight",
    ),
    (
        {"load_in_8bit": True},
        {f"{Q}.weight": ("I8", (64, 64)), f"{Q}.SCB": ("F32", (64,))},
        "bitsandbytes .*weight",
    ),
    ({"quant_method": "quark"}, {f"{Q}.weight": ("F8_E4M3", (64, 64))}, "quark .*weight"),
    ({"quant_method": "torchao"}, {f"{Q}._weight_qdata": ("I8", (64, 64))}, "torchao .*_weight_qdata"),
    (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {f"{Q}.weight": ("U8", (64, 32)), f"{Q}.weight_scale": ("F8_E4M3", (64, 4))},
        "modelopt NVFP4_AWQ .*weight",
    ),
    ({"quant_method": "nvfp4"}, {f"{Q}.weight": ("U8", (64, 32))}, "nvfp4 .*weight"),
    ({**FP8, "activation_scheme": "static"}, fp8_tensors(), "fp8 static .*weight.* with blocks"),
    ({**FP8, "weight_block_size": [0, 128]}, fp8_tensors(), "fp8 dynamic .*weight"),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "tensors", "reason"), FORMATS)
def test_a_format_that_is_not_served_is_refused_by_name(tmp_path, entry, tensors, reason):
    """By both sides: what is declared before a weight is downloaded, and what no entry declares."""
    check_refused(folder_of(tmp_path, tensors, entry), rf"quantised as {reason}.*the unquantised checkpoint")
    with pytest.raises(ConfigError, match=f"quantised as {reason.partition(' .*')[0]}"):
        check_configuration(tmp_path / "m")
    check_refused(folder_of(tmp_path / "bare", tensors), "tensor .* which no quantization_config explains")


GROUPED = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
INTEGERS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}


def compressed(weights: object, **more: object) -> dict:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    entry = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    return {**entry, **more}


SERVED: list[tuple[dict, Tensors, str]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 64}, PACKED, "4 bit AWQ in groups of 64"),
    (GROUPED, {**PACKED, f"{Q}.qweight": ("I32", (8, 128)), f"{Q}.g_idx": ("I32", (64,))},
     "4 bit GPTQ in groups of 64"),
    (
        compressed(INTEGERS),
        {
            f"{Q}.weight_packed": ("I32", (128, 8)), f"{Q}.weight_scale": ("BF16", (128, 4)),
            f"{Q}.weight_shape": ("I64", (2,)),
        },
        "4 bit compressed-tensors weights in groups of 16",
    ),
    (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {f"{Q}.weight": ("F8_E4M3", (128, 64)), f"{Q}.weight_scale": ("F32", ())},
        "modelopt FP8 with one scale for a matrix",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("entry", "tensors", "name"), SERVED)
def test_a_format_that_is_served_is_counted_as_plain_weights(tmp_path, entry, tensors, name):
    weights = check_weights(folder_of(tmp_path, {**tensors, "norm.weight": ("BF16", (7,))}, entry))
    assert str(weights.quantisation) == name and weights.num_parameters == 128 * 64 + 7
    for missing in tensors:
        write_tensors(tmp_path / "m", {part: header for part, header in tensors.items() if part != missing})
        if len(tensors) > 2 or missing.endswith("scale"):
            check_refused(tmp_path / "m", f"{missing} is missing")
        else:
            check_refused(tmp_path / "m", "is missing|no tensor is quantised")
    check_refused(
        folder_of(tmp_path / "3", {**tensors, f"{Q}.weight_global_scale": ("F32", ())}, entry),
        r"weight_global_scale .* only .* are known",
    )


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({**GROUPED, "desc_act": True}, "gptq 4 bit .* with desc_act"),
        ({**GROUPED, "checkpoint_format": "marlin"}, "in format marlin"),
        ({**GROUPED, "bits": 3}, "gptq 3 bit .* with other than 4 or 8 bits"),
        ({**GROUPED, "dynamic": {"+:.*down_proj": {"bits": 8}}}, "in several ways"),
        ({**GROUPED, "group_size": None}, "in blocks or groups of"),
        ({**GROUPED, "group_size": [64]}, "in blocks or groups of"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, "in version gemv"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": False}, "without zero points"),
        (compressed({**INTEGERS, "actorder": "group"}), "with actorder"),
        (compressed({**INTEGERS, "num_bits": 3}), r"with weights of 3 bits \(int\)"),
        (compressed({**INTEGERS, "strategy": "tensor_group"}), "with strategy tensor_group"),
        (compressed({**INTEGERS, "type": "float"}), r"with weights of 4 bits \(float\)"),
        (compressed(INTEGERS, format="nvfp4-pack-quantized"), "nvfp4-pack-quantized .* with weights of 4"),
        (compressed(INTEGERS, sparsity_config={"format": "sparse-24-bitmask"}), "and sparse"),
        (compressed(INTEGERS, transform_config={"config_groups": {"R1": {}}}), "with a transform_config"),
        (compressed(None), "without config_groups"),
        (compressed(INTEGERS, config_groups={"W4A16": ["Linear"]}), "with a preset"),
        (
            compressed(INTEGERS, config_groups={
                "a": {"weights": INTEGERS}, "b": {"weights": {**INTEGERS, "group_size": 32}},
            }),
            "in several ways",
        ),
    ],
)  # fmt: skip
def test_a_variant_that_is_not_served_is_refused_by_name(tmp_path, entry, reason):
    check_refused(folder_of(tmp_path, PACKED, entry), rf"quantised as .*{reason}")


MLX: Tensors = {
    f"{Q}.weight": ("U32", (64, 8)),
    f"{Q}.scales": ("BF16", (64, 1)),
    f"{Q}.biases": ("BF16", (64, 1)),
}


@pytest.mark.parametrize(
    "tensors",
    [
        MLX,
        {f"{Q}.weight": ("BF16", (64, 64)), f"{Q}.weight_scale": ("BF16", (64, 1))},
        {f"{Q}.weight": ("BF16", (64, 64)), f"{Q}.scale": ("F32", (1, 1))},
        {f"{Q}.weight": ("BF16", (64, 64)), f"{Q}.input_scale": ("F32", ())},
        {f"{EXPERTS}.gate_up_proj": ("BF16", (4, 64, 64)), f"{EXPERTS}.gate_up_proj_scale": ("F32", (4, 64))},
        {f"{Q}.weight": ("F8_E5M2", (64, 64))},
        {f"{Q}.weight": ("I32", (64, 64))},
        {f"{Q}.bias": ("I8", (64,))},
        {f"{Q}.weight": ("BF16", (64, 64)), f"{Q}.lora_A.weight": ("BF16", (8, 64))},
        {f"{Q}.base_layer.weight": ("BF16", (64, 64))},
    ],
)
def test_what_no_entry_explains_is_refused(tmp_path, tensors):
    check_refused(folder_of(tmp_path, tensors), r"m has tensor .*q_proj|gate_up_proj")


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("logit_scale", "F32", ()),
        ("vision_model.embeddings.position_ids", "I64", (1, 64)),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", "F32", (32,)),
        ("model.layers.0.self_attn.k_scale", "F32", ()),
        ("model.layers.0.self_attn.v_proj.v_scale", "F32", ()),
        ("model.layers.0.layer_scale", "F32", (64,)),
        ("model.layers.0.mlp.scale", "F32", (64,)),
        ("model.layers.0.router.per_expert_scale", "F32", (8,)),
        ("model.norm.scale", "F32", (64,)),
        ("vision.blocks.0.ls1.gamma", "F32", (64,)),
        ("vision.bn.num_batches_tracked", "I64", ()),
        ("model.layers.0.attn.relative_position_index", "I64", (49, 49)),
        ("model.layers.0.attn.bias", "U8", (1, 1, 64, 64)),
        ("model.layers.0.attn.causal_mask", "BOOL", (64, 64)),
        ("model.layers.0.mlp.gate.tid2eid", "I32", (64, 8)),
        ("codec.codebook", "F32", (64, 8)),
    ],
)
def test_buffers_and_scales_that_belong_to_no_weight_are_left_alone(tmp_path, name, dtype, shape):
    tensors: Tensors = {
        f"{Q}.weight": ("BF16", (64, 64)), "model.layers.0.self_attn.v_proj.weight": ("BF16", (64, 64)),
        "model.norm.bias": ("BF16", (64,)), name: (dtype, shape),
    }  # fmt: skip
    assert check_weights(folder_of(tmp_path, tensors)).quantisation is None
    (tmp_path / "q").mkdir()
    folder = folder_of(tmp_path / "q", {**tensors, **fp8_tensors()}, FP8)
    quantisation = check_weights(folder).quantisation
    assert quantisation is not None and list(quantisation.weights) == [f"{Q}.weight"]


def test_an_entry_that_no_tensor_bears_out_is_refused(tmp_path):
    folder = folder_of(tmp_path, {f"{Q}.weight": ("BF16", (64, 64))}, FP8)
    check_refused(folder, r"config\.json declares fp8 in blocks .* no tensor is quantised: .*delete")


@pytest.mark.parametrize("key", ["text_config", "text_config.decoder_config", "hf_quant_config.json"])
def test_an_entry_is_found_wherever_it_stands(tmp_path, key):
    folder = folder_of(tmp_path, fp8_tensors())
    if key.endswith(".json"):
        content: dict = {"quantization": {"quant_algo": "FP8_PB_WO", "kv_cache_quant_algo": None}}
        (folder / key).write_text(json.dumps(content))
        check_refused(folder, r"modelopt FP8_PB_WO in hf_quant_config\.json")
        return
    config = json.loads((folder / "config.json").read_text())
    part = config
    for name in key.split("."):
        part = part.setdefault(name, {})
    part["quantization_config"] = FP8
    (folder / "config.json").write_text(json.dumps(config))
    assert check_weights(folder).quantisation is not None


def test_the_entry_nearest_to_the_weights_counts(tmp_path):
    outer = {"quant_method": "modelopt", "quant_algo": "FP8"}
    folder = folder_of(tmp_path, fp8_tensors(), FP8)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": outer}))
    assert check_weights(folder).quantisation is not None
    check_refused(
        folder_of(tmp_path / "two", fp8_tensors(), FP8, text_config={"quantization_config": outer}),
        r"fp8 dynamic in config\.json and modelopt FP8 in text_config",
    )


def test_of_a_whole_omni_only_the_part_that_is_served_must_be_known(tmp_path):
    folder = whole_omni_folder(tmp_path / "o")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = FP8
    config["talker_config"] = {"quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    thinker = {f"thinker.{name}": header for name, header in fp8_tensors().items()}
    write_tensors(folder, {**thinker, **{f"talker.{name}": header for name, header in PACKED.items()}})
    assert check_weights(folder).quantisation is not None


@pytest.mark.parametrize("content", ["{", "[]", '{"quantization": []}'])
def test_a_broken_older_export_is_named(tmp_path, content):
    folder = folder_of(tmp_path, {f"{Q}.weight": ("BF16", (64, 64))})
    (folder / "hf_quant_config.json").write_text(content)
    if content == '{"quantization": []}':
        assert check_weights(folder).quantisation is None
    else:
        check_refused_file(folder)


def check_refused_file(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"hf_quant_config\.json"):
        check_weights(folder)


def test_quantised_weights_in_pickled_files_are_refused(tmp_path):
    folder = folder_of(tmp_path, {}, FP8)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    check_refused(folder, "has fp8 in blocks .* in pickled files")


def test_an_adapter_beside_full_weights_is_refused_by_name(tmp_path):
    folder = folder_of(tmp_path, {f"{Q}.weight": ("BF16", (64, 64))})
    (folder / "adapter_model.safetensors").touch()
    check_refused_adapter(folder, "m/adapter_model.safetensors is an adapter")
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    check_refused_adapter(folder, "m/adapter_config.json is an adapter of org/base .*under `adapters`")


def check_refused_adapter(folder: Path, pattern: str) -> None:
    with pytest.raises(ConfigError, match=pattern):
        check_weights(folder)


def test_a_folder_that_is_nothing_but_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    with pytest.raises(ConfigError, match=r"is an adapter of org/base .*not a model"):
        resolve(ClusterArgs(model=str(tmp_path / "a")), read_environment({}), num_cores=1)
