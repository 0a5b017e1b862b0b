"""What the probe of a backbone refuses: a window that our attention would not see."""

from typing import Any, cast

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers as hf
from torch import nn

import cluster.model  # noqa: F401  (prepares torchvision)
from cluster.errors import ConfigError
from cluster.model.probe import _ShapeRecorder, kv_row_shapes, probe_backbone, with_owners_first

_TINY: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
}


def _moshi(window: int) -> hf.PreTrainedModel:
    """Its attention gets no window; `generate` has one all the same, in the cache."""
    config = hf.MoshiConfig(**_TINY, ffn_dim=64, max_position_embeddings=64, sliding_window=window)
    return hf.MoshiForCausalLM(config).model


def test_a_window_that_only_the_cache_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="'moshi' is not supported: its sliding window is not passed"):
        probe_backbone(_moshi(window=8), hidden_size=32)


def test_a_window_as_long_as_the_context_is_none() -> None:
    shapes = probe_backbone(_moshi(window=64), hidden_size=32).shapes
    assert [shape.window for shape in shapes] == [None, None]


def test_layers_that_attend_over_the_kv_of_others_have_none_of_their_own() -> None:
    shapes = probe_backbone(_sharing(["sliding_attention", "full_attention"] * 2), hidden_size=32).shapes
    assert [shape.owner for shape in shapes] == [None, None, 0, 1]
    assert kv_row_shapes(shapes) == [(1, 16), (1, 16), (1, 8), (1, 8)]
    text = _sharing(["full_attention"] * 2)
    assert [shape.owner for shape in probe_backbone(text, hidden_size=32).shapes] == [None, None]


def test_kv_is_stored_twice_where_a_layer_with_its_own_comes_after_one_without() -> None:
    text = _sharing(["full_attention"] * 3)
    keys = [torch.zeros(1, 1, 1, 8) for _ in range(2)]
    recorder = _ShapeRecorder()
    for layer, key in zip(cast(nn.ModuleList, text.layers), (keys[0], keys[0], keys[1]), strict=True):
        recorder.see(cast(nn.Module, layer.self_attn), key, key, None, {})
    shapes = [recorder.shapes[i] for i in range(3)]
    assert [shape.owner for shape in shapes] == [None, 0, None]
    assert [shape.owner for shape in with_owners_first(shapes)] == [None] * 3


def _sharing(layer_types: list[str]) -> hf.PreTrainedModel:
    """The second half of four layers shares KV."""
    sizes: dict[str, Any] = {
        **_TINY, "num_hidden_layers": len(layer_types), "layer_types": layer_types, "global_head_dim": 8,
        "num_key_value_heads": 1, "intermediate_size": 64, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 4, "num_kv_shared_layers": 2 if len(layer_types) == 4 else 0,
    }  # fmt: skip
    return hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**sizes)).model
