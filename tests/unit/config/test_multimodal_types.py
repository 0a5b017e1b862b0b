"""docs/media.md says of every multimodal type of transformers whether it is served, and it is as said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from cluster.config.checkpoint import check_family
from cluster.config.families import MEDIA_FAMILIES, part_of_whole
from cluster.errors import ConfigError
from cluster.model.support import check_supported

PAGE = Path(__file__).parents[3] / "docs" / "media.md"
BESIDE = {  # transformers maps them elsewhere
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
}
TYPES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **BESIDE}


def types_under(heading: str) -> set[str]:
    """The model types in the table that begins with this column."""
    _, table = PAGE.read_text().split(f"| {heading}", 1)
    rows = table.split("\n\n", 1)[0].splitlines()[2:]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])}


def is_served(name: str) -> bool:
    return name in MEDIA_FAMILIES or part_of_whole(name) is not None


def test_the_page_names_every_type_once_where_it_belongs():
    assert types_under("served") == {name for name in TYPES if is_served(name)}
    assert types_under("refused, because") == {name for name in TYPES if not is_served(name)}


@pytest.mark.parametrize("name", [name for name in TYPES if not is_served(name)])
def test_what_is_not_served_is_refused_by_name(name):
    config = CONFIG_MAPPING[name]()
    with pytest.raises(ConfigError, match="is not supported"):
        check_family({**config.to_dict(), "architectures": [TYPES[name]]})
        check_supported(config)
