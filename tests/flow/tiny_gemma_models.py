"""Tiny random models of Gemma 4: images, clips and sound; with tokens that see each other, and with inputs of
layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from cluster.types.media import MediaGeometry, Modality
from tests.flow.tiny_models import (
    AE,
    AS,
    AUD,
    AUDIO,
    GEMMA4,
    IMAGE,
    IMG,
    TEXT,
    VE,
    VID,
    VIDEO,
    VS,
    TinyCase,
    TinyRequest,
    collect,
    noise,
    randomized,
)

_SIZES: dict[str, Any] = {**TEXT, **GEMMA4, "sliding_window": 12, "vocab_size_per_layer_input": 400}
_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 64, "initializer_range": 0.15,
}  # fmt: skip
_AUDIO: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "output_proj_dims": 48,
    "subsampling_conv_channels": [16, 8], "initializer_range": 0.15,
}  # fmt: skip
_SEEING: dict[str, Any] = {
    "use_bidirectional_attention": "vision", "num_key_value_heads": 4, "attention_k_eq_v": True,
    "num_global_key_value_heads": 2,
}  # fmt: skip
_MARKS = {IMAGE: (VS, VE), VIDEO: (VS, VE), AUDIO: (AS, AE)}
Item = tuple[Modality, Mapping[str, Tensor], int, int]  # with rows of each of its parts, and their number


def _image(width: int, height: int, seed: int) -> Item:
    values, positions = _patches(1, width, height, seed)
    return IMAGE, {"pixel_values": values, "image_position_ids": positions}, width * height // 4, 1


def _clip(num_frames: int, width: int, height: int) -> Item:
    values, positions = _patches(num_frames, width, height, 7)
    item = {
        "pixel_values_videos": values,
        "video_position_ids": positions,
        "num_frames_per_video": torch.tensor([num_frames]),
    }
    return VIDEO, item, width * height // 4, num_frames


def _patches(count: int, width: int, height: int, seed: int) -> tuple[Tensor, Tensor]:
    """[count, 96, 48] and [count, 96, 2]: patches of one size, padded."""
    across, down = torch.meshgrid(torch.arange(width), torch.arange(height), indexing="xy")
    positions = torch.stack([across, down], -1).flatten(0, 1)
    positions = torch.nn.functional.pad(positions, (0, 0, 0, 96 - len(positions)), value=-1)
    positions = positions.repeat(count, 1, 1)
    values = torch.rand(count, 96, 48, generator=torch.Generator().manual_seed(seed))
    return values.masked_fill(positions[..., :1] < 0, 0.0), positions


def _sound(num_frames: int) -> Item:
    mask = (torch.arange(64) < num_frames)[None]
    features = noise(1, 64, 16) * mask[..., None]
    item = {"input_features": features, "input_features_mask": mask}
    return AUDIO, item, (num_frames + 3) // 4, 1


def _prompt(*items: Item) -> TinyRequest:
    request = TinyRequest().text(5, 1)
    for seed, (modality, item, rows, parts) in enumerate(items):
        start, end = _MARKS[modality]
        geometry = MediaGeometry(rows * parts)
        request = request.raw(start).media(modality, item, geometry, parts, (end, 7, start)).raw(end)
        request = request.text(3 + seed, 10 + seed)
    request = collect(request)
    kinds = {IMG: 1, VID: 2, AUD: 3}
    types = torch.tensor([[kinds.get(token, 0) for token in request.token_ids]])
    return request.given(mm_token_type_ids=types)


def _gemma4(**text: Any) -> TinyCase:
    config = hf.Gemma4Config(
        text_config={**_SIZES, **text}, vision_config=_VISION, audio_config=_AUDIO, image_token_id=IMG,
        video_token_id=VID, audio_token_id=AUD, boi_token_id=VS, eoi_token_id=VE, boa_token_id=AS,
        eoa_token_index=AE, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    wide, small, clip, sound = _image(12, 8, 1), _image(4, 8, 2), _clip(3, 8, 4), _sound(51)
    requests = [_prompt(wide, small), _prompt(sound, clip), _prompt(clip, sound, small), _prompt(wide)]
    requests.append(TinyRequest().text(9, 8))
    return TinyCase(randomized(hf.Gemma4ForConditionalGeneration(config)), requests)


def gemma4() -> TinyCase:
    """As the larger models: an image's tokens see each other in layers with a window, in which there is less
    room than the image takes."""
    return _gemma4(**_SEEING, hidden_size_per_layer_input=0, num_kv_shared_layers=0)


def gemma4_small() -> TinyCase:
    """As the smaller models: inputs of layers, shared KV, and causal attention alone."""
    return _gemma4()
