"""Tiny models, and what they say without drafts."""

from __future__ import annotations

import pytest
import torch

from cluster.model.language import LanguageModel
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.decode_service.drafting import BLOCK_SIZE, decode, requests_of


@pytest.fixture(scope="module")
def target() -> LanguageModel:
    return LanguageModel.from_model(TEXT_FAMILIES["qwen3"]().model, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def draft() -> LanguageModel:
    """The target, a little changed: right now and then."""
    model = TEXT_FAMILIES["qwen3"]().model
    torch.manual_seed(5)
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    return LanguageModel.from_model(model, block_size=BLOCK_SIZE)


@pytest.fixture(scope="module")
def expected(target) -> list[list[int]]:
    return decode(target, requests_of(target))
