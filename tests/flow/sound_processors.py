"""The processors of families that hear and see nothing, and the feature extractor of the others that hear."""

from __future__ import annotations

from typing import Any

import transformers as hf

AUDIO = "<|AUDIO|>"
WINDOW_S = 2


def ears() -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)


def qwen2_audio(tokenizer: Any) -> Any:
    return hf.Qwen2AudioProcessor(ears(), tokenizer)


def qwen3_asr(tokenizer: Any) -> Any:
    return hf.Qwen3ASRProcessor(hf.Qwen3ASRFeatureExtractor(feature_size=16), tokenizer)


def audioflamingo3(tokenizer: Any) -> Any:
    return hf.AudioFlamingo3Processor(ears(), tokenizer, audio_token=AUDIO, max_audio_len=6)


def musicflamingo(tokenizer: Any) -> Any:
    marks = {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    return hf.MusicFlamingoProcessor(ears(), tokenizer, audio_token=AUDIO, max_audio_len=6, **marks)


def glmasr(tokenizer: Any) -> Any:
    return hf.GlmAsrProcessor(ears(), tokenizer, audio_token=AUDIO, max_audio_len=6)


def moss_transcribe_diarize(tokenizer: Any) -> Any:
    extractor = hf.MossTranscribeDiarizeFeatureExtractor(feature_size=16, chunk_length=WINDOW_S)
    marks: dict[str, Any] = {"audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    return hf.MossTranscribeDiarizeProcessor(extractor, tokenizer, audio_token=AUDIO, **marks)


def omniasr(tokenizer: Any) -> Any:
    new: Any = hf  # not in every release of transformers that we run with
    convolutions = {"conv_kernel": [40, 4, 4], "conv_stride": [40, 4, 4]}
    return new.OmniASRProcessor(new.OmniASRFeatureExtractor(), tokenizer, audio_token=AUDIO, **convolutions)
