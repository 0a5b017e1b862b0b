"""Random-weight models of known shapes, the same bytes from the same seed: text-0.5b and vl-384m.

Ordinary Hugging Face folders, so every server under measurement reads the same weights. text-0.5b has
Qwen2.5-0.5B's shape and whole vocabulary; vl-384m has half its layers and a vision tower of Qwen2.5-VL's
kind. Biases and norm weights are random too: a server that forgets one of them answers differently (`python
-m bench.engine agree`).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine.vocabulary import BASE_TOKENS, SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEXT_MODEL, VISION_MODEL = "text-0.5b", "vl-384m"
NUM_LAYERS = {TEXT_MODEL: 24, VISION_MODEL: 12}
SEED = 0
TOKEN_ID = {token: BASE_TOKENS + idx for idx, token in enumerate(SPECIAL_TOKENS)}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def write_models(folder: Path) -> list[Path]:
    """Returns the folders. About 15 s and 1.8 GB; an existing folder is replaced."""
    return [write_model(folder / name, num_layers) for name, num_layers in NUM_LAYERS.items()]


def write_model(folder: Path, num_layers: int) -> Path:
    """One model; its folder has its name."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    has_vision = folder.name == VISION_MODEL
    make_model(num_layers, has_vision=has_vision).save_pretrained(folder)
    write_tokenizer(folder)
    if has_vision:
        write_processors(folder)
    return folder


def make_model(num_layers: int, *, has_vision: bool) -> PreTrainedModel:
    """A model in bfloat16, weights drawn from SEED."""
    from cluster.media.torchvision_compat import ensure_torchvision

    ensure_torchvision()  # must run before transformers is imported
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLForConditionalGeneration, Qwen2ForCausalLM

    torch.manual_seed(SEED)
    if has_vision:
        model: PreTrainedModel = Qwen2_5_VLForConditionalGeneration(vision_config(num_layers))
    else:
        model = Qwen2ForCausalLM(text_config(num_layers))
    draw_small_parameters(model)
    model.generation_config = GenerationConfig(
        bos_token_id=TOKEN_ID["<|endoftext|>"],
        eos_token_id=[TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
        pad_token_id=TOKEN_ID["<|endoftext|>"],
    )
    return model.bfloat16().eval()


def draw_small_parameters(model: PreTrainedModel) -> None:
    """Draws biases around 0 and norm weights around 1, in the order of their names; transformers initialises
    them with 0 and 1.
    """
    import torch

    generator = torch.Generator().manual_seed(SEED + 7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)
            elif parameter.ndim == 1:
                parameter.copy_(1 + torch.randn(parameter.shape, generator=generator) * 0.05)


def text_fields(num_layers: int) -> dict[str, Any]:
    """Qwen2.5-0.5B but for the number of layers."""
    return {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": TOKEN_ID["<|endoftext|>"],
        "eos_token_id": TOKEN_ID["<|im_end|>"],
        "pad_token_id": TOKEN_ID["<|endoftext|>"],
    }


def text_config(num_layers: int) -> Any:
    from transformers import Qwen2Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen2Config(**text_fields(num_layers), rope_parameters=rope)


def vision_config(num_layers: int) -> Any:
    from transformers import Qwen2_5_VLConfig

    # the sections of 64-wide heads in Qwen2.5-VL's proportion, 16 : 24 : 24 of 128
    rope = {"rope_type": "default", "type": "default", "rope_theta": 1e6, "mrope_section": [8, 12, 12]}
    vision = {
        "depth": 12,
        "hidden_size": 640,
        "num_heads": 8,
        "intermediate_size": 1712,
        "out_hidden_size": 896,
        "hidden_act": "silu",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "in_chans": 3,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [2, 5, 8, 11],
    }
    return Qwen2_5_VLConfig(
        text_config={**text_fields(num_layers), "rope_parameters": rope},
        vision_config=vision,
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def write_processors(folder: Path) -> None:
    """preprocessor_config.json and video_preprocessor_config.json, Qwen2.5-VL's."""
    shared = {
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 1280 * 28 * 28,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": MEAN,
        "image_std": STD,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", **shared}
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **shared}
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=1))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(video, indent=1))
    tokenizer_config = folder / "tokenizer_config.json"
    fields = json.loads(tokenizer_config.read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}
    tokenizer_config.write_text(json.dumps(fields, indent=1))
