"""Positions of resumed prompts, whatever the family's own rule is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cluster.config.families import PositionForm
from cluster.model.positions import RULES, PositionRule, PromptPositions
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams

ASKED = (3, 1, 4, 1, 5)


def spread(_: nn.Module, prompt: Prompt) -> PromptPositions:
    """Three axes that end together, six behind the number of tokens. Knows prompts as they were asked
    only."""
    assert prompt == Prompt(ASKED, cache_salt="s")
    axes = torch.tensor([[0, 1, 2, 3, 10], [0, 5, 5, 5, 10], [0, 9, 9, 9, 10]])
    return PromptPositions(axes.float(), 6)


@pytest.mark.parametrize("attempts", [[()], [(7,)], [(7, 8), (9,)], [(), (7, 8, 9), (), (2,)]])
def test_generated_tokens_go_on_where_the_prompt_that_was_asked_ends(attempts):
    request = GenerateRequest("r", Prompt(ASKED, cache_salt="s"), (SamplingParams(),), StopParams(50))
    for number, tokens in enumerate(attempts):
        request = request.resumed(f"s{number}", (0,), tokens)
    count = sum(map(len, attempts))
    placed = PositionRule(3, spread).of_prompt(nn.Module(), request.prompt)
    assert request.prompt.num_generated == count
    assert placed.delta == 6 and placed.position_ids.dtype == torch.float32
    assert placed.position_ids[:, :5].equal(spread(nn.Module(), request.prompt.as_asked).position_ids)
    assert placed.position_ids[:, 5:].tolist() == [[11.0 + i for i in range(count)]] * 3


def test_a_negative_prompt_is_resumed_with_the_same_tokens():
    guidance = Guidance(1.5, Prompt((9, 9)))
    request = GenerateRequest("r", Prompt(ASKED), (SamplingParams(),), StopParams(50), guidance)
    guided = request.resumed("s", (0,), (7, 8, 6)).guidance
    assert guided is not None
    negative = guided.negative_prompt
    assert negative.num_generated == 3 and negative.as_asked == Prompt((9, 9))
    placed = RULES[PositionForm.ONE_DIMENSIONAL].of_prompt(nn.Module(), negative)
    assert placed.position_ids.tolist() == [0, 1, 2, 3, 4] and placed.delta == 0
