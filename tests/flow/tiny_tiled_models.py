"""Tiny random models of the families that take images as tiles or padded pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from cluster.types.media import MediaGeometry
from tests.flow.tiny_models import (
    GEMMA,
    HEAD_16,
    IMAGE,
    IMG,
    LLAMA4,
    MISTRAL4,
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

CLIP: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}  # fmt: skip


def image_requests(
    items: Sequence[tuple[Mapping[str, Tensor], int]], start: int | None = None, parts: int = 1
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


def pixels(count: int, seed: int, height: int = 16, width: int = 16) -> Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(seed))


def llava() -> TinyCase:
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.LlavaForConditionalGeneration(config)), image_requests(items))


def _anyres_items(
    model: hf.PreTrainedModel, sizes: list[tuple[int, int]]
) -> list[tuple[dict[str, Tensor], int]]:
    items = []
    for seed, size in enumerate(sizes):
        item = {"pixel_values": pixels(3, seed)[None], "image_sizes": torch.tensor([size])}
        with torch.no_grad():
            rows = model.model.get_image_features(**item, return_dict=True).pooler_output
        items.append((item, len(rows[0])))
    return items


_PINPOINTS = [[16, 16], [16, 32], [32, 16], [32, 32]]


def llava_next() -> TinyCase:
    config = hf.LlavaNextConfig(
        vision_config=hf.CLIPVisionConfig(**CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, image_grid_pinpoints=_PINPOINTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaNextForConditionalGeneration(config))
    return TinyCase(model, image_requests(_anyres_items(model, [(16, 30), (30, 16)])))


def llava_onevision() -> TinyCase:
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**CLIP), text_config=hf.Qwen2Config(**TEXT),
        image_token_index=IMG,
        video_token_index=VID, image_grid_pinpoints=_PINPOINTS,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaOnevisionForConditionalGeneration(config))
    requests = image_requests(_anyres_items(model, [(16, 30)]))
    clip = {"pixel_values_videos": noise(1, 2, 3, 16, 16)}
    requests.append(collect(TinyRequest().text(3, 4).media(VIDEO, clip, MediaGeometry(2 * 4 + 1)).text(4, 5)))
    return TinyCase(model, requests)


def internvl() -> TinyCase:
    vision = hf.InternVLVisionConfig(**{**CLIP, "image_size": [16, 16], "patch_size": [4, 4]})
    config = hf.InternVLConfig(
        vision_config=vision, text_config=hf.Qwen2Config(**TEXT), image_token_id=IMG, downsample_ratio=0.5
    )
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(hf.InternVLForConditionalGeneration(config)), image_requests(items))


def perception_lm() -> TinyCase:
    eyes = {
        "embed_dim": 32, "num_heads": 2, "img_size": (56, 56), "depth": 2, "global_pool": "",
        "use_post_transformer_norm": False, "init_values": 0.1, "ref_feat_shape": (4, 4),
    }  # fmt: skip
    config = hf.PerceptionLMConfig(
        vision_config={
            "model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": eyes
        },
        text_config=hf.LlamaConfig(**TEXT), projector_pooling_ratio=2, image_token_id=IMG,
        video_token_id=VID, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.PerceptionLMForConditionalGeneration(config))
    requests = image_requests([({"pixel_values": pixels(3, 3, 56, 56)[None]}, 12)])
    clip = {"pixel_values_videos": noise(1, 2, 3, 56, 56)}
    requests.append(collect(TinyRequest().text(3, 4).media(VIDEO, clip, MediaGeometry(8)).text(4, 5)))
    return TinyCase(model, requests)


def fast_vlm() -> TinyCase:
    eyes = {"inference_mode": True, "layers": (1, 1, 1, 1, 1), "embed_dims": (8, 16, 32, 64, 64)}
    config = hf.FastVlmConfig(
        vision_config={
            "model_type": "timm_wrapper", "architecture": "fastvit_mci3", "do_pooling": True,
            "global_pool": "avg", "hidden_size": 128, "model_args": eyes,
        },
        text_config=hf.Qwen2Config(**TEXT), image_token_index=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(1, seed, 128, 128)}, 4) for seed in (1, 2)]
    return TinyCase(randomized(hf.FastVlmForConditionalGeneration(config)), image_requests(items))


def qianfan_ocr() -> TinyCase:
    vision = {**CLIP, "image_size": [16, 16], "patch_size": [4, 4]}
    config = hf.QianfanOCRConfig(
        vision_config=vision, text_config=hf.Qwen3Config(**TEXT, **HEAD_16), image_token_id=IMG
    )
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(hf.QianfanOCRForConditionalGeneration(config)), image_requests(items))


def llava_next_video() -> TinyCase:
    config = hf.LlavaNextVideoConfig(
        vision_config=hf.CLIPVisionConfig(**CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, video_token_index=VID,
        image_grid_pinpoints=_PINPOINTS,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.LlavaNextVideoForConditionalGeneration(config))
    requests = image_requests(_anyres_items(model, [(16, 30)]))
    clip = {"pixel_values_videos": noise(1, 2, 3, 16, 16)}
    requests.append(collect(TinyRequest().text(3, 4).media(VIDEO, clip, MediaGeometry(2 * 4)).text(4, 5)))
    return TinyCase(model, requests)


SAM: dict[str, Any] = {
    "hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 64, "mlp_dim": 64, "window_size": 3, "global_attn_indexes": [1],
}  # fmt: skip


def got_ocr2() -> TinyCase:
    config = hf.GotOcr2Config(
        vision_config=SAM, text_config=hf.Qwen2Config(**TEXT), image_token_index=IMG,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(tiles, tiles, 64, 64)}, 16 * tiles) for tiles in (2, 1)]
    return TinyCase(randomized(hf.GotOcr2ForConditionalGeneration(config)), image_requests(items))


def janus() -> TinyCase:
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16,
        "patch_size": 4, "projection_dim": 64,
    }  # fmt: skip
    images = {
        "embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
        "latent_channels": 8, "projection_dim": 64, "image_token_embed_dim": 64, "num_res_blocks": 1,
    }  # fmt: skip
    config = hf.JanusConfig(
        vision_config=vision, vq_config=images, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMG,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.JanusForConditionalGeneration(config)), image_requests(items))


def gemma3() -> TinyCase:
    text = hf.Gemma3TextConfig(**{**TEXT, **GEMMA, **MIXED_LAYERS, "sliding_window": 12})
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**CLIP, vision_use_head=False), text_config=text,
        image_token_index=IMG,
        boi_token_index=VS, eoi_token_index=VE, mm_tokens_per_image=16,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(2, seed)}, 32) for seed in (1, 2)]  # an image and a crop of it
    requests = image_requests(items, start=VS, parts=2)
    for request in requests:
        request.given(token_type_ids=torch.tensor([[int(token == IMG) for token in request.token_ids]]))
    return TinyCase(randomized(hf.Gemma3ForConditionalGeneration(config)), requests)


def _mistral3_case(text: hf.PreTrainedConfig) -> TinyCase:
    vision = {**CLIP, "num_hidden_layers": 2, "image_size": 32}
    config = hf.Mistral3Config(
        vision_config=hf.PixtralVisionConfig(**vision), text_config=text, image_token_index=IMG,
        spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": pixels(1, s, 16, 32), "image_sizes": torch.tensor([[16, 32]])}, 8) for s in (1, 2)
    ]
    return TinyCase(randomized(hf.Mistral3ForConditionalGeneration(config)), image_requests(items, parts=2))


def mistral3() -> TinyCase:
    return _mistral3_case(hf.MistralConfig(**TEXT, sliding_window=None))


def mistral3_of_mistral4() -> TinyCase:
    return _mistral3_case(hf.Mistral4Config(**{**TEXT, **MISTRAL4}))


def _tile_case(model_class: str, config_class: str) -> TinyCase:
    vision = {**CLIP, "num_hidden_layers": 2}
    config = getattr(hf, config_class)(
        vision_config=vision, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMG, scale_factor=2
    )
    torch.manual_seed(0)
    model = getattr(hf, model_class)(config)
    items = [({"pixel_values": pixels(2, 3)[None]}, 8)]
    return TinyCase(randomized(model), image_requests(items, parts=2))


def idefics3() -> TinyCase:
    return _tile_case("Idefics3ForConditionalGeneration", "Idefics3Config")


def smolvlm() -> TinyCase:
    return _tile_case("SmolVLMForConditionalGeneration", "SmolVLMConfig")


def vipllava() -> TinyCase:
    config = hf.VipLlavaConfig(
        vision_config=hf.CLIPVisionConfig(**CLIP, projection_dim=32), text_config=hf.LlamaConfig(**TEXT),
        image_token_index=IMG, vision_feature_layer=[-2, -1],
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.VipLlavaForConditionalGeneration(config)), image_requests(items))


def lighton_ocr() -> TinyCase:
    vision = {**CLIP, "num_hidden_layers": 2, "image_size": 32}
    config = hf.LightOnOcrConfig(
        vision_config=hf.PixtralVisionConfig(**vision), text_config=hf.Qwen3Config(**TEXT, **HEAD_16),
        image_token_id=IMG, spatial_merge_size=2,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": pixels(1, s, 16, 32), "image_sizes": torch.tensor([[16, 32]])}, 8) for s in (1, 2)
    ]
    return TinyCase(randomized(hf.LightOnOcrForConditionalGeneration(config)), image_requests(items))


def llama4() -> TinyCase:
    vision = {
        **CLIP, "intermediate_size": 128, "vision_output_dim": 48, "projector_input_dim": 48,
        "projector_output_dim": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip
    text = hf.Llama4TextConfig(**{**TEXT, **LLAMA4, "attention_chunk_size": 512, "floor_scale": 512})
    config = hf.Llama4Config(vision_config=vision, text_config=text, image_token_index=IMG)
    # the forward of transformers 5.24 reads this of what its text model returns, which has no such field
    MoeCausalLMOutputWithPast.image_outputs = None  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(hf.Llama4ForConditionalGeneration(config)), image_requests(items))


def _cohere_case(name: str, **changes: int) -> TinyCase:
    text = hf.Cohere2Config(**{**TEXT, **MIXED_LAYERS, "sliding_window": 12, "logit_scale": 0.25})
    config = getattr(hf, f"{name}Config")(
        vision_config=hf.SiglipVisionConfig(**CLIP, vision_use_head=False), text_config=text,
        image_token_id=IMG, **changes
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(tiles, tiles)}, 4 * tiles) for tiles in (3, 1)]
    return TinyCase(randomized(getattr(hf, f"{name}ForConditionalGeneration")(config)), image_requests(items))


def aya_vision() -> TinyCase:
    return _cohere_case("AyaVision", image_token_index=IMG)


def cohere2_vision() -> TinyCase:
    return _cohere_case("Cohere2Vision", alignment_intermediate_size=64)


def deepseek_vl() -> TinyCase:
    config = hf.DeepseekVLConfig(
        vision_config=hf.SiglipVisionConfig(**CLIP, vision_use_head=False),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [({"pixel_values": pixels(1, seed)}, 16) for seed in (1, 2)]
    return TinyCase(randomized(hf.DeepseekVLForConditionalGeneration(config)), image_requests(items))
