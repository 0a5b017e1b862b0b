"""The demo model before training: tokenizer, processor, configuration and seeded weights, without a
network.
"""

import copy
import json
from pathlib import Path

import torch

from cluster.media.torchvision_compat import ensure_torchvision

ensure_torchvision()

from transformers import (  # noqa: E402 - torchvision must import first
    AutoProcessor,
    GenerationConfig,
    Qwen2_5OmniProcessor,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen2VLVideoProcessor,
    WhisperFeatureExtractor,
)

from deploy.demo_model.training.tokenizer import TURN_END, VOCABULARY_SIZE, train_tokenizer  # noqa: E402

Model = Qwen2_5OmniThinkerForConditionalGeneration
Processor = Qwen2_5OmniProcessor

PATCHES = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
VIDEO_SIZE = {"shortest_edge": 64 * 64, "longest_edge": 64 * 64 * 8}
PROCESSOR_KWARGS_FILE = "mm_processor_kwargs.json"
PROCESSOR_KWARGS = {"videos_kwargs": {"size": VIDEO_SIZE, "cap_pixels_per_frame": False}}
CHAT_TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text()
TEXT_CONFIG = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]},
    "bos_token_id": None,
}
VISION_CONFIG = {
    "depth": 4,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_heads": 4,
    "patch_size": 8,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 64,
    "out_hidden_size": 256,
    "fullatt_block_indexes": [0, 1, 2, 3],
}
AUDIO_CONFIG = {
    "num_mel_bins": 80,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 384,
    "d_model": 128,
    "max_source_positions": 1500,
    "n_window": 100,
    "output_dim": 256,
}


def build_processor(tokenizer: Qwen2Tokenizer) -> Processor:
    """Images of 4096 to 16384 pixels, clips of at most 10 s of sound."""
    return Qwen2_5OmniProcessor(
        image_processor=Qwen2VLImageProcessorPil(
            **PATCHES, size={"shortest_edge": 64 * 64, "longest_edge": 128 * 128}
        ),
        video_processor=Qwen2VLVideoProcessor(
            **PATCHES, size=VIDEO_SIZE, do_sample_frames=False, fps=4, min_frames=4, max_frames=32
        ),
        feature_extractor=WhisperFeatureExtractor(
            feature_size=80,
            sampling_rate=16000,
            hop_length=160,
            chunk_length=10,
            n_fft=400,
            return_attention_mask=True,
        ),
        tokenizer=tokenizer,
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: Qwen2Tokenizer, seed: int) -> Model:
    """Float32 weights drawn from the seed."""
    token_id = tokenizer.convert_tokens_to_ids
    end_id, pad_id = token_id(TURN_END), tokenizer.pad_token_id
    config = Qwen2_5OmniThinkerConfig(
        text_config={**TEXT_CONFIG, "eos_token_id": end_id, "pad_token_id": pad_id},
        vision_config=VISION_CONFIG,
        audio_config=AUDIO_CONFIG,
        audio_token_index=token_id("<|AUDIO|>"),
        image_token_index=token_id("<|IMAGE|>"),
        video_token_index=token_id("<|VIDEO|>"),
        audio_start_token_id=token_id("<|audio_bos|>"),
        audio_end_token_id=token_id("<|audio_eos|>"),
        vision_start_token_id=token_id("<|vision_bos|>"),
        vision_end_token_id=token_id("<|vision_eos|>"),
        user_token_id=token_id("user"),
        tie_word_embeddings=True,
        position_id_per_seconds=25,
        seconds_per_chunk=2,
    )
    torch.manual_seed(seed)
    model = Qwen2_5OmniThinkerForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        eos_token_id=end_id, pad_token_id=pad_id, do_sample=False, max_new_tokens=256
    )
    return model


def build(seed: int) -> tuple[Model, Processor]:
    """Everything from one seed."""
    tokenizer = train_tokenizer(seed)
    return build_model(tokenizer, seed), build_processor(tokenizer)


def save(model: Model, processor: Processor, folder: Path) -> None:
    """Write the shipped folder: bf16 weights, processor files and the processor's call arguments."""
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    config = copy.deepcopy(model.config)
    for part in (config.text_config, config.vision_config, config.audio_config):
        part.dtype = torch.bfloat16
    shipped = Qwen2_5OmniThinkerForConditionalGeneration(config).to(torch.bfloat16)
    shipped.load_state_dict(state)
    shipped.generation_config = model.generation_config
    shipped.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / PROCESSOR_KWARGS_FILE).write_text(json.dumps(PROCESSOR_KWARGS))


def load(folder: Path) -> tuple[Model, Processor, dict]:
    """The shipped folder as a user gets it, in float32: model, processor, arguments for processor calls."""
    model = Qwen2_5OmniThinkerForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    return model.eval(), processor, json.loads((folder / PROCESSOR_KWARGS_FILE).read_text())
