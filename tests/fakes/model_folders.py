"""Model folders as far as they are looked at before anything loads: configuration, tokenizer, headers of
weights. No torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

DEMO_MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
TEXT_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 1024, "max_position_embeddings": 512,
}  # fmt: skip
NUM_PARAMETERS = 6


def text_folder(folder: Path, **changes: Any) -> Path:
    """`changes`: of config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TEXT_CONFIG, **changes}))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def whole_omni_folder(folder: Path) -> Path:
    """The demo model's configuration as a part of a checkpoint that also speaks."""
    thinker = json.loads((DEMO_MODEL / "config.json").read_text())
    del thinker["architectures"]
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    text_folder(folder)
    (folder / "config.json").write_text(json.dumps(whole))
    return folder
