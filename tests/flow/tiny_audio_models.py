"""Tiny random models of the families that take sound alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers as hf
from torch import Tensor

from cluster.types.media import MediaGeometry
from tests.flow.tiny_models import AE, AS, AUD, AUDIO, TEXT, TinyCase, TinyRequest, collect, noise, randomized

QWEN_AUDIO: dict[str, Any] = {
    "num_mel_bins": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "d_model": 32,
    "max_source_positions": 1500, "initializer_range": 0.15,
}  # fmt: skip
_WHISPER: dict[str, Any] = {
    "num_mel_bins": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "hidden_size": 32,
    "max_source_positions": 1500,
}  # fmt: skip


def _audio_requests(
    clips: Sequence[tuple[Mapping[str, Tensor], int]], *, frame: bool = False
) -> list[TinyRequest]:
    requests = [TinyRequest().text(9, 8)]
    for seed, (item, num_tokens) in enumerate(clips):
        request = TinyRequest().text(3 + seed, seed + 1)
        request = request.raw(AS) if frame else request
        request = request.media(AUDIO, item, MediaGeometry(num_tokens))
        request = request.raw(AE) if frame else request
        requests.append(collect(request.text(6, seed + 20)))
    return requests


def _padded_mels(mask_key: str, num_frames: int, window: int = 3000) -> dict[str, Tensor]:
    mask = (torch.arange(window) < num_frames).long()[None]
    generator = torch.Generator().manual_seed(num_frames)
    return {"input_features": torch.randn(1, 16, window, generator=generator), mask_key: mask}


def qwen2_audio() -> TinyCase:
    config = hf.Qwen2AudioConfig(
        audio_config=QWEN_AUDIO,
        text_config=hf.Qwen2Config(**TEXT),
        audio_token_index=AUD,
    )
    torch.manual_seed(0)
    clips = [(_padded_mels("feature_attention_mask", frames), frames // 4) for frames in (120, 60)]
    model = randomized(hf.Qwen2AudioForConditionalGeneration(config))
    return TinyCase(model, _audio_requests(clips, frame=True))


def voxtral() -> TinyCase:
    config = hf.VoxtralConfig(audio_config=_WHISPER, text_config=hf.LlamaConfig(**TEXT), audio_token_id=AUD)
    torch.manual_seed(0)
    clips = [({"input_features": noise(1, 16, 3000)}, 375)]
    return TinyCase(randomized(hf.VoxtralForConditionalGeneration(config)), _audio_requests(clips))


def audioflamingo3() -> TinyCase:
    config = hf.AudioFlamingo3Config(
        audio_config=_WHISPER, text_config=hf.Qwen2Config(**TEXT), audio_token_id=AUD
    )
    torch.manual_seed(0)
    clips = [(_padded_mels("input_features_mask", frames), frames // 4) for frames in (400, 120)]
    return TinyCase(randomized(hf.AudioFlamingo3ForConditionalGeneration(config)), _audio_requests(clips))


def musicflamingo() -> TinyCase:
    config = hf.MusicFlamingoConfig(
        audio_config=hf.AudioFlamingo3EncoderConfig(**{**_WHISPER, "max_source_positions": 200}),
        text_config=hf.Qwen2Config(**TEXT), audio_token_id=AUD, audio_bos_token_id=AS, audio_eos_token_id=AE,
    )  # fmt: skip
    torch.manual_seed(0)
    first, last = (_padded_mels("input_features_mask", frames, window=400) for frames in (400, 120))
    long = {key: torch.cat([first[key], last[key]]) for key in first}
    model = randomized(hf.MusicFlamingoForConditionalGeneration(config))
    return TinyCase(model, _audio_requests([(long, 130), (last, 30)]))


def glmasr() -> TinyCase:
    audio = {**_WHISPER, "num_key_value_heads": 2, "max_position_embeddings": 1500}
    config = hf.GlmAsrConfig(audio_config=audio, text_config=hf.LlamaConfig(**TEXT), audio_token_id=AUD)
    torch.manual_seed(0)
    clips = [(_padded_mels("input_features_mask", frames), frames // 8) for frames in (400, 120)]
    return TinyCase(randomized(hf.GlmAsrForConditionalGeneration(config)), _audio_requests(clips))


def moss_transcribe_diarize() -> TinyCase:
    config = hf.MossTranscribeDiarizeConfig(
        audio_config={**_WHISPER, "max_source_positions": 200},
        text_config=hf.Qwen3Config(**TEXT, head_dim=16), audio_token_id=AUD, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    first, last = (_padded_mels("input_features_mask", frames, window=400) for frames in (400, 117))
    long = {key: torch.cat([first[key], last[key]]) for key in first}
    sounds = [(long, 50 + 15), (last, 15)]
    for item, _ in sounds:  # of the waveform; asked for and not read
        item["padding_mask"] = torch.ones(1, int(item["input_features_mask"].sum()) * 160, dtype=torch.int64)
    model = randomized(hf.MossTranscribeDiarizeForConditionalGeneration(config))
    return TinyCase(model, _audio_requests(sounds))


def qwen3_asr() -> TinyCase:
    audio = {
        **QWEN_AUDIO, "n_window": 50, "n_window_infer": 100, "output_dim": 64, "downsample_hidden_size": 16
    }  # fmt: skip
    config = hf.Qwen3ASRConfig(
        audio_config=audio, text_config=hf.Qwen3Config(**TEXT, head_dim=16), audio_token_id=AUD
    )
    torch.manual_seed(0)
    clips = []
    for frames in (160, 90):
        padded = -(-frames // 100) * 100
        mask = (torch.arange(padded) < frames).long()[None]
        clips.append(
            ({"input_features": noise(1, 16, padded), "input_features_mask": mask}, _asr_rows(frames))
        )
    return TinyCase(randomized(hf.Qwen3ASRForConditionalGeneration(config)), _audio_requests(clips))


def omniasr() -> TinyCase:
    audio = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "conv_dim": (16, 16, 16), "conv_kernel": (40, 4, 4), "conv_stride": (40, 4, 4),
        "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4,
    }  # fmt: skip
    make: Any = hf.CONFIG_MAPPING["omniasr"]
    config = make(
        audio_config=audio, text_config={"model_type": "llama", **TEXT}, audio_token_id=AUD, eos_token_id=None
    )
    torch.manual_seed(0)
    clips = []
    for samples, rows in ((6_400, 10), (4_000, 6)):
        mask = torch.ones(1, samples, dtype=torch.int64)
        clips.append(({"input_values": noise(1, 1, samples), "padding_mask": mask}, rows))
    return TinyCase(randomized(hf.AutoModelForMultimodalLM.from_config(config)), _audio_requests(clips))


def _asr_rows(frames: int) -> int:
    rest = frames % 100
    return frames // 100 * 13 + (-(-rest // 8) if rest else 0)
