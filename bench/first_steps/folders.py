"""Model folders: tiny random checkpoints of six kinds, and text folders with one thing wrong each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from cluster.media.torchvision_compat import ensure_torchvision


def make_text(folder: Path) -> Path:
    ensure_torchvision()
    import transformers as hf

    from tests.flow.text_models import SIZES, save_text_model

    return save_text_model(folder, hf.Qwen2Config(**SIZES), seed=1)


def make_mixture(folder: Path) -> Path:
    """A mixture of experts."""
    ensure_torchvision()
    import transformers as hf

    from tests.flow.text_models import SIZES, save_text_model

    sizes = {**SIZES, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return save_text_model(folder, hf.Qwen3MoeConfig(**sizes), seed=2)


def make_family(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        from tests.flow.family_folders import save_family

        return save_family(name, folder).path

    return make


def make_whole_omni(folder: Path) -> Path:
    """Makes the folder as on the hub: the served part is in `thinker_config` and under `thinker.`, next to a
    speech generator."""
    from safetensors.torch import load_file, save_file

    make_family("qwen2_5_omni")(folder)
    import transformers as hf

    weights = load_file(folder / "model.safetensors")
    renamed = {f"thinker.{key}": tensor for key, tensor in weights.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    thinker = json.loads((folder / "config.json").read_text())
    hf.Qwen2_5OmniConfig(thinker_config=thinker, architectures=["Qwen2_5OmniModel"]).save_pretrained(folder)
    return folder


KINDS: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {  # and what its question shows
    "text": (make_text, ()),
    "mixture of experts": (make_mixture, ()),
    "vision": (make_family("qwen2_5_vl"), ("image",)),
    "audio": (make_family("qwen2_audio"), ("audio",)),
    "Omni, the thinker alone": (make_family("qwen2_5_omni"), ("image", "audio")),
    "Omni, the whole checkpoint": (make_whole_omni, ("image", "audio")),
}


def copied(source: Path, folder: Path) -> Path:
    return Path(shutil.copytree(source, folder))


def without(source: Path, folder: Path, name: str) -> Path:
    (copied(source, folder) / name).unlink()
    return folder


def with_text(source: Path, folder: Path, name: str, text: str) -> Path:
    (copied(source, folder) / name).write_text(text)
    return folder


def cut_short(source: Path, folder: Path, name: str = "model.safetensors") -> Path:
    file = copied(source, folder) / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    return folder


def without_a_shard(source: Path, folder: Path) -> Path:
    """Two shards in the index, one in the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    weights = load_file(copied(source, folder) / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {key: names[number % 2] for number, key in enumerate(sorted(weights))}
    first: dict[str, torch.Tensor] = {key: weights[key] for key, name in index.items() if name == names[0]}
    save_file(first, folder / names[0], metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def with_no_number(source: Path, folder: Path) -> Path:
    """One weight is NaN, as after flipped bits."""
    from safetensors.torch import load_file, save_file

    file = copied(source, folder) / "model.safetensors"
    weights = load_file(file)
    weights[sorted(weights)[3]].view(-1)[0] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    return folder
