"""Voxtral's processor files as the hub has them (`tekken.json`, no chat template), and prompts that are made
without the product's code."""

from __future__ import annotations

import base64
import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
import transformers as hf

AUDIO, BEGIN_AUDIO = "[AUDIO]", "[BEGIN_AUDIO]"
NUM_SPECIAL = 40
SPECIAL = {
    0: "<unk>", 1: "<s>", 2: "</s>", 3: "[INST]", 4: "[/INST]", 5: "[AVAILABLE_TOOLS]",
    6: "[/AVAILABLE_TOOLS]",
    7: "[TOOL_RESULTS]", 8: "[/TOOL_RESULTS]", 9: "[TOOL_CALLS]", 11: "<pad>", 14: "[PREFIX]", 15: "[MIDDLE]",
    16: "[SUFFIX]", 17: "[SYSTEM_PROMPT]",
    18: "[/SYSTEM_PROMPT]", 19: "[TOOL_CONTENT]", 24: AUDIO, 25: BEGIN_AUDIO, 34: "[TRANSCRIBE]",
}  # fmt: skip
PATTERN = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def write_tekken(folder: Path, vocab_size: int) -> None:
    """All bytes, and pairs of letters."""
    words = [bytes([byte]) for byte in range(256)]
    words += ["".join(pair).encode() for pair in product(ascii_lowercase + " ", ascii_lowercase)]
    special = [
        {"rank": rank, "token_str": SPECIAL.get(rank, f"<SPECIAL_{rank}>"), "is_control": True}
        for rank in range(NUM_SPECIAL)
    ]
    words = words[: vocab_size - NUM_SPECIAL]
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
        for rank, word in enumerate(words)
    ]
    config = {
        "pattern": PATTERN, "num_vocab_tokens": len(vocab), "default_vocab_size": len(vocab) + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL, "version": "v7",
    }  # fmt: skip
    audio = {
        "sampling_rate": 16000, "frame_rate": 12.5, "chunk_length_s": 30.0,
        "audio_encoding_config": {"num_mel_bins": 128, "window_size": 400, "hop_length": 160},
    }  # fmt: skip
    tekken = {"config": config, "vocab": vocab, "special_tokens": special, "audio": audio}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(tekken))


def write_preprocessor(folder: Path, ears: hf.WhisperFeatureExtractor) -> None:
    ears.save_pretrained(folder)
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "processor_class": "VoxtralProcessor"}))


class VoxtralReference:
    """Called as transformers' other processors are. Spectra are those of transformers' own class; it leaves
    the prompt to mistral-common, whose format is repeated here for one message of a user."""

    audio_token = AUDIO

    def __init__(self, folder: Path):
        """folder: with a config.json, by which transformers finds the class of the tokenizer."""
        processor = hf.AutoProcessor.from_pretrained(folder, mistral_format=False)
        self._spectra = processor._retrieve_input_features
        self.tokenizer = processor.tokenizer

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_: Any) -> str:
        (message,) = conversation
        parts = [part.get("text", AUDIO) for part in message["content"]]
        return f"<s>[INST]{''.join(parts)}[/INST]"

    def __call__(
        self, text: list[str], audio_kwargs: dict[str, int], audio: list[np.ndarray] | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        sounds = {}
        prompt = text[0]
        if audio:
            padding, window = audio_kwargs["pad_to_multiple_of"], audio_kwargs["max_source_positions"]
            for waveform in audio:
                rows = AUDIO.lower() * (-(-len(waveform) // padding) * window // 8)
                prompt = prompt.replace(AUDIO, BEGIN_AUDIO + rows, 1)
            prompt = prompt.replace(AUDIO.lower(), AUDIO)
            given = {"sampling_rate": 16_000, "padding": True, "truncation": False, "return_tensors": "pt"}
            sounds["input_features"] = self._spectra(audio, window, pad_to_multiple_of=padding, **given)
        ids = torch.tensor([self.tokenizer(prompt, add_special_tokens=False)["input_ids"]])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **sounds}
