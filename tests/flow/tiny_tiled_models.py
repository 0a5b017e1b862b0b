"""Tiny random models of the families that take images as tiles or padded pixels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import transformers as hf
from torch import Tensor

from cluster.types.media import MediaGeometry
from tests.flow.tiny_models import (
    GEMMA,
    HEAD_16,
    IMAGE,
    IMG,
    MIXED_LAYERS,
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

_CLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def _image_requests(
    items: list[tuple[Mapping[str, Tensor], int]], start: int | None = None, parts: int = 1
) -> list[TinyRequest]:
    """First prompt: all items with text around them; second: the last item alone; third: text. `parts`:
    ranges of an item."""
    first = TinyRequest().text(9, 1)
    for seed, (item, num_tokens) in enumerate(items):
        first = _framed(first, item, num_tokens, start, parts).text(4, 10 + seed)
    second = _framed(TinyRequest().text(3, 2), *items[-1], start, parts).text(6, 3)
    return [collect(first), collect(second), TinyRequest().text(9, 8)]


def _framed(
    request: TinyRequest, item: Mapping[str, Tensor], num_tokens: int, start: int | None, parts: int
) -> TinyRequest:
    if start is None:
        return request.media(IMAGE, item, MediaGeometry(num_tokens), parts, (7, 8))
    return request.raw(start).media(IMAGE, item, MediaGeometry(num_tokens), parts, (VE, 7, start)).raw(VE)


def _pixels(count: int, seed: int, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def llava() -> TinyCase:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, image_token_id=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.LlavaForConditionalGeneration(config)), _image_requests(items))


def _anyres_items(
    model: hf.PreTrainedModel, sizes: list[tuple[int, int]]
) -> list[tuple[dict[str, Tensor], int]]:
    items = []
    for seed, size in enumerate(sizes):
        item = {"pixel_values": _pixels(3, seed)[None], "image_sizes": torch.tensor([size])}
        with torch.no_grad():
            rows = model.model.get_image_features(**item, return_dict=True).pooler_output
        items.append((item, len(rows[0])))
    return items


_PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]


def llava_next() -> TinyCase:
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, image_token_id=IMG, image_grid_pinpoints=_PINPOINTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaNextForConditionalGeneration(config))
    return TinyCase(model, _image_requests(_anyres_items(model, [(16, 30), (30, 16)])))


def llava_onevision() -> TinyCase:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**_CLIP), text_config=hf.Qwen2Config(**TEXT),
        image_token_index=IMG,
        image_token_id=IMG, video_token_index=VID, video_token_id=VID, image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaOnevisionForConditionalGeneration(config))
    requests = _image_requests(_anyres_items(model, [(16, 30)]))
    clip = {"pixel_values_videos": noise(1, 2, 3, 16, 16)}
    requests.append(collect(TinyRequest().text(3, 4).media(VIDEO, clip, MediaGeometry(2 * 4 + 1)).text(4, 5)))
    return TinyCase(model, requests)


def internvl() -> TinyCase:
    vision = hf.InternVLVisionConfig(**{**_CLIP, "image_size": [16, 16], "patch_size": [4, 4]})
    config = hf.InternVLConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**TEXT), image_token_id=IMG, downsample_ratio=0.5
    )
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(hf.InternVLForConditionalGeneration(config)), _image_requests(items))


def gemma3() -> TinyCase:
    text = hf.Gemma3TextConfig(**{**TEXT, **GEMMA, **MIXED_LAYERS, "sliding_window": 12})
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**_CLIP, vision_use_head=False), text_config=text,
        image_token_index=IMG,
        image_token_id=IMG, boi_token_index=VS, eoi_token_index=VE, mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(2, seed)}, 32) for seed in (1, 2)]  # an image and a crop of it
    requests = _image_requests(items, start=VS, parts=2)
    for request in requests:
        request.given(token_type_ids=torch.tensor([[int(token == IMG) for token in request.token_ids]]))
    return TinyCase(randomized(hf.Gemma3ForConditionalGeneration(config)), requests)


def mistral3() -> TinyCase:
    vision = {**_CLIP, "num_hidden_layers": 2, "image_size": 32}
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**vision), text_config=hf.MistralConfig(**TEXT,
        sliding_window=None),
        image_token_index=IMG, image_token_id=IMG, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": _pixels(1, s, 16, 32), "image_sizes": torch.tensor([[16, 32]])}, 8) for s in (1, 2)
    ]
    return TinyCase(randomized(hf.Mistral3ForConditionalGeneration(config)), _image_requests(items, parts=2))


def _tile_case(model_class: str, config_class: str) -> TinyCase:
    vision = {**_CLIP, "num_hidden_layers": 2}
    config = getattr(hf, config_class)(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMG, scale_factor=2
    )
    torch.manual_seed(0)
    model = getattr(hf, model_class)(config)
    items = [({"pixel_values": _pixels(2, 3)[None]}, 8)]
    return TinyCase(randomized(model), _image_requests(items, parts=2))


def idefics3() -> TinyCase:
    return _tile_case("Idefics3ForConditionalGeneration", "Idefics3Config")


def smolvlm() -> TinyCase:
    return _tile_case("SmolVLMForConditionalGeneration", "SmolVLMConfig")


def vipllava() -> TinyCase:
    config = hf.VipLlavaConfig(
        vision_config=hf.CLIPVisionConfig(**_CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, image_token_id=IMG, vision_feature_layers=[-2, -1],
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.VipLlavaForConditionalGeneration(config)), _image_requests(items))


def lighton_ocr() -> TinyCase:
    vision = {**_CLIP, "num_hidden_layers": 2, "image_size": 32}
    config = hf.LightOnOcrConfig(
        vision_config=hf.PixtralVisionConfig(**vision), text_config=hf.Qwen3Config(**TEXT, **HEAD_16),
        image_token_id=IMG, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": _pixels(1, s, 16, 32), "image_sizes": torch.tensor([[16, 32]])}, 8) for s in (1, 2)
    ]
    return TinyCase(randomized(hf.LightOnOcrForConditionalGeneration(config)), _image_requests(items))


def _cohere_case(name: str, **changes: int) -> TinyCase:
    text = hf.Cohere2Config(**{**TEXT, **MIXED_LAYERS, "sliding_window": 12, "logit_scale": 0.25})
    config = getattr(hf, f"{name}Config")(
        vision_config=hf.SiglipVisionConfig(**_CLIP, vision_use_head=False), text_config=text,
        image_token_id=IMG, **changes
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(
        randomized(getattr(hf, f"{name}ForConditionalGeneration")(config)), _image_requests(items)
    )


def aya_vision() -> TinyCase:
    return _cohere_case("AyaVision", image_token_index=IMG)


def cohere2_vision() -> TinyCase:
    return _cohere_case("Cohere2Vision", alignment_intermediate_size=64)


def deepseek_vl() -> TinyCase:
    config = hf.DeepseekVLConfig(
        vision_config=hf.SiglipVisionConfig(**_CLIP, vision_use_head=False),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": _pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.DeepseekVLForConditionalGeneration(config)), _image_requests(items))
