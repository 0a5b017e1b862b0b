"""Experts in both layouts of quantised checkpoints: all of a layer in one tensor, in either order of its
axes, and an entry for each, in families whose plain checkpoints have the one tensor. Tokens equal `generate`
of the plain model with the weights that the codes stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cluster.config.checkpoint import check_weights, weight_files
from cluster.errors import ConfigError
from cluster.model.dequantising import plain_tensors
from cluster.model.loading import Half, load_half
from tests.fakes.slow_params import often
from tests.flow.quantised_folders import (
    FP8_ENTRY,
    Checkpoint,
    fused_fp8,
    is_expert,
    is_linear,
    plain,
    with_entries,
)
from tests.flow.quantised_formats import FORMS, in_form
from tests.flow.test_quantised_formats import CASES, check_answers

# families with one tensor, and how they hold it
ONE_TENSOR = {
    "qwen3_vl_moe": {}, "mistral3_of_mistral4": {}, "llama4": {"columns_first": True},
    "gpt_oss_sinks_window": {"columns_first": True, "alternates": True},
}  # fmt: skip
ENTRIES = (  # family, format
    ("qwen3_vl_moe", "AWQ"), ("qwen3_vl_moe", "W4A16 with zeros"), ("qwen3_vl_moe", "compressed fp8 by rows"),
    ("qwen3_vl_moe", "GPTQ"), ("qwen3_vl_moe", "fp8 in blocks that are not filled"),
    ("gpt_oss_sinks_window", "W4A16"), ("llama4", "compressed fp8 by rows"), ("mistral3_of_mistral4", "AWQ"),
)  # fmt: skip


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    return functools.cache(lambda family: plain(family, tmp_path_factory.mktemp(family)))


def check_refused(checkpoint: Checkpoint, folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_half(checkpoint.save(folder), Half.LANGUAGE, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize(
    ("family", "block", "is_hub"),
    [
        ("qwen3_vl_moe", 16, True),
        ("qwen3_vl_moe", 24, True),  # the last blocks are not full; the first product's matrices are square
        ("qwen3_vl_moe", 24, False),
        ("mistral3_of_mistral4", 0, False),
    ],
)
def test_fp8_experts_in_one_tensor_equal_generate(
    family: str, block: int, is_hub: bool, original, tmp_path: Path
) -> None:
    stored, expected = fused_fp8(original(family), block, is_hub=is_hub)
    check_answers(CASES[family](), stored, expected, tmp_path)
    weights = check_weights(tmp_path / "stored")
    assert weights.num_parameters == sum(tensor.numel() for tensor in expected.tensors.values())
    assert weights.quantisation is not None
    assert len(weights.quantisation.unused) == (0 if block else 4)


@pytest.mark.parametrize(("family", "form"), often(ENTRIES, (ENTRIES[0], ENTRIES[2], ENTRIES[5], ENTRIES[6])))
def test_an_entry_for_each_expert_equals_generate(family: str, form: str, original, tmp_path: Path) -> None:
    checkpoint = with_entries(original(family), **ONE_TENSOR[family])
    stored, expected = in_form(checkpoint, FORMS[form], lambda name: is_linear(name) and ".experts." in name)
    joined = original(family).copied()
    for name in filter(is_expert, joined.tensors):
        joined.tensors[name] = _joined(name, expected, **ONE_TENSOR[family])
    check_answers(CASES[family](), stored, joined, tmp_path)


def _joined(
    name: str, entries: Checkpoint, *, columns_first: bool = False, alternates: bool = False
) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    parts = ["gate_proj", "up_proj"] if leaf == "gate_up_proj" else ["down_proj"]
    matrices = []
    for number in range(4):
        own = [entries.tensors[f"{path}.{number}.{part}.weight"] for part in parts]
        rows = torch.stack(own, 1).flatten(0, 1) if alternates else torch.cat(own)
        matrices.append(rows.T if columns_first else rows)
    return torch.stack(matrices)


def test_any_slice_of_experts_in_one_tensor_is_the_slice_of_the_whole(original, tmp_path: Path) -> None:
    stored, expected = fused_fp8(original("qwen3_vl_moe"), 24)
    quantisation = check_weights(stored.save(tmp_path)).quantisation
    assert quantisation is not None
    name = next(name for name in expected.tensors if name.endswith("experts.down_proj"))
    with plain_tensors(weight_files(tmp_path), quantisation, torch.float32) as tensors:
        for found, whole in (
            (tensors[name], expected.tensors[name]),
            (tensors[name].turned(), expected.tensors[name].transpose(1, 2)),
        ):
            assert found.get_shape() == list(whole.shape)
            for index in (
                ...,
                (slice(1, 3),),
                (slice(None), slice(5, 29)),
                (slice(2, 4), slice(3), slice(7, 30)),
            ):
                assert torch.equal(found[index], whole[index])


def _other_shape(scales: torch.Tensor) -> torch.Tensor:
    return scales.transpose(1, 2)


@pytest.mark.parametrize(
    ("change", "block", "reason"),
    [
        (_other_shape, [16, 16], r"down_proj .* scales \[4, 2, 4\] do not fit a weight of \[4, 64, 32\]"),
        (lambda scales: scales[:, :1, :1], [16, 16], r"scales \[4, 1, 1\] do not fit"),
        (lambda scales: scales, [16, 32], "experts in one tensor are known with square blocks only"),
        (lambda scales: scales, None, r"scales \[4, \d, \d\] do not fit"),
        (lambda scales: scales[:, :2, 0], None, r"scales \[4, 2\] do not fit"),
        (lambda scales: 1 / scales, [16, 16], "proj_scale_inv gives weights of about .* inverted"),
        (None, [16, 16], "down_proj_scale_inv is missing"),
    ],
)
def test_scales_that_do_not_fit_experts_are_refused_by_name(
    change: Callable | None, block: list[int] | None, reason: str, original, tmp_path: Path
) -> None:
    stored, _ = fused_fp8(original("qwen3_vl_moe"), 16)
    stored.config["quantization_config"] = {**FP8_ENTRY, "weight_block_size": block}
    for name in [name for name in stored.tensors if name.endswith("down_proj_scale_inv")]:
        scales = stored.tensors.pop(name)
        if change is not None:
            stored.tensors[name] = change(scales)
    check_refused(stored, tmp_path, reason)


def test_a_scale_of_experts_that_are_plain_is_refused_by_name(original, tmp_path: Path) -> None:
    stored, expected = fused_fp8(original("qwen3_vl_moe"), 16)
    name = next(filter(is_expert, stored.tensors))
    stored.tensors[name] = expected.tensors[name]
    check_refused(stored, tmp_path, rf"{name}_scale_inv .* {name} is F32")


@pytest.mark.parametrize("family", ONE_TENSOR)
def test_an_expert_without_an_entry_is_refused(family: str, original, tmp_path: Path) -> None:
    entries = with_entries(original(family), **ONE_TENSOR[family])
    last = next(name for name in entries.tensors if name.endswith("experts.3.up_proj.weight"))
    del entries.tensors[last]
    check_refused(entries, tmp_path, "cannot load the checkpoint")
