from __future__ import annotations

from pathlib import Path

import pytest

from cluster.media.processor import MediaProcessor

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def processor(demo_model: Path) -> MediaProcessor:
    loaded = MediaProcessor.load(demo_model)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def hf_processor(processor: MediaProcessor):
    return processor.transformers_processor
