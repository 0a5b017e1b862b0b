"""Calls to the media encoders of transformers with several items, one function for each `EncoderForm`.

Each function turns the encoder's output into one [num_tokens, feature_width] tensor per item. An item is the
HF processor's tensors for one media item, batch dimension included. `base` is `model.model` of the
transformers class. A call that cannot be batched without padding runs items of equal shape together and all
others one by one.

Some forms have a `Splitter`, because no part of an item sees another part: Qwen's vision attends inside one
temporal patch, other encoders inside one frame, tile or window. The pieces of such an item, encoded one by
one, give the rows of the whole, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from cluster.config.families import EncoderForm

Item = Mapping[str, Tensor]


@dataclass(frozen=True)
class Splitter:
    """Splits an item into pieces of whole units: temporal patches, frames, tiles or windows of equal cost."""

    num_units: Callable[[Item], int]
    piece: Callable[[Item, int, int], Item]  # units [start, end); views, nothing is copied
    # rows that every call appends behind the last unit; only those of the last piece count
    num_end_rows: int = 0


@dataclass(frozen=True)
class EncodeCall:
    run: Callable[[nn.Module, Sequence[Item]], list[Tensor]]
    splitter: Splitter | None = None  # None: an item is encoded whole


def _along(axis: int, *keys: str, num_end_rows: int = 0) -> Splitter:
    """A unit is one index of `axis` in each of those `keys` that an item has; all keys have the same number
    of units."""

    def num_units(item: Item) -> int:
        return next(item[key] for key in keys if key in item).shape[axis]

    def piece(item: Item, start: int, end: int) -> Item:
        return {
            key: value.narrow(axis, start, end - start) if key in keys else value
            for key, value in item.items()
        }

    return Splitter(num_units, piece, num_end_rows)


def _along_grid(pixels_key: str, grid_key: str) -> Splitter:
    """A unit is a temporal patch: h * w rows of the pixels, by the item's grid [1, 3] of (t, h, w)."""

    def num_units(item: Item) -> int:
        return int(item[grid_key][0, 0])

    def piece(item: Item, start: int, end: int) -> Item:
        grid = item[grid_key].clone()
        num_patches = int(grid[0, 1] * grid[0, 2])
        grid[0, 0] = end - start
        return {pixels_key: item[pixels_key][start * num_patches : end * num_patches], grid_key: grid}

    return Splitter(num_units, piece)


def _packed(method: str, pixels_key: str, grid_key: str) -> EncodeCall:
    """Patches of all items in one sequence. Qwen cuts the rows apart by the items' grids."""

    def run(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        output = getattr(base, method)(_joined(items, pixels_key), _joined(items, grid_key), return_dict=True)
        return [torch.cat(columns, dim=-1) for columns in zip(*_columns(output), strict=True)]

    return EncodeCall(run, _along_grid(pixels_key, grid_key))


def _columns(output: Any) -> list[Any]:
    """The embeddings, then the deep-stack features, which become further columns."""
    return [output.pooler_output, *(output.get("deepstack_features") or [])]


def _tiled_images(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """LLaVA, InternVL, Gemma3: [tiles, 3, h, w] per item, the same number of rows from every tile."""
    return _of_tiles(items, lambda tiles: base.get_image_features(tiles, return_dict=True).pooler_output)


def _unprojected_tiles(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Llama 4: transformers calls the projector in its forward, not in get_image_features."""

    def encode(tiles: Tensor) -> Tensor:
        output = base.get_image_features(tiles, return_dict=True)
        return base.multi_modal_projector(output.last_hidden_state)

    return _of_tiles(items, encode)


def _of_tiles(items: Sequence[Item], encode: Callable[[Tensor], Sequence[Tensor]]) -> list[Tensor]:
    """`encode` gives rows for each of the tiles [n, 3, h, w] of several items."""

    def encode_group(group: Sequence[Item]) -> list[Tensor]:
        counts = [len(item["pixel_values"]) for item in group]
        return _regroup(list(encode(_joined(group, "pixel_values"))), counts)

    return _by_shape(items, ("pixel_values",), encode_group)


def _alike(method: str, *keys: str) -> Callable[[nn.Module, Sequence[Item]], list[Tensor]]:
    """Items of one shape in one call. `method` takes the first of these tensors, then by their names the
    others that an item has."""
    first, *others = keys

    def run(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        def encode(group: Sequence[Item]) -> list[Tensor]:
            named = {key: _joined(group, key) for key in others if key in group[0]}
            return list(getattr(base, method)(_joined(group, first), **named, return_dict=True).pooler_output)

        return _by_shape(items, keys, encode)

    return run


def _by_name(method: str) -> Callable[[nn.Module, Sequence[Item]], list[Tensor]]:
    """One item per call: only then its rows are known without a copy of the family's length formula. The
    processor names the tensors of an item as `method` takes them."""

    def run(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        outputs = [getattr(base, method)(**item, return_dict=True) for item in items]
        return [torch.cat([_flat(rows) for rows in _columns(output)], dim=-1) for output in outputs]

    return run


def _stacked_tiles(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Perception LM: [1, tiles or frames, 3, h, w] per item, of images and of clips."""
    pixels = [next(iter(item.values())) for item in items]
    return [_flat(base.get_image_features(tiles, return_dict=True).pooler_output) for tiles in pixels]


def _flat(rows: Tensor | Sequence[Tensor]) -> Tensor:
    """[rows, d] of one item, from [..., d] or from parts of it."""
    return rows.flatten(0, -2) if isinstance(rows, Tensor) else torch.cat([_flat(part) for part in rows])


def _masked_sound(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Gemma 4: one sound per call, because those of a call would be padded to the longest."""
    outputs = [base.get_audio_features(**item, return_dict=True) for item in items]
    return [output.pooler_output[output.attention_mask] for output in outputs]


def _counted_frames() -> Splitter:
    """A unit is a frame."""
    key = "num_frames_per_video"
    frames = _along(0, "pixel_values_videos", "video_position_ids")

    def piece(item: Item, start: int, end: int) -> Item:
        return {**frames.piece(item, start, end), key: torch.full_like(item[key], end - start)}

    return Splitter(frames.num_units, piece)


def _timed_mel_windows(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Music Flamingo. It finds out from the prompt which windows make up a sound; a prompt of one sound's
    placeholders will do."""
    found = []
    for item in items:
        frames = item["input_features_mask"].sum(-1)
        num_rows = int(base.audio_tower._get_feat_extract_output_lengths(frames)[1].sum())
        ids = torch.full((1, num_rows), base.config.audio_token_id, device=frames.device)
        found.append(base.get_audio_features(**item, input_ids=ids, return_dict=True).pooler_output)
    return found


def _qwen2_5_omni_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Mels are padded to the longest item; the encoder first drops the padding by the mask."""
    features = _padded([item["input_features"][0] for item in items])
    mask = _padded([item["feature_attention_mask"][0] for item in items])
    flat = base.get_audio_features(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
    _, rows = base.audio_tower._get_feat_extract_output_lengths(_mel_lengths(items))
    return list(flat.split(rows.tolist()))


def _qwen3_omni_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """One item per call. transformers pads the chunks of a call to the longest one, and its convolutions then
    leak bias from the padding into the last rows of shorter ones (0.03 on a random model): a batch would
    change the numbers."""
    return [
        base.get_audio_features(
            item["input_features"], feature_attention_mask=item["feature_attention_mask"], return_dict=True
        ).last_hidden_state
        for item in items
    ]


def _qwen2_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Fixed windows of 30 s and a mask. transformers 5.24 has no get_audio_features for it, so this repeats
    its forward."""
    tower = base.audio_tower
    conv_lengths, rows = tower._get_feat_extract_output_lengths(_mel_lengths(items))
    features = _joined(items, "input_features")
    num_frames = (features.shape[-1] - 2) // 2 + 1
    valid = torch.arange(num_frames, device=features.device)[None] < conv_lengths[:, None]
    embeds = features.new_empty(len(items), num_frames, 1)
    mask = create_bidirectional_mask(config=tower.config, inputs_embeds=embeds, attention_mask=valid)
    hidden = base.multi_modal_projector(tower(features, attention_mask=mask).last_hidden_state)
    return [hidden[i, :count] for i, count in enumerate(rows.tolist())]


def _mel_lengths(items: Sequence[Item]) -> Tensor:
    """[items] int64: valid feature frames."""
    return torch.stack([item["feature_attention_mask"].sum() for item in items])


def _joined(items: Sequence[Item], key: str) -> Tensor:
    return torch.cat([item[key] for item in items])


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """[items, ..., longest]: zeros appended to the last axis."""
    longest = max(t.shape[-1] for t in tensors)
    return torch.stack([nn.functional.pad(t, (0, longest - t.shape[-1])) for t in tensors])


def _regroup(tiles: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Tiles [n, d] of consecutive items → one [sum n, d] per item."""
    remaining = iter(tiles)
    return [torch.cat([next(remaining) for _ in range(count)]) for count in counts]


def _by_shape(
    items: Sequence[Item], keys: Sequence[str], encode: Callable[[Sequence[Item]], list[Tensor]]
) -> list[Tensor]:
    """Runs items of equal shape (all axes but the first) in one call each; results in the order of
    `items`."""
    groups: dict[tuple, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(tuple(item[key].shape[1:] for key in keys if key in item), []).append(i)
    results: dict[int, Tensor] = {}
    for members in groups.values():
        results.update(zip(members, encode([items[i] for i in members]), strict=True))
    return [results[i] for i in range(len(items))]


CALLS: Mapping[EncoderForm, EncodeCall] = {
    EncoderForm.PACKED_IMAGES: _packed("get_image_features", "pixel_values", "image_grid_thw"),
    EncoderForm.PACKED_VIDEOS: _packed("get_video_features", "pixel_values_videos", "video_grid_thw"),
    EncoderForm.TILED_IMAGES: EncodeCall(_tiled_images, _along(0, "pixel_values")),
    EncoderForm.UNPROJECTED_TILES: EncodeCall(_unprojected_tiles, _along(0, "pixel_values")),
    # Mistral3, LLaVA-NeXT and -OneVision. Not split: LLaVA mixes the rows of tiles into lines of the whole
    EncoderForm.SIZED_IMAGES: EncodeCall(_alike("get_image_features", "pixel_values", "image_sizes")),
    # LLaVA-OneVision: [1, frames, 3, h, w] per item; the newline embedding ends each clip
    EncoderForm.STACKED_VIDEOS: EncodeCall(
        _alike("get_video_features", "pixel_values_videos"), _along(1, "pixel_values_videos", num_end_rows=1)
    ),
    # Idefics3, SmolVLM: [1, tiles, 3, h, w] per item
    EncoderForm.MASKED_TILES: EncodeCall(
        _alike("get_image_features", "pixel_values", "pixel_attention_mask"),
        _along(1, "pixel_values", "pixel_attention_mask"),
    ),
    EncoderForm.FRAMES: EncodeCall(_by_name("get_video_features"), _along(1, "pixel_values_videos")),
    EncoderForm.COUNTED_FRAMES: EncodeCall(_by_name("get_video_features"), _counted_frames()),
    EncoderForm.STACKED_TILES: EncodeCall(_stacked_tiles, _along(1, "pixel_values", "pixel_values_videos")),
    EncoderForm.MASKED_CROPS: EncodeCall(
        _by_name("get_image_features"), _along(0, "pixel_values", "pixel_mask")
    ),
    EncoderForm.SINGLE_IMAGES: EncodeCall(_by_name("get_image_features")),
    EncoderForm.MASKED_SOUND: EncodeCall(_masked_sound),
    EncoderForm.TIMED_MEL_WINDOWS: EncodeCall(_timed_mel_windows),
    EncoderForm.MEL_WINDOWS: EncodeCall(
        _by_name("get_audio_features"), _along(0, "input_features", "input_features_mask")
    ),
    EncoderForm.PADDED_MELS: EncodeCall(_qwen2_5_omni_audio),
    EncoderForm.SINGLE_MELS: EncodeCall(_qwen3_omni_audio),
    EncoderForm.FIXED_MEL_WINDOW: EncodeCall(_qwen2_audio),
    EncoderForm.WAVEFORMS: EncodeCall(_by_name("get_audio_features")),
}
