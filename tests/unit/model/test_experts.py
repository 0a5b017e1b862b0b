"""Rows of experts count in a step's memory, by what a rank holds."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn

from cluster.model.experts import expert_row_bytes
from tests.flow.tiny_models import TEXT_FAMILIES

HIDDEN, ROW = 64, 4 * 64 * 4  # four times the hidden size, float32


@pytest.mark.parametrize(
    ("name", "num_bytes"),
    [
        ("llama", 0),
        ("qwen3_moe", 2 * ROW),
        ("mixtral", 2 * (HIDDEN + 4 * 96) * 4),  # experts of 96 are wider than that
        ("gpt_oss_sinks_window", 2 * (HIDDEN + 4 * 96) * 4),  # transposed
        ("llama4_chunks", 4 * (HIDDEN + 4 * 96) * 4),  # that every expert computes
    ],
)
def test_a_token_has_a_row_for_each_expert_that_it_chose(name: str, num_bytes: int) -> None:
    model = TEXT_FAMILIES[name]().model
    assert expert_row_bytes(model.model, model.config) == num_bytes


def test_half_of_the_width_and_16_bit_are_less() -> None:
    text = nn.Module()
    text.down_proj = nn.Parameter(torch.empty(4, HIDDEN, 48, dtype=torch.bfloat16))
    config = hf.Qwen3MoeConfig(hidden_size=HIDDEN, num_experts_per_tok=8)
    assert expert_row_bytes(text, config) == 8 * 2 * 4 * HIDDEN
