"""Fused blocks of towers on a simulated GPU: launches a block, waits, memory of the weights, recordings, and
which blocks stay. What the kernels compute: test_cuda_tower_blocks.py in tests/unit/model, in Triton's
interpreter."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.model.cuda import tower_blocks
from cluster.model.cuda.capture import capture_cuda
from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.tower_blocks import CudaBlockKernels, FusedBlock, is_fused, optimise_tower_blocks
from cluster.model.encoder import EncoderModel
from cluster.model.layers.block_search import replace_forward
from cluster.model.layers.blocks import BlockParts, block_parts
from cluster.types.media import Modality
from tests.fakes.cuda_device import CudaTensor, SimulatedCuda
from tests.flow.tiny_models import noise, randomized
from tests.unit.cuda.test_packed_attention import by_torch

PACKED_LAUNCHES = ["add_norm_row", "rotate_heads", "attend_segments", "add_norm_row", "gate"]
TEXT: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


def qwen(num_blocks: int) -> tuple[nn.Module, dict[str, Tensor]]:
    vision = {
        "depth": num_blocks, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "out_hidden_size": 32, "fullatt_block_indexes": [0, 2],
    }  # fmt: skip
    model = randomized(
        hf.Qwen2_5_VLForConditionalGeneration(hf.Qwen2_5_VLConfig(text_config=TEXT, vision_config=vision))
    )
    item = {"pixel_values": noise(64, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    return model, item


def siglip(num_blocks: int) -> tuple[nn.Module, dict[str, Tensor]]:
    vision = hf.SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=num_blocks, num_attention_heads=2,
        image_size=32, patch_size=8, vision_use_head=False,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**TEXT), vision_config=vision, image_token_index=1,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    return randomized(hf.LlavaForConditionalGeneration(config)), {"pixel_values": noise(1, 3, 32, 32)}


def blocks_of(model: nn.Module) -> list[BlockParts]:
    return [parts for each in model.modules() if (parts := block_parts(each)) is not None]


class Tower:
    """A model on the simulated GPU."""

    def __init__(self, device: SimulatedCuda, made: tuple[nn.Module, dict[str, Tensor]]):
        model, item = made
        merge_inputs(model, torch.device("cuda", 0))
        self.model: Any = device.put(model)
        self.encoder = EncoderModel.from_model(self.model)
        self.item = {name: CudaTensor(tensor) for name, tensor in item.items()}
        self._device = device

    def fuse(self) -> list[nn.Module]:
        """Here launches compute nothing, so no comparison could find a block."""
        kernels, fused = CudaBlockKernels(), []
        with torch.inference_mode():
            for parts in blocks_of(self.model):
                build = kernels.builder(parts)
                assert build is not None
                replace_forward(parts.block, build(False))
                fused.append(parts.block)
        assert optimise_packed_attention(self.model) == 0
        return fused

    def encode(self) -> list[Tensor]:
        return self.encoder.encode(Modality.IMAGE, [self.item])

    def num_launches(self) -> int:
        self._device.operators.clear()
        self.encode()
        return sum(map(launches_something, self._device.operators))


def launches_something(operator: str) -> bool:
    """No view, as slices are here, and no fresh memory."""
    if not operator.startswith("aten."):
        return operator != "__getitem__"
    _, name, overload = operator.split(".")
    is_view = getattr(getattr(torch.ops.aten, name), overload).is_view
    return not (is_view or name.startswith(("empty", "new_empty")))


@pytest.mark.parametrize(
    ("make", "modules", "products", "ours"),
    [
        (qwen, 32, 5, PACKED_LAUNCHES),
        (siglip, 12, 6, ["add_norm_row", "add_norm_row", "activate"]),  # with torch's attention
    ],
)
def test_a_block_is_ten_launches_or_nine(
    make: Callable[[int], Any], modules: int, products: int, ours: list[str], device, launches
) -> None:
    own = [Tower(device, make(number)) for number in (1, 2)]
    for tower in own:
        optimise_packed_attention(tower.model, lambda *each: device.kernel(by_torch, *each))
    one, two = (tower.num_launches() for tower in own)
    assert two - one == modules
    towers = [Tower(device, make(number)) for number in (1, 2)]
    for tower in towers:
        tower.fuse()
    counts, seen = [], []
    for tower in towers:
        launches.clear()
        counts.append(tower.num_launches())
        seen.append([each.kernel for each in launches if each.kernel != "cut_segments"])
    assert counts[1] - counts[0] == products  # and the last sum
    assert seen == [ours, ours * 2]


def test_a_recorded_call_is_one_replay_and_waits_for_nothing_more(device, launches) -> None:
    tower = Tower(device, qwen(2))
    waits = -device.num_syncs
    optimise_packed_attention(tower.model, lambda *each: device.kernel(by_torch, *each))
    tower.encode()
    waits += device.num_syncs
    fused = Tower(device, qwen(2))
    fused.fuse()
    before = device.num_syncs
    expected = [rows.shape for rows in fused.encode()]
    assert device.num_syncs - before <= waits
    fused.encoder.record(capture_cuda(is_alone=False))
    for _ in range(2):
        fused.encode()
    assert fused.encoder.record_next()
    device.operators.clear()
    before = device.num_syncs
    launches.clear()
    assert [rows.shape for rows in fused.encode()] == expected
    assert len(device.operators) < 20 and not launches
    assert device.num_syncs - before <= 1  # the integers of the form are read


@pytest.mark.parametrize("make", [qwen, siglip])
def test_weights_are_held_once(make: Callable[[int], Any], device, launches) -> None:
    tower = Tower(device, make(1))
    before = num_bytes()
    (block,) = tower.fuse()
    assert is_fused(block) and not list(block.parameters())
    assert num_bytes() == before >= tower.encoder.weight_bytes


def num_bytes() -> int:
    """Of all tensors on the simulated GPU."""
    gc.collect()
    storages = (each.held.untyped_storage() for each in gc.get_objects() if type(each) is CudaTensor)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


def test_blocks_whose_matrices_are_apart_stay(device, launches) -> None:
    model: Any = device.put(siglip(1)[0])
    (parts,) = blocks_of(model)
    with torch.inference_mode():
        assert CudaBlockKernels().builder(parts) is None


def test_what_is_not_fused_is_named(device, launches, caplog, monkeypatch) -> None:
    """Launches compute nothing here: what a block adds is found to be other numbers."""
    caplog.set_level("INFO")
    tower = Tower(device, qwen(1))
    monkeypatch.setattr(tower_blocks, "has_triton", lambda: True)
    assert optimise_tower_blocks(tower.model.model.visual) == 0
    assert "1 blocks run by their modules: Qwen2_5_VLVisionBlock" in caplog.text
    assert not any(isinstance(each.forward, FusedBlock) for each in tower.model.modules())
    monkeypatch.setattr(tower_blocks, "has_triton", lambda: False)
    assert optimise_tower_blocks(tower.model) == 0
    assert "triton cannot be used" in caplog.text
