"""Random-weight models of known shapes, the same bytes from the same seed: text-0.5b, vl-384m, delta-0.7b and
conv-0.4b.

Ordinary Hugging Face folders, so every server under measurement reads the same weights. All have Qwen2.5's
whole vocabulary. text-0.5b has Qwen2.5-0.5B's shape; vl-384m has half its layers and a vision tower of
Qwen2.5-VL's kind. Two are hybrids: delta-0.7b has Qwen3.5-0.8B's shape (the gated delta rule in three of four
layers), conv-0.4b LFM2-350M's (short convolutions in ten of 16 layers). Biases and norm weights are random
too: a server that forgets one of them answers differently (`python -m bench.engine agree`).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.engine.vocabulary import BASE_TOKENS, SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

TEXT_MODEL, VISION_MODEL, DELTA_MODEL, CONV_MODEL = "text-0.5b", "vl-384m", "delta-0.7b", "conv-0.4b"
USUAL_MODELS = (TEXT_MODEL, VISION_MODEL)  # what is written and measured unless others are named
SEED = 0
TOKEN_ID = {token: BASE_TOKENS + idx for idx, token in enumerate(SPECIAL_TOKENS)}
END_IDS: Mapping[str, Any] = {
    "bos_token_id": TOKEN_ID["<|endoftext|>"],
    "eos_token_id": [TOKEN_ID["<|im_end|>"], TOKEN_ID["<|endoftext|>"]],
    "pad_token_id": TOKEN_ID["<|endoftext|>"],
}
_WORDS: Mapping[str, Any] = {  # what every configuration says of the vocabulary and of weights
    **END_IDS,
    "eos_token_id": TOKEN_ID["<|im_end|>"],
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "attention_dropout": 0.0,
}
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def write_models(folder: Path, names: Sequence[str]) -> list[Path]:
    """Returns the folders; existing ones are replaced. About 10 s and 0.9 to 1.3 GB each."""
    return [write_model(folder / name) for name in names]


def write_model(folder: Path) -> Path:
    """The model that has the folder's name, one of `CONFIGS`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    make_model(folder.name).save_pretrained(folder)
    write_tokenizer(folder)
    if folder.name == VISION_MODEL:
        write_processors(folder)
    return folder


def make_model(name: str) -> PreTrainedModel:
    """A model in bfloat16, weights drawn from SEED."""
    from cluster.media.torchvision_compat import ensure_torchvision

    ensure_torchvision()  # must run before transformers is imported
    import torch
    import transformers

    torch.manual_seed(SEED)
    config = CONFIGS[name]()
    model: PreTrainedModel = getattr(transformers, (config.architectures or [""])[0])(config)
    draw_small_parameters(model)
    model.generation_config = transformers.GenerationConfig(**END_IDS)
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
        **_WORDS,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def text_config() -> PreTrainedConfig:
    from transformers import Qwen2Config

    rope = {"rope_type": "default", "rope_theta": 1e6}
    return Qwen2Config(**text_fields(24), rope_parameters=rope, architectures=["Qwen2ForCausalLM"])


def vision_config() -> PreTrainedConfig:
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
        text_config={**text_fields(12), "rope_parameters": rope},
        vision_config=vision,
        image_token_id=TOKEN_ID["<|image_pad|>"],
        video_token_id=TOKEN_ID["<|video_pad|>"],
        vision_start_token_id=TOKEN_ID["<|vision_start|>"],
        vision_end_token_id=TOKEN_ID["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen2_5_VLForConditionalGeneration"],
    )


def delta_config() -> PreTrainedConfig:
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        **_WORDS,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        architectures=["Qwen3_5ForCausalLM"],
    )


def conv_config() -> PreTrainedConfig:
    from transformers import Lfm2Config

    attention = {2, 5, 8, 10, 12, 14}
    return Lfm2Config(
        **_WORDS,
        hidden_size=1024,
        intermediate_size=6656,
        block_auto_adjust_ff_dim=True,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=["full_attention" if layer in attention else "conv" for layer in range(16)],
        architectures=["Lfm2ForCausalLM"],
    )


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    TEXT_MODEL: text_config,
    VISION_MODEL: vision_config,
    DELTA_MODEL: delta_config,
    CONV_MODEL: conv_config,
}


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
