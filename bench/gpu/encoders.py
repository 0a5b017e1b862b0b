"""Latencies of towers with random weights: one call, until its rows are computed.

A tower of Qwen2.5-VL's form (12 blocks, every fourth over whole images) by the blocks and the attention that
workers use, and by transformers' own calls, one for each window or image; SigLIP-L in LLaVA, with its
projector."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from bench.gpu.machine import DeviceSpeed, median_s, wait
from bench.gpu.served import Measurements
from cluster.model.cuda.capture import capture_cuda
from cluster.model.cuda.merging import merge_inputs
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.tower_blocks import optimise_tower_blocks
from cluster.model.encoder import EncoderModel
from cluster.types.media import Modality

Call = tuple[Modality, Sequence[Mapping[str, Tensor]]]  # arguments of `encode`
ONE, SIXTEEN, CLIP = "1 image of 224²", "16 images of 224²", "30 frames of 224²"
SIGLIP = "SigLIP-L, 1 image of 448²"
_NUM_ROUNDS = 10
_PATCH = 14  # pixels
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
_SOUND: dict[str, Any] = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500,
}  # fmt: skip
_TINY_SOUND: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
}
_TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "depth": 1, "num_hidden_layers": 1}


def latencies(speed: DeviceSpeed, rehearse: bool) -> Measurements:
    """us: as a worker serves a form that comes again, on a GPU from a recording. eager_us: as it serves a new
    form. own_us: by transformers' own modules. record_us: how long a recording keeps the encoder.
    fused_blocks: blocks of the tower that are ours. equal: whether recorded rows are those of the unrecorded
    call, bit by bit."""
    tiny: dict[str, Any] = _TINY if rehearse else {}
    config = hf.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=_VISION | tiny)
    model = _random(hf.Qwen2_5_VLForConditionalGeneration, config, speed)
    image = _item("pixel_values", "image_grid_thw", 1, speed)
    # two frames in each patch
    clip = _item("pixel_values_videos", "video_grid_thw", 2 if rehearse else 15, speed)
    calls: dict[str, Call] = {
        ONE: (Modality.IMAGE, [image]),
        SIXTEEN: (Modality.IMAGE, [image] * (2 if rehearse else 16)),
        CLIP: (Modality.VIDEO, [clip]),
    }
    yield from _measured(model, calls, speed, rehearse)
    vision = hf.SiglipVisionConfig(**_SIGLIP | tiny, vision_use_head=False)
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**_TEXT), vision_config=vision, image_token_index=1,
        vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    pixels = torch.randn(1, 3, 448, 448, device=speed.device, dtype=speed.dtype)
    model = _random(hf.LlavaForConditionalGeneration, config, speed)
    yield from _measured(model, {SIGLIP: (Modality.IMAGE, [{"pixel_values": pixels}])}, speed, rehearse)


def batches(speed: DeviceSpeed, rehearse: bool) -> Measurements:
    """Measures the tower of Qwen2.5-VL's form that `latencies` has, and one for sound of Qwen2-Audio's:
    images of three sizes, clips of 8 and 30 frames, windows of 30 s of sound, up to 32 in a call. us: of the
    call, unrecorded; own_us: by transformers' own modules."""
    tiny: dict[str, Any] = _TINY if rehearse else {}
    config = hf.Qwen2_5_VLConfig(text_config=_TEXT, vision_config=_VISION | tiny)
    model = _random(hf.Qwen2_5_VLForConditionalGeneration, config, speed)
    counts = (1, 2) if rehearse else (1, 2, 4, 8, 16, 32)
    calls: dict[str, Call] = {}
    for side in (224,) if rehearse else (224, 448, 896):
        image = _item("pixel_values", "image_grid_thw", 1, speed, side)
        for count in counts:
            calls[f"{count} × image of {side}²"] = Modality.IMAGE, [image] * count
    for num_frames in (8,) if rehearse else (8, 30):
        clip = _item("pixel_values_videos", "video_grid_thw", num_frames // 2, speed)
        for count in counts[:-2] if len(counts) > 2 else counts:
            calls[f"{count} × {num_frames} frames of 224²"] = Modality.VIDEO, [clip] * count
    yield from _measured(model, calls, speed, rehearse, records=False)
    heard = hf.Qwen2AudioConfig(audio_config=_SOUND | (_TINY_SOUND if rehearse else {}), text_config=_TEXT)
    model = _random(hf.Qwen2AudioForConditionalGeneration, heard, speed)
    sound = {
        "input_features": torch.randn(1, 128, 3000, device=speed.device, dtype=speed.dtype),
        "feature_attention_mask": torch.ones(1, 3000, dtype=torch.int64, device=speed.device),
    }
    sounds: dict[str, Call] = {
        f"{count} × 30 s of sound": (Modality.AUDIO, [sound] * count) for count in counts
    }
    yield from _measured(model, sounds, speed, rehearse, records=False)


def _measured(
    model: Any, calls: Mapping[str, Call], speed: DeviceSpeed, rehearse: bool, *, records: bool = True
) -> Measurements:
    """records: a GPU records the calls."""
    encoder = EncoderModel.from_model(model)
    num_rounds = 1 if rehearse else _NUM_ROUNDS

    def us(call: Call) -> float:
        return 1e6 * median_s(partial(encoder.encode, *call), speed.device, num_rounds)

    own = {what: us(call) for what, call in calls.items()}
    merge_inputs(model, speed.device)
    num_fused = optimise_tower_blocks(model)
    optimise_packed_attention(model)
    eager = {what: us(call) for what, call in calls.items()}
    if speed.device.type != "cuda" or not records:
        yield from (
            {"what": what, "us": eager[what], "own_us": own[what], "fused_blocks": num_fused}
            for what in calls
        )
        return
    encoder.record(capture_cuda(is_alone=False))
    for what, call in calls.items():
        expected = [encoder.encode(*call) for _ in range(2)][1]
        wait(speed.device)
        began_at = time.perf_counter()
        is_recorded = encoder.record_next()
        wait(speed.device)
        record_us = 1e6 * (time.perf_counter() - began_at)
        equal = all(map(torch.equal, encoder.encode(*call), expected))
        yield {
            "what": what, "us": us(call), "eager_us": eager[what], "own_us": own[what],
            "record_us": record_us if is_recorded else None, "equal": equal, "fused_blocks": num_fused,
        }  # fmt: skip


def _random(kind: type[nn.Module], config: hf.PreTrainedConfig, speed: DeviceSpeed) -> Any:
    with torch.device(speed.device):
        return kind(config).to(speed.dtype).eval()


def _item(pixels: str, grid: str, num_patches: int, speed: DeviceSpeed, side: int = 224) -> dict[str, Tensor]:
    """num_patches: in time. side: in pixels."""
    side //= _PATCH
    rows = torch.randn(num_patches * side**2, 3 * 2 * _PATCH**2, device=speed.device, dtype=speed.dtype)
    return {pixels: rows, grid: torch.tensor([[num_patches, side, side]], device=speed.device)}
