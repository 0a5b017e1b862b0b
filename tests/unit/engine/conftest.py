"""Tiny models, what they say without drafts, and an engine between scripted neighbours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cluster.model.language import LanguageModel
from tests.fakes.engines import Rig
from tests.fakes.relay import Relay
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.engine.drafting import BLOCK_SIZE, decode, requests_of


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


@pytest.fixture
def rig() -> Rig:
    return Rig(decode_blocks=10)


@pytest.fixture
def relay(rig: Rig) -> Iterator[Relay]:
    relay = Relay(rig)
    yield relay
    relay.finish()
