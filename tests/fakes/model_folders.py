"""Model folders as far as they are looked at before anything loads: configuration, tokenizer, headers of
weights. No torch."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
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
ITEM_BYTES = {
    "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I8": 1, "U8": 1, "BOOL": 1,
    "I32": 4, "U32": 4, "I64": 8,
}  # fmt: skip


def text_folder(folder: Path, **changes: Any) -> Path:
    """`changes`: of config.json."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**TEXT_CONFIG, **changes}))
    shutil.copy(DEMO_MODEL / "tokenizer.json", folder)
    save_file({"a": np.ones((2, 3), np.float32)}, folder / "model.safetensors")
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """A weight file with these dtypes, as safetensors names them, and shapes; its bytes are zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * ITEM_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    content = len(text).to_bytes(8, "little") + text + bytes(end)
    (folder / "model.safetensors").write_bytes(content)


def whole_omni_folder(folder: Path) -> Path:
    """The demo model's configuration as a part of a checkpoint that also speaks."""
    thinker = json.loads((DEMO_MODEL / "config.json").read_text())
    del thinker["architectures"]
    whole = {"model_type": "qwen2_5_omni", "architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}
    text_folder(folder)
    (folder / "config.json").write_text(json.dumps(whole))
    return folder
