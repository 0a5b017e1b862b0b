"""Weights on their way to a simulated GPU: through pinned memory, merged, tied ones as one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers as hf

from cluster.model.cuda.merging import merged
from cluster.model.cuda.moving import Staging, move_weights
from tests.fakes.cuda_device import SimulatedCuda


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda(orders=True) as simulated:
        yield simulated
    assert not simulated.races


def test_weights_are_moved_once_merged_and_tied(device: SimulatedCuda) -> None:
    config = hf.Qwen2Config(
        vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = hf.Qwen2ForCausalLM(config).requires_grad_(False)
    expected = {name: tensor.clone() for name, tensor in model.named_parameters()}
    move_weights(model, torch.device("cuda"))
    moved = dict(model.named_parameters())
    assert moved.keys() == expected.keys() and all(each.is_cuda for each in moved.values())
    assert all(torch.equal(moved[name].cpu(), tensor) for name, tensor in expected.items())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        assert (
            merged([each.weight for each in (attention.q_proj, attention.k_proj, attention.v_proj)])
            is not None
        )
        assert merged([mlp.gate_proj.weight, mlp.up_proj.weight]) is not None


def test_a_long_tensor_goes_in_parts_and_only_memory_that_is_taken_again_is_waited_for(
    device: SimulatedCuda,
) -> None:
    staging, source = Staging(torch.device("cuda"), part_bytes=16), torch.arange(19, dtype=torch.float32)
    num_syncs = device.num_syncs
    target = staging.moved(source)  # 76 bytes: five parts in three places
    assert device.num_syncs - num_syncs == 2
    staging.finish()
    assert torch.equal(target.cpu(), source)
    assert staging.moved(torch.empty(0, 3)).shape == (0, 3)
