"""What the probe of a backbone refuses: a window that our attention would not see."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers as hf

import cluster.model  # noqa: F401  (prepares torchvision)
from cluster.errors import ConfigError
from cluster.model.probe import probe_backbone

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
    shapes = probe_backbone(_moshi(window=64), hidden_size=32)
    assert [shape.window for shape in shapes] == [None, None]
