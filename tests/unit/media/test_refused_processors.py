"""Processors of model folders that are refused at start, with the reason."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError
from cluster.media.processor import MediaProcessor
from tests.flow.family_folders import FAMILIES, save_family

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.skipif("nemotron_h_omni" not in FAMILIES, reason="this transformers has no such type")
@pytest.mark.parametrize(("max_num_patches", "max_model_len"), [(64, 19), (0, 64)])
def test_images_whose_sizes_depend_on_their_number_are_refused_at_start(
    max_num_patches, max_model_len, tmp_path
):
    folder = save_family("nemotron_h_omni", tmp_path)
    images = folder.processor.image_processor
    images.max_num_patches, images.max_model_len = max_num_patches, max_model_len
    folder.processor.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'nemotron_h_omni' .* depends on how many there are"):
        MediaProcessor.load(tmp_path)


def test_a_processor_that_cannot_be_asked_is_refused_at_start_with_the_reason(tmp_path):
    folder = save_family("llava", tmp_path)
    folder.processor.patch_size = None
    folder.processor.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"'llava' is not supported: its processor cannot lay out .* image"):
        MediaProcessor.load(tmp_path)
