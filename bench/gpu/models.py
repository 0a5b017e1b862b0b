"""Checkpoints of known shapes with random weights, drawn where they are fastest and written as ordinary
folders, because that is what a worker loads: on the way to the device matrices are merged and layers
replaced."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import transformers as hf

from bench.engine.models import TOKEN_ID
from bench.engine.vocabulary import write_tokenizer

MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a Qwen2 model, or of a Qwen3 model, which norms each head and has no biases."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    intermediate: int
    vocab: int
    tied: bool
    is_qwen3: bool = False

    @property
    def layer_weights(self) -> int:
        attention = 2 * self.hidden * self.head_width * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Outputs and width of each product of a decode step."""
        queries, rows = self.heads * self.head_width, (self.heads + 2 * self.kv_heads) * self.head_width
        return {
            "q, k, v": (rows, self.hidden), "out": (self.hidden, queries),
            "gate, up": (2 * self.intermediate, self.hidden), "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }  # fmt: skip

    @property
    def num_weights(self) -> int:
        """How many weights a decode step reads: layers and output head, not the embedding table."""
        return self.layer_weights + self.hidden * self.vocab


SHAPES = {
    "0.5b": ModelShape(896, 24, 14, 2, 64, 4864, 151_936, True),
    "0.6b": ModelShape(1024, 28, 16, 8, 128, 3072, 151_936, True, is_qwen3=True),
    "1.5b": ModelShape(1536, 28, 12, 2, 128, 8960, 151_936, True),
    "7b": ModelShape(3584, 28, 28, 4, 128, 18_944, 152_064, False),
    "tiny": ModelShape(64, 2, 4, 2, 16, 128, 300, True),
}


def write_checkpoint(shape: ModelShape, folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """Returns the folder."""
    with torch.device(device):
        model = hf.AutoModelForCausalLM.from_config(config_of(shape), dtype=dtype)
    model.cpu().save_pretrained(folder)
    return folder


def write_served(shape: ModelShape, folder: Path, device: torch.device, dtype: torch.dtype) -> Path:
    """Writes a checkpoint with a tokenizer of its whole vocabulary. An existing folder is kept."""
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(write_checkpoint(shape, folder, device, dtype))
    return folder


def config_of(shape: ModelShape) -> hf.PreTrainedConfig:
    fields = {
        "vocab_size": shape.vocab, "hidden_size": shape.hidden, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": shape.tied,
        "eos_token_id": TOKEN_ID["<|im_end|>"] if shape.vocab > max(TOKEN_ID.values()) else None,
    }  # fmt: skip
    if shape.is_qwen3:
        return hf.Qwen3Config(**fields, head_dim=shape.head_width)
    return hf.Qwen2Config(**fields)
