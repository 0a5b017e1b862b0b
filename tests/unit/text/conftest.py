from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.media.processor import MediaProcessor
from cluster.text.tokenizer import TextProcessor

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def text(demo_model: Path, media: MediaProcessor) -> TextProcessor:
    return TextProcessor.load(demo_model, media.transformers_processor)


@pytest.fixture(scope="session")
def tokenizer(media: MediaProcessor) -> Any:
    """Transformers' own, of the demo model."""
    return media.transformers_processor.tokenizer


@pytest.fixture(scope="session")
def media(demo_model: Path) -> MediaProcessor:
    loaded = MediaProcessor.load(demo_model)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def call_kwargs(demo_model: Path) -> dict:
    return json.loads((demo_model / "mm_processor_kwargs.json").read_text())
