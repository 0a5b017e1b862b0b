"""Packed towers on a simulated GPU: how often a call with many images calls attention and waits for the
device, what is launched, and which towers stay as they were. What the kernels compute:
test_cuda_packed_attention.py, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from cluster.model.cuda import packed_towers
from cluster.model.cuda.packed_attention import PackedAttention
from cluster.model.cuda.packed_towers import NAME, optimise_packed_attention
from cluster.model.encoder import EncoderModel
from cluster.types.media import Modality
from tests.fakes.cuda_device import CudaTensor, SimulatedCuda
from tests.fakes.strict_triton import strict_triton
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import noise, randomized

FULL_BLOCKS = [3, 7, 11]
NUM_WINDOWS = 4  # of an image: 8 × 8 patches of 14 in each
SDPA = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Counts:
    """Counts what one call did."""

    by_sdpa: int
    by_segments: int
    waits: int


def by_torch(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: float) -> Tensor:
    """In place of the kernel: segment by segment."""
    parts = zip(*(rows.split(starts.diff().tolist()) for rows in (query, key, value)), strict=True)
    heads = ([rows.transpose(0, 1)[None] for rows in part] for part in parts)
    return torch.cat(
        [F.scaled_dot_product_attention(*each, scale=scaling)[0].transpose(0, 1) for each in heads]
    )


def make_encoder(device: SimulatedCuda, num_blocks: int) -> tuple[nn.Module, EncoderModel]:
    """Returns the model and its encoder, of Qwen2.5-VL's form: patches of 14, windows of 112."""
    text = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {
        "depth": num_blocks, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
        "out_hidden_size": 32, "fullatt_block_indexes": FULL_BLOCKS,
    }  # fmt: skip
    ids = {"vocab_size": 32, "bos_token_id": None, "eos_token_id": None}
    config = hf.Qwen2_5_VLConfig(text_config=text | ids, vision_config=vision)
    model = device.put(randomized(hf.Qwen2_5_VLForConditionalGeneration(config)))
    return model, EncoderModel.from_model(model)


def encoded(encoder: EncoderModel, device: SimulatedCuda, num_images: int) -> tuple[list[Tensor], Counts]:
    """Images of 224²."""
    grid, pixels = torch.tensor([[1, 16, 16]]), noise(num_images, 256, 3 * 2 * 14 * 14)
    images = [{"pixel_values": CudaTensor(own), "image_grid_thw": CudaTensor(grid)} for own in pixels]
    num_syncs = device.num_syncs
    device.operators.clear()
    rows = encoder.encode(Modality.IMAGE, images)
    counts = Counts(
        device.operators.count(SDPA), device.operators.count(by_torch.__name__), device.num_syncs - num_syncs
    )
    return [own.cpu() for own in rows], counts


def test_sixteen_images_are_one_attention_call_a_block(device: SimulatedCuda) -> None:
    model, encoder = make_encoder(device, 12)
    expected, before = encoded(encoder, device, 16)
    assert before == Counts(by_sdpa=9 * 16 * NUM_WINDOWS + 3 * 16, by_segments=0, waits=3 * 12 + 6)

    def attend(*arguments: Any) -> Tensor:
        return device.kernel(by_torch, *arguments)

    assert optimise_packed_attention(model, attend) == 12
    actual, after = encoded(encoder, device, 16)
    assert after == Counts(by_sdpa=0, by_segments=12, waits=6)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_launch_a_block_and_a_table_for_equal_segments(device: SimulatedCuda) -> None:
    queries, keys, values = (CudaTensor(noise(4096, heads, 80)) for heads in (4, 2, 2))
    windows, whole = (CudaTensor(torch.arange(0, 4097, size)) for size in (64, 4096))
    num_syncs = device.num_syncs
    with strict_triton() as launches:
        attention = PackedAttention()
        for starts in (windows, windows, whole, windows):
            attention.attend(queries, keys, values, starts, 0.1)
    assert [launch.kernel for launch in launches] == [
        "cut_segments", "attend_segments", "attend_segments", "cut_segments", "attend_segments",
        "attend_segments",
    ]  # fmt: skip
    rows = launches[1].arguments["ROWS"]
    assert [launch.grid for launch in launches] == [
        (3,), (4096 // rows + 64, 4), (4096 // rows + 64, 4), (3,), (4096 // rows + 1, 4),
        (4096 // rows + 64, 4),
    ]  # fmt: skip
    assert launches[1].arguments["GROUP"] == 2
    assert device.num_syncs == num_syncs


def zeros(query: Tensor, *_: Any) -> Tensor:
    return torch.zeros_like(query)


def failing(*_: Any) -> Tensor:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(("attend", "reason"), [(zeros, "other numbers"), (failing, "no such kernel")])
def test_a_tower_that_differs_or_fails_stays(attend, reason: str, device, caplog) -> None:
    model, encoder = make_encoder(device, 1)
    expected, before = encoded(encoder, device, 2)
    assert optimise_packed_attention(model, attend) == 0
    assert "1 Qwen2_5_VLVisionAttention: one call for each segment" in caplog.text and reason in caplog.text
    actual, after = encoded(encoder, device, 2)
    assert after == before == Counts(by_sdpa=2 * NUM_WINDOWS, by_segments=0, waits=3 + 6)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_a_tower_stays_where_triton_cannot_be_used(device, caplog, monkeypatch) -> None:
    monkeypatch.setattr(packed_towers, "has_triton", lambda: False)
    assert optimise_packed_attention(make_encoder(device, 1)[0]) == 0
    assert "triton cannot be used" in caplog.text


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_audio", "mistral3"])
def test_towers_whose_rows_are_not_packed_stay_on_sdpa(name: str, caplog) -> None:
    """SigLIP, CLIP, Whisper, Pixtral."""
    model: Any = MEDIA_FAMILIES[name]().model
    assert optimise_packed_attention(model.model, failing) == 0 and not caplog.records
    configs: list[Any] = [own.config for own in model.model.modules() if hasattr(own, "config")]
    assert configs and not any(config._attn_implementation == NAME for config in configs)
