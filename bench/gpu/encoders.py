"""Latencies of towers with random weights: one call, until its rows are computed.

A tower of Qwen2.5-VL's form (12 blocks, every fourth over whole images) by the attention that workers use,
and by transformers' own calls, one for each window or image; SigLIP-L as transformers has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from bench.gpu.machine import DeviceSpeed, median_s
from bench.gpu.served import Measurements
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.encoder import EncoderModel
from cluster.types.media import Modality

ONE, SIXTEEN, CLIP = "1 image of 224²", "16 images of 224²", "30 frames of 224²"
SIGLIP = "SigLIP-L, 1 image of 448²"
_NUM_ROUNDS = 10
_SIDE = 224 // 14  # in patches
_VISION: dict[str, Any] = {
    "depth": 12, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 1024,
    "fullatt_block_indexes": [3, 7, 11],
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 32,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
_SIGLIP: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 448, "patch_size": 16,
}  # fmt: skip
_TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "depth": 1, "num_hidden_layers": 1}


def latencies(speed: DeviceSpeed, rehearse: bool) -> Measurements:
    """us: as a worker serves it. own_us: with transformers' own attention."""
    tiny: dict[str, Any] = _TINY if rehearse else {}
    num_rounds = 1 if rehearse else _NUM_ROUNDS
    config = hf.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=_VISION | tiny)
    model = _random(hf.Qwen2_5_VLForConditionalGeneration, config, speed)
    encoder = EncoderModel.from_model(model)
    image = _item("pixel_values", "image_grid_thw", 1, speed)
    # two frames in each patch
    clip = _item("pixel_values_videos", "video_grid_thw", 2 if rehearse else 15, speed)
    calls: dict[str, Callable[[], object]] = {
        ONE: partial(encoder.encode, Modality.IMAGE, [image]),
        SIXTEEN: partial(encoder.encode, Modality.IMAGE, [image] * (2 if rehearse else 16)),
        CLIP: partial(encoder.encode, Modality.VIDEO, [clip]),
    }
    own = {what: median_s(call, speed.device, num_rounds) for what, call in calls.items()}
    optimise_packed_attention(model)
    for what, call in calls.items():
        us = 1e6 * median_s(call, speed.device, num_rounds)
        yield {"what": what, "us": us, "own_us": 1e6 * own[what]}
    siglip = _random(hf.SiglipVisionModel, hf.SiglipVisionConfig(**_SIGLIP | tiny), speed)
    pixels = torch.randn(1, 3, 448, 448, device=speed.device, dtype=speed.dtype)
    with torch.inference_mode():
        yield {"what": SIGLIP, "us": 1e6 * median_s(partial(siglip, pixels), speed.device, num_rounds)}


def _random(kind: type[nn.Module], config: hf.PreTrainedConfig, speed: DeviceSpeed) -> Any:
    with torch.device(speed.device):
        return kind(config).to(speed.dtype).eval()


def _item(pixels: str, grid: str, num_patches: int, speed: DeviceSpeed) -> dict[str, Tensor]:
    """num_patches: in time."""
    rows = torch.randn(num_patches * _SIDE**2, 3 * 2 * 14 * 14, device=speed.device, dtype=speed.dtype)
    return {pixels: rows, grid: torch.tensor([[num_patches, _SIDE, _SIDE]], device=speed.device)}
