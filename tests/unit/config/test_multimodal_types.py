"""docs/media.md says of every multimodal type of transformers whether it is served, and it is as said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES

from cluster.config.checkpoint import check_family, placeholder_ids, read_config, text_config
from cluster.config.families import MEDIA_FAMILIES, lacks_package, part_of_whole
from cluster.config.refused import REFUSED
from cluster.errors import ConfigError
from cluster.model.support import TEXT_ALONE, check_supported

PAGE = Path(__file__).parents[3] / "docs" / "media.md"
BESIDE = {  # transformers maps them elsewhere
    "audioflamingo3": "AudioFlamingo3ForConditionalGeneration",
    "musicflamingo": "MusicFlamingoForConditionalGeneration",
}
TYPES = {**MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **BESIDE}
# the page and the table also name types that only the newest transformers has of those that we run with
KNOWN_REFUSED = [name for name in REFUSED if name in CONFIG_MAPPING]


def rows_under(heading: str) -> dict[str, str]:
    """Of the table that begins with this column: what the column says of each model type."""
    _, table = PAGE.read_text().split(f"| {heading}", 1)
    rows = [row.strip("| ").rsplit(" | ", 1) for row in table.split("\n\n", 1)[0].splitlines()[2:]]
    return {name: said for said, names in rows for name in re.findall(r"`([^`]+)`", names)}


def test_a_checkpoint_that_leaves_an_encoder_out_takes_no_such_items() -> None:
    family = MEDIA_FAMILIES["gemma4"]
    make: Any = CONFIG_MAPPING["gemma4"]
    config = make(audio_config=None, vision_config={}).to_dict()
    assert [*family.encoders_of(config)] == ["image", "video"]
    assert [*family.encoders_of({**config, "audio_config": {}, "vision_config": None})] == ["audio"]


def test_a_checkpoint_that_drops_rows_of_clips_takes_none_and_older_names_are_read(tmp_path) -> None:
    content = {
        "model_type": "nemotron_h_omni", "llm_config": {"hidden_size": 8}, "vision_config": {},
        "sound_config": None, "img_context_token_id": 18, "video_pruning_rate": 0.7,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    config = read_config(tmp_path)
    assert text_config(config) == {"hidden_size": 8}
    assert placeholder_ids(config) == {"image": 18}
    family = MEDIA_FAMILIES["nemotron_h_omni"]
    assert [*family.encoders_of(config)] == ["image"]
    assert [*family.encoders_of({**config, "video_pruning_rate": 0.0})] == ["image", "video"]


def is_served(name: str) -> bool:
    return name in (*MEDIA_FAMILIES, *TEXT_ALONE) or part_of_whole(name) is not None


def test_the_page_names_every_type_once_where_it_belongs():
    served = {name for name in rows_under("served") if name in CONFIG_MAPPING}
    assert served == {name for name in TYPES if is_served(name)}
    assert rows_under("refused, because") == REFUSED
    assert set(KNOWN_REFUSED) == {name for name in TYPES if not is_served(name)}


@pytest.mark.parametrize("name", KNOWN_REFUSED)
def test_what_is_not_served_is_refused_by_name_and_cause(name):
    config = CONFIG_MAPPING[name]()
    reason = re.escape(f"'{name}' is not supported: {REFUSED[name]}")
    with pytest.raises(ConfigError, match=reason):
        check_family({**config.to_dict(), "architectures": [TYPES[name]]})
    with pytest.raises(ConfigError, match=reason):
        check_supported(config)


@pytest.mark.parametrize("name", [name for name, family in MEDIA_FAMILIES.items() if lacks_package(family)])
def test_a_family_whose_package_is_missing_is_refused_by_name(name):
    config = CONFIG_MAPPING[name]()
    reason = f"'{name}' is not supported: .*pip install {MEDIA_FAMILIES[name].package}"
    with pytest.raises(ConfigError, match=reason):
        check_family(config.to_dict())
    with pytest.raises(ConfigError, match=reason):
        check_supported(config)
