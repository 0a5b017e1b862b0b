"""A random-weight model whose encoders have a realistic size: omni-encoders, with Qwen2.5-Omni's shape.

Vision: half of Qwen2.5-VL's depth at 1,024 wide, 223 M parameters with its merger. Audio: Whisper small's
encoder, 12 layers of 768, 88 M. The language half has two small layers and only makes the folder complete.
Tokenizer and template are the demo model's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import DEMO_MODEL

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "omni-encoders"
SEED = 0
HIDDEN, PATCH, MELS, AUDIO_S, SAMPLING_RATE, HOP = 896, 14, 128, 30, 16_000, 160
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28}
CALL_ARGUMENTS = {"videos_kwargs": {"size": PIXELS, "cap_pixels_per_frame": False}}
VISION = {
    "depth": 16,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 2736,
    "patch_size": PATCH,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [3, 7, 11, 15],
}
AUDIO = {
    "d_model": 768,
    "encoder_layers": 12,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "num_mel_bins": MELS,
    "max_source_positions": 1500,
    "n_window": 100,
}
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 1792,
    "num_hidden_layers": 2,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
}


def write_model(folder: Path) -> Path:
    """The model's folder inside `folder`, 600 MB; an existing one is replaced. Takes seconds."""
    path = folder / NAME
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    make_model(VISION, AUDIO).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(DEMO_MODEL / name, path / name)
    processor = processor_config(json.loads((DEMO_MODEL / "processor_config.json").read_text()))
    (path / "processor_config.json").write_text(json.dumps(processor, indent=1))
    (path / "mm_processor_kwargs.json").write_text(json.dumps(CALL_ARGUMENTS))
    return path


def make_model(vision: dict[str, Any], audio: dict[str, Any]) -> PreTrainedModel:
    """Makes the model in bfloat16, weights drawn from SEED; the special tokens are the demo model's."""
    from cluster.media.torchvision_compat import ensure_torchvision

    ensure_torchvision()  # must run before transformers is imported
    import torch
    from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config["vision_config"] |= vision | {"out_hidden_size": HIDDEN}
    config["audio_config"] |= audio | {"output_dim": HIDDEN}
    config["text_config"] |= TEXT | {"max_window_layers": TEXT["num_hidden_layers"]}
    config["text_config"].pop("layer_types")
    torch.manual_seed(SEED)
    model = Qwen2_5OmniThinkerForConditionalGeneration(Qwen2_5OmniThinkerConfig(**config))
    return model.bfloat16().eval()


def processor_config(demo: dict[str, Any]) -> dict[str, Any]:
    """The demo model's processors with Qwen2.5-Omni's sizes."""
    sizes = {"patch_size": PATCH, "size": PIXELS}
    video = demo["video_processor"] | sizes | {"fps": 2, "max_frames": 768}
    audio = demo["feature_extractor"] | {
        "feature_size": MELS,
        "chunk_length": AUDIO_S,
        "n_samples": AUDIO_S * SAMPLING_RATE,
        "nb_max_frames": AUDIO_S * SAMPLING_RATE // HOP,
    }
    image = demo["image_processor"] | sizes
    return demo | {"image_processor": image, "video_processor": video, "feature_extractor": audio}
