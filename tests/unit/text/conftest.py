from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.text.tokenizer import TextProcessor

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def text(demo_model: Path) -> TextProcessor:
    return TextProcessor.load(demo_model)


@pytest.fixture(scope="session")
def call_kwargs(demo_model: Path) -> dict:
    return json.loads((demo_model / "mm_processor_kwargs.json").read_text())
