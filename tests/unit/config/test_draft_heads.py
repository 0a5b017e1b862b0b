"""Heads that cannot draft are refused by name, before anything is loaded if configurations show it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from cluster.config.draft_heads import layers_read
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.model.language import LanguageModel
from cluster.worker.draft_heads import load_head
from tests.flow.draft_heads import save_eagle3, save_with_mtp


def args_of(target: Path, **speculation: object) -> ClusterArgs:
    return ClusterArgs.model_validate({"model": str(target), "decode": {"speculation": speculation}})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has an EAGLE-3 head in its folder `head`."""
    folder = tmp_path_factory.mktemp("target")
    save_eagle3(folder, folder / "head", is_right=False)
    return folder


def test_a_model_type_without_such_a_layer_is_refused(target):
    with pytest.raises(ConfigError, match="mtp: model type 'llama' is not one of deepseek_v3, glm4_moe"):
        layers_read(args_of(target, method="mtp"))


def test_a_checkpoint_that_has_left_out_its_layer_is_refused(tmp_path):
    file = save_with_mtp(tmp_path, "glm4_moe", is_right=False) / "model.safetensors"
    assert layers_read(args_of(tmp_path, method="mtp")) == ()
    tensors = load_file(file)
    eh_proj, norm = "model.layers.2.eh_proj.weight", "model.layers.2.self_attn.k_norm.weight"
    save_file({name: t for name, t in tensors.items() if name != norm}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"it lacks weights.*k_norm"):
        load_head(args_of(tmp_path, method="mtp"), LanguageModel.load(tmp_path, dtype=torch.float32))
    save_file({name: t for name, t in tensors.items() if name != eh_proj}, file, {"format": "pt"})
    with pytest.raises(
        ConfigError, match=r"has no weights for it: model\.layers\.2\.eh_proj\.weight is missing"
    ):
        layers_read(args_of(tmp_path, method="mtp"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is no EAGLE-3 head"),
        ({"hidden_size": 96}, "is for hidden rows of 96, not 64"),
        ({"target_hidden_size": 32}, "is for hidden rows of 32, not 64"),
        ({"vocab_size": 300}, r"300 tokens\) and the model \(1024 tokens\) must have the same vocabulary"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}}, r"layers \[1, 2, 9\] of 4"),
    ],
)
def test_a_head_that_does_not_fit_its_model_is_refused(target, tmp_path, changes, reason):
    config = json.loads((target / "head" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=reason):
        layers_read(args_of(target, method="eagle3", model=str(tmp_path)))


def test_weights_that_do_not_fit_the_heads_configuration_are_refused(target, tmp_path):
    model = LanguageModel.load(target, dtype=torch.float32)
    args = args_of(target, method="eagle3", model=str(tmp_path))
    (tmp_path / "config.json").write_text((target / "head" / "config.json").read_text())
    with pytest.raises(ConfigError, match=r"it has none of the files model\.safetensors, pytorch_model\.bin"):
        load_head(args, model)
    weights = torch.load(target / "head" / "pytorch_model.bin")
    for wrong, reason in (
        ({"fc.weight": torch.zeros(64, 64)}, "size mismatch for fc.weight"),
        ({"d2t": -torch.arange(512)}, "d2t names tokens twice"),
        ({"midlayer.self_attn.q_norm.weight": torch.ones(16)}, "Unexpected key"),
    ):
        torch.save(weights | wrong, tmp_path / "pytorch_model.bin")
        with pytest.raises(ConfigError, match=reason):
            load_head(args, model)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": "none"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"config\.json: .*none"):
        load_head(args, model)
    (tmp_path / "config.json").write_text((target / "head" / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"nothing")
    with pytest.raises(ConfigError, match=r"pytorch_model.bin cannot be read"):
        load_head(args, model)


@pytest.mark.parametrize("method", ["mtp", "eagle3"])
def test_heads_with_several_ranks_are_refused(method):
    with pytest.raises(ValidationError, match=f"method {method} needs tensor_parallel_size 1"):
        ClusterArgs.model_validate({"tensor_parallel_size": 2, "decode": {"speculation": {"method": method}}})
