"""Experts in either layout of a checkpoint become the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.errors import ConfigError
from cluster.model.expert_layout import TransposedSlice, has_two_layouts, in_model_layout, stored_tensors
from cluster.model.loading import Half, load_half
from tests.flow.tiny_media_models import MEDIA_FAMILIES

EXPERTS, WIDTH = 2, 4
GATES, DOWN = "layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"


def saved(folder: Path, inner: int, is_transposed: bool) -> tuple[dict[str, torch.Tensor], list[Path]]:
    """The experts of one layer as the model has them, and the file that holds them."""
    experts = {GATES: torch.randn(EXPERTS, 2 * inner, WIDTH), DOWN: torch.randn(EXPERTS, WIDTH, inner)}
    stored = {
        name: (each.transpose(1, 2) if is_transposed else each).contiguous() for name, each in experts.items()
    }
    save_file({**stored, "norm.weight": torch.ones(WIDTH)}, folder / "model.safetensors")
    return experts, [folder / "model.safetensors"]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("inner", [3, 2, 4])  # with the first or the second matrix square
def test_both_layouts_are_read_as_the_model_has_them(inner: int, is_transposed: bool, tmp_path: Path) -> None:
    experts, files = saved(tmp_path, inner, is_transposed)
    with stored_tensors(files) as stored:
        found = in_model_layout(stored)
        assert set(found) == {*experts, "norm.weight"}
        for name, expert in experts.items():
            assert isinstance(found[name], TransposedSlice) == is_transposed
            assert found[name].get_shape() == list(expert.shape)
            assert torch.equal(found[name][...], expert)
            assert torch.equal(found[name][:, 1:3], expert[:, 1:3])
            share = found[name][1:2, 0:1, 1:]
            assert share.is_contiguous() and torch.equal(share, expert[1:2, 0:1, 1:])


def test_experts_in_another_layout_are_refused(tmp_path: Path) -> None:
    save_file({GATES: torch.ones(2, 6, 4), DOWN: torch.ones(2, 5, 3)}, tmp_path / "model.safetensors")
    with (
        stored_tensors([tmp_path / "model.safetensors"]) as stored,
        pytest.raises(ConfigError, match=r"gate_up_proj \[2, 6, 4\] and .* are in no layout that is known"),
    ):
        in_model_layout(stored)


def test_a_square_matrix_of_the_hub_is_not_left_as_it_is(tmp_path: Path) -> None:
    """transformers would leave it, for its shape is that of the parameter."""
    MEDIA_FAMILIES["qwen3_vl_moe"]().model.save_pretrained(tmp_path)
    ours = load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu").state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    square = [name for name in weights if name.endswith("gate_up_proj")]
    assert square and all(weights[name].shape[1] == weights[name].shape[2] for name in square)
    for name in (*square, *(name.replace("gate_up", "down") for name in square)):
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    again = load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu").state_dict()
    assert set(again) == set(ours) and all(torch.equal(again[name], ours[name]) for name in ours)


def test_only_families_with_two_layouts_are_read_this_way() -> None:
    assert has_two_layouts("qwen3_vl_moe")
    assert not any(map(has_two_layouts, ("qwen3_moe", "llama", "gpt_oss")))
