"""Tiny random models of the families whose encoders take one image in a call, as parts of several sizes."""

from __future__ import annotations

import torch
import transformers as hf
from torch import Tensor

from tests.flow.tiny_models import HEAD_16, IMG, MIXED_LAYERS, TEXT, TWO_EXPERTS, TinyCase, randomized
from tests.flow.tiny_tiled_models import CLIP, SAM, image_requests, pixels


def deepseek_vl_hybrid() -> TinyCase:
    config = hf.DeepseekVLHybridConfig(
        vision_config=hf.SiglipVisionConfig(**CLIP, vision_use_head=False),
        high_res_vision_config=hf.SamVisionConfig(**SAM), text_config=hf.LlamaConfig(**TEXT),
        image_token_id=IMG, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    items = [
        ({"pixel_values": pixels(1, seed), "high_res_pixel_values": pixels(1, seed, 64, 64)}, 16)
        for seed in (1, 2)
    ]
    return TinyCase(randomized(hf.DeepseekVLHybridForConditionalGeneration(config)), image_requests(items))


def _local_items(sides: tuple[int, int], rows: tuple[int, int, int]) -> list[tuple[dict[str, Tensor], int]]:
    """Two images, the first with local views. sides: of the whole image and of a local view. rows: of these,
    and behind each image."""
    side, local = sides
    items = []
    for seed, count in enumerate((2, 0)):
        item = {"pixel_values": pixels(1, seed, side, side), "num_local_patches": torch.tensor([count])}
        if count:
            item["pixel_values_local"] = pixels(count, seed, local, local)
        items.append((item, rows[0] + count * rows[1] + rows[2]))
    return items


def deepseek_ocr2() -> TinyCase:
    encoder = {**TEXT, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sam = {
        **SAM, "image_size": 128, "patch_size": 2, "downsample_channels": [16, 32],
        "global_attn_indexes": [], "num_hidden_layers": 1,
    }  # fmt: skip
    experts = {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 32, **TWO_EXPERTS,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    }  # fmt: skip
    config = hf.DeepseekOcr2Config(
        vision_config={"sam_config": sam, "encoder_config": encoder},
        text_config={**TEXT, **experts, "initializer_range": 0.4},
        image_token_id=IMG,
    )  # fmt: skip
    torch.manual_seed(0)
    model = randomized(hf.DeepseekOcr2ForConditionalGeneration(config))
    return TinyCase(model, image_requests(_local_items((128, 96), (256, 144, 1))))


def step3p7() -> TinyCase:
    text = {
        **TEXT, **HEAD_16, **TWO_EXPERTS, "n_routed_experts": 4, "moe_intermediate_size": 32,
        "share_expert_dim": 32, "mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 12,
        "num_sliding_attention_heads": 6, **MIXED_LAYERS,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
        "patch_size": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    config = hf.Step3p7Config(vision_config=vision, text_config=text, image_token_id=IMG)
    torch.manual_seed(0)
    model = randomized(hf.Step3p7ForConditionalGeneration(config))
    return TinyCase(model, image_requests(_local_items((32, 16), (4, 1, 0))))


def granite_docling() -> TinyCase:
    vision = {**CLIP, "out_hidden_size": 64, "scale_factor": 2, "deepstack_visual_indexes": [0, 1]}
    scales = {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5}
    config = hf.GraniteDoclingConfig(
        vision_config=vision, text_config={**TEXT, **scales}, image_token_id=IMG, tie_word_embeddings=False,
        density_router_hidden_size=8,
    )  # fmt: skip
    torch.manual_seed(0)
    mask = torch.ones(1, 3, dtype=torch.bool)
    items = [({"pixel_values": pixels(3, 3)[None], "pixel_attention_mask": mask}, 12)]
    model = randomized(hf.GraniteDoclingForConditionalGeneration(config))
    return TinyCase(model, image_requests(items, parts=3))


def aria() -> TinyCase:
    vision = hf.Idefics3VisionConfig(**{**CLIP, "image_size": 490, "patch_size": 70})
    text = hf.AriaTextConfig(**TEXT, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)
    config = hf.AriaConfig(
        vision_config=vision, text_config=text, image_token_index=IMG, projector_patch_to_query_dict={49: 12}
    )
    torch.manual_seed(0)
    items = [
        ({"pixel_values": pixels(crops, crops, 490, 490), "pixel_mask": _valid(crops, height, width)}, rows)
        for crops, height, width, rows in ((2, 300, 490, 24), (1, 490, 98, 12))
    ]
    model = randomized(hf.AriaForConditionalGeneration(config))
    return TinyCase(model, image_requests(items))


def _valid(crops: int, height: int, width: int) -> Tensor:
    """[crops, 490, 490] bool: the pixels that are not padding."""
    mask = torch.zeros(crops, 490, 490, dtype=torch.bool)
    mask[:, :height, :width] = True
    return mask
