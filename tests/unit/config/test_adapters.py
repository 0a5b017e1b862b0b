"""What a LoRA adapter's folder may hold. What cannot be served is refused by name before a weight is read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from cluster.config.adapters import Adapter, folder_within, read_adapters
from cluster.errors import ConfigError

MODULE = "model.layers.0.self_attn.q_proj"
PREFIX = f"base_model.model.{MODULE}"
CONFIG = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
    "init_lora_weights": True, "peft_version": "0.18.0", "megatron_core": "megatron.core",
}  # fmt: skip


def tensors(rank: int = 4, value: float = 1.0) -> dict[str, np.ndarray]:
    return {
        f"{PREFIX}.lora_A.weight": np.full((rank, 16), value, np.float32),
        f"{PREFIX}.lora_B.weight": np.ones((32, rank), np.float32),
    }


def folder(
    path: Path, config: Mapping[str, Any] = CONFIG, weights: dict[str, np.ndarray] | None = None
) -> Path:
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors() if weights is None else weights, path / "adapter_model.safetensors")
    return path


def read(path: Path, max_rank: int = 64) -> Adapter:
    (adapter,) = read_adapters({"mine": str(path)}, max_rank)
    return adapter


def test_what_an_adapter_says(tmp_path: Path) -> None:
    adapter = read(folder(tmp_path / "a"))
    module = adapter.modules[MODULE]
    assert (module.rank, module.inputs, module.outputs, module.scaling) == (4, 16, 32, 2.0)


@pytest.mark.parametrize(
    ("more", "scaling"),
    [
        ({"use_rslora": True}, 8 / math.sqrt(4)),
        ({"alpha_pattern": {"v_proj": 1, "q_proj": 16}}, 4.0),
        ({"alpha_pattern": {r"layers\.0\..*": 32}}, 8.0),
        ({"alpha_pattern": {"proj": 32}}, 2.0),  # a pattern is a whole last part of the path
        ({"r": 2, "rank_pattern": {"q_proj": 4}}, 2.0),
    ],
)
def test_what_its_products_are_multiplied_by(more: dict[str, Any], scaling: float, tmp_path: Path) -> None:
    assert read(folder(tmp_path / "a", CONFIG | more)).modules[MODULE].scaling == pytest.approx(scaling)


def test_another_content_under_the_same_name_has_another_digest(tmp_path: Path) -> None:
    first = read(folder(tmp_path / "a"))
    copy = read(folder(tmp_path / "b"))
    weights = read(folder(tmp_path / "c", weights=tensors(value=2.0)))
    scaled = read(folder(tmp_path / "d", CONFIG | {"lora_alpha": 9}))
    assert first.digest == copy.digest and len({each.digest for each in (first, weights, scaled)}) == 3


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"peft_type": "IA3"}, "'IA3'"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"something_new": {"a": 1}}, "something_new"),
        ({"init_lora_weights": "pissa"}, "'pissa'"),
        ({"r": 8}, "rank 4"),
        ({"lora_alpha": "8"}, "lora_alpha"),
        ({"lora_alpha": None}, "lora_alpha"),
        ({"alpha_pattern": {"(": 1}}, "regular expression"),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(more: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read(folder(tmp_path / "a", CONFIG | more))
    assert "adapter 'mine'" in error.value.message and named in error.value.message
    assert error.value.param == "adapters"


@pytest.mark.parametrize(
    ("added", "named"),
    [
        (f"{PREFIX}.lora_magnitude_vector", "lora_magnitude_vector"),
        ("base_model.model.lm_head.weight", "lm_head"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "lora_embedding_A"),
        ("base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight", "lora_A alone"),
    ],
)
def test_tensors_that_are_no_pairs_of_linears_are_refused(added: str, named: str, tmp_path: Path) -> None:
    weights = tensors() | {added: np.ones((4, 16), np.float32)}
    with pytest.raises(ConfigError, match=named):
        read(folder(tmp_path / "a", weights=weights))


def test_shapes_and_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_lora_rank, 3"):
        read(folder(tmp_path / "a"), max_rank=3)
    with pytest.raises(ConfigError, match="not a matrix"):
        read(folder(tmp_path / "b", weights={name: each[0] for name, each in tensors().items()}))
    with pytest.raises(ConfigError, match="not a matrix"):
        read(folder(tmp_path / "c", weights={name: each.astype(np.int8) for name, each in tensors().items()}))
    with pytest.raises(ConfigError, match="changes no module"):
        read(folder(tmp_path / "d", weights={}))


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path / "a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is missing"):
        read(path)
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        read(tmp_path / "nothing")


@pytest.mark.parametrize("path", ["../outside", "/etc", "missing", "link", "file", "a\0", "linked", "loop"])
def test_nothing_outside_of_the_folder_of_adapters_is_named(path: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    inside = folder(root / "a")
    outside = folder(tmp_path / "outside")
    (root / "link").symlink_to(outside)
    (root / "file").write_text("")
    (root / "linked").mkdir()
    (root / "linked" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    (root / "loop").symlink_to(root / "loop")
    for way in ("a", str(inside), "b/../a", "./a/"):
        assert folder_within(str(root), way) == inside.resolve()
    with pytest.raises(ConfigError, match=r"adapters_folder|no path of a folder"):
        folder_within(str(root), path)
