"""Every family whose items can be cut: the rows of the pieces are the rows of the whole, in order."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.model.encoder import EncoderModel
from cluster.types.media import MediaOptions, Modality
from encoder_service.runner import EncoderRunner, Piece, Prepared, pool_rows
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import noise

NUM_UNITS = 5
# of what no piece may be encoded apart: rows woven over tiles, attention or convolutions over the whole clip;
# or what has parts of several sizes
WHOLE = {
    ("llava_next", Modality.IMAGE),
    ("llava_next_video", Modality.IMAGE),
    ("llava_onevision", Modality.IMAGE),
    ("mistral3", Modality.IMAGE),
    ("mistral3_of_mistral4", Modality.IMAGE),
    ("lighton_ocr", Modality.IMAGE),
    ("deepseek_vl_hybrid", Modality.IMAGE),
    ("deepseek_ocr2", Modality.IMAGE),
    ("step3p7", Modality.IMAGE),
    ("granite_docling", Modality.IMAGE),
    ("lfm2_vl", Modality.IMAGE),
    ("nemotron_h_omni", Modality.IMAGE),
    ("gemma4", Modality.IMAGE),
    ("gemma4_small", Modality.IMAGE),
    ("gemma4", Modality.AUDIO),
    ("gemma4_small", Modality.AUDIO),
    ("musicflamingo", Modality.AUDIO),
    ("qwen2_5_omni", Modality.AUDIO),
    ("qwen3_omni", Modality.AUDIO),
    ("qwen2_audio", Modality.AUDIO),
    ("omniasr", Modality.AUDIO),
}
# their encoders take an image for one temporal patch, which is all that it ever has
ONE_PATCH = (
    "glm4v", "glm4v_moe", "glm46v", "glmga", "glm_ocr", "paddleocr_vl", "hunyuan_vl", "kimi_k25",
    "cosmos3_edge",
)  # fmt: skip


def of_many_units(item: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """An item like this one, of `NUM_UNITS` temporal patches, frames, tiles or windows, no two of them
    alike."""
    longer: dict[str, Tensor] = {}
    for key, value in item.items():
        if key.endswith("grid_thw"):
            longer[key] = torch.cat([torch.full((1, 1), NUM_UNITS), value[:, 1:]], dim=1)
        elif key.startswith("pixel_values") and value.dim() == 2:
            grid = next(grid for name, grid in item.items() if name.endswith("grid_thw"))
            longer[key] = noise(NUM_UNITS * int(grid[0, 1:].prod()), value.shape[1])
        elif key.startswith("pixel_values") and value.dim() == 5:
            longer[key] = noise(1, NUM_UNITS, *value.shape[2:])
        elif key == "num_frames_per_video":
            longer[key] = torch.full_like(value, NUM_UNITS)
        elif key == "video_position_ids":
            longer[key] = value[:1].expand(NUM_UNITS, *value.shape[1:]).contiguous()
        elif key in ("pixel_values", "pixel_values_videos", "input_features"):
            longer[key] = noise(NUM_UNITS, *value.shape[1:])
        else:
            longer[key] = value.expand(NUM_UNITS, *value.shape[1:]).contiguous()
    return longer


def runner_of(encoder: EncoderModel) -> EncoderRunner:
    return EncoderRunner(encoder, None, None)  # type: ignore[arg-type]  # nothing is prepared here


def encode(
    runner: EncoderRunner, modality: Modality, prepared: Prepared, cuts: list[int], **options: Any
) -> Tensor:
    """The rows of the pieces between the cuts, each encoded by a call of its own."""
    edges = [0, *cuts, prepared.num_units]
    pieces = [
        Piece(prepared, MediaOptions(**options), start, end) for start, end in itertools.pairwise(edges)
    ]
    return torch.cat([runner.encode(modality, [piece])[0] for piece in pieces])


@pytest.fixture(scope="module", params=MEDIA_FAMILIES)
def family(request: pytest.FixtureRequest):
    case = MEDIA_FAMILIES[request.param]()
    items = {modality: item for one in case.requests for modality, item in one.items}
    return request.param, EncoderModel.from_model(case.model), items


def test_pieces_give_the_rows_of_the_whole(family):
    name, encoder, items = family
    runner = runner_of(encoder)
    for modality, one_item in items.items():
        cut = encoder.splitter(modality)
        assert (cut is None) == ((name, modality) in WHOLE)
        if cut is None or (modality is Modality.IMAGE and name in ONE_PATCH):
            continue
        item = of_many_units(one_item)
        assert cut.num_units(item) == NUM_UNITS
        prepared = Prepared(item, NUM_UNITS)
        whole = encode(runner, modality, prepared, [])
        for cuts in ([2], [1, 2, 3, 4], [4]):
            rows = encode(runner, modality, prepared, cuts)
            torch.testing.assert_close(rows, whole, rtol=0, atol=1e-5)


def test_pieces_of_one_item_and_whole_items_share_a_call():
    case = MEDIA_FAMILIES["qwen2_5_vl"]()
    encoder = EncoderModel.from_model(case.model)
    items = [item for one in case.requests for kind, item in one.items if kind is Modality.VIDEO]
    long = Prepared(of_many_units(items[0]), NUM_UNITS)
    other = Prepared(items[0], int(items[0]["video_grid_thw"][0, 0]))
    pieces = [
        Piece(long, MediaOptions(), 0, 2),
        Piece(other, MediaOptions(), 0, other.num_units),
        Piece(long, MediaOptions(), 2, NUM_UNITS),
    ]
    runner = runner_of(encoder)
    first, middle, last = runner.encode(Modality.VIDEO, pieces)
    whole = encode(runner, Modality.VIDEO, long, [])
    torch.testing.assert_close(torch.cat([first, last]), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(middle, encode(runner, Modality.VIDEO, other, []), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(("temporal", "spatial"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_rows_are_pooled_alike_whether_an_item_is_cut_or_not(name, temporal, spatial):
    case = MEDIA_FAMILIES[name]()
    encoder = EncoderModel.from_model(case.model)
    grid = (NUM_UNITS, 6, 10)  # 3 x 5 rows a patch in time
    item = {"pixel_values_videos": noise(NUM_UNITS * 60, 96), "video_grid_thw": torch.tensor([grid])}
    prepared, runner = Prepared(item, NUM_UNITS), runner_of(encoder)
    options = {"temporal_pooling": temporal, "spatial_pooling": spatial}
    plain = encode(runner, Modality.VIDEO, prepared, [])
    pooled = encode(runner, Modality.VIDEO, prepared, [], **options)
    torch.testing.assert_close(pooled, pool_rows(plain, (NUM_UNITS, 3, 5), temporal, spatial))
    cut = encode(runner, Modality.VIDEO, prepared, [temporal], **options)
    torch.testing.assert_close(cut, pooled, rtol=0, atol=1e-5)


def test_items_without_a_grid_are_not_pooled():
    case = MEDIA_FAMILIES["llava_onevision"]()
    encoder, runner_item = EncoderModel.from_model(case.model), case.requests[-1].items[0][1]
    prepared, runner = Prepared(runner_item, 2), runner_of(encoder)
    plain = encode(runner, Modality.VIDEO, prepared, [])
    assert torch.equal(plain, encode(runner, Modality.VIDEO, prepared, [], temporal_pooling=2))


@pytest.mark.parametrize("name", MEDIA_FAMILIES)
def test_an_item_has_as_many_rows_as_its_placeholders(name):
    case = MEDIA_FAMILIES[name]()
    encoder = EncoderModel.from_model(case.model)
    for request in case.requests:
        for (modality, item), placed in zip(request.items, request.placed, strict=True):
            assert len(encoder.encode(modality, [item])[0]) == placed.geometry.num_tokens
