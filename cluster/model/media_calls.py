"""How each kind of media encoder in transformers is called with several items, and how its output becomes one
[num_tokens, feature_width] tensor per item.

An item is the HF processor's tensors for one media item, batch dimension included. `base` is `model.model` of the
transformers class. Calls that cannot be batched without padding take equal shapes together and the rest one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from cluster.types.media import Modality

Item = Mapping[str, Tensor]
EncodeCall = Callable[[nn.Module, Sequence[Item]], list[Tensor]]


def packed_patches(modality: Modality) -> EncodeCall:
    """Qwen: patches of all items in one sequence, cut apart by their grids; deep-stack features become columns."""
    video = modality is Modality.VIDEO
    pixels_key, grid_key = (
        ("pixel_values_videos", "video_grid_thw") if video else ("pixel_values", "image_grid_thw")
    )

    def encode(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        method = base.get_video_features if video else base.get_image_features
        output = method(_joined(items, pixels_key), _joined(items, grid_key), return_dict=True)
        deep = output.get("deepstack_features") or []
        return [torch.cat(columns, dim=-1) for columns in zip(output.pooler_output, *deep, strict=True)]

    return encode


def tiled_images(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """LLaVA, InternVL, Gemma3: [tiles, 3, h, w] per item, the same number of rows from every tile."""

    def encode(group: Sequence[Item]) -> list[Tensor]:
        tiles = base.get_image_features(_joined(group, "pixel_values"), return_dict=True).pooler_output
        counts = [len(item["pixel_values"]) for item in group]
        return _regroup(list(tiles), counts)

    return _by_shape(items, ("pixel_values",), encode)


def sized_images(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Mistral3, LLaVA-NeXT and -OneVision: pixels padded to a common size plus the true `image_sizes`."""

    def encode(group: Sequence[Item]) -> list[Tensor]:
        output = base.get_image_features(
            _joined(group, "pixel_values"), image_sizes=_joined(group, "image_sizes"), return_dict=True
        )
        return list(output.pooler_output)

    return _by_shape(items, ("pixel_values",), encode)


def stacked_videos(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """LLaVA-OneVision: [1, frames, 3, h, w] per item; the newline embedding ends each clip, as in its own forward."""

    def encode(group: Sequence[Item]) -> list[Tensor]:
        clips = base.get_video_features(_joined(group, "pixel_values_videos"), return_dict=True).pooler_output
        newline = cast(Tensor, base.image_newline)[None]
        return [torch.cat([clip.flatten(0, -2), newline.to(clip.dtype)]) for clip in clips]

    return _by_shape(items, ("pixel_values_videos",), encode)


def masked_tiles(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Idefics3, SmolVLM: [1, tiles, 3, h, w] and optionally `pixel_attention_mask` [1, tiles, h, w]."""

    def encode(group: Sequence[Item]) -> list[Tensor]:
        output = base.get_image_features(
            _joined(group, "pixel_values"), _joined_or_none(group, "pixel_attention_mask"), return_dict=True
        )
        return list(output.pooler_output)

    return _by_shape(items, ("pixel_values", "pixel_attention_mask"), encode)


def windowed_mels(mask_key: str | None) -> EncodeCall:
    """Voxtral, AudioFlamingo3, GLM-ASR: [windows, mels, frames] per item, flat rows out. Items run one by one: only
    then the rows of an item are known without repeating the family's length formula."""

    def encode(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
        side = [{} if mask_key is None else {mask_key: item[mask_key]} for item in items]
        outputs = [
            base.get_audio_features(item["input_features"], return_dict=True, **extra)
            for item, extra in zip(items, side, strict=True)
        ]
        return [output.pooler_output.flatten(0, -2) for output in outputs]

    return encode


def qwen2_5_omni_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Mels are padded to the longest item; the encoder drops the padding by the mask before it looks at them."""
    features = _padded([item["input_features"][0] for item in items])
    mask = _padded([item["feature_attention_mask"][0] for item in items])
    flat = base.get_audio_features(features, feature_attention_mask=mask, return_dict=True).last_hidden_state
    _, rows = base.audio_tower._get_feat_extract_output_lengths(_mel_lengths(items))
    return list(flat.split(rows.tolist()))


def qwen3_omni_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """One by one: transformers pads the chunks of a call to the longest, and its convolutions then leak bias from the
    padding into the last rows of shorter ones (0.03 on a random model), so a batch would change the numbers."""
    return [
        base.get_audio_features(
            item["input_features"], feature_attention_mask=item["feature_attention_mask"], return_dict=True
        ).last_hidden_state
        for item in items
    ]


def qwen2_audio(base: nn.Module, items: Sequence[Item]) -> list[Tensor]:
    """Fixed 30 s windows and a mask. transformers 5.23 has no get_audio_features here; this repeats its forward."""
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


def _joined_or_none(items: Sequence[Item], key: str) -> Tensor | None:
    return _joined(items, key) if key in items[0] else None


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
    """Runs items of equal shape (all axes but the first) in one call each; results in the order of `items`."""
    groups: dict[tuple, list[int]] = {}
    for i, item in enumerate(items):
        groups.setdefault(tuple(item[key].shape[1:] for key in keys if key in item), []).append(i)
    results: dict[int, Tensor] = {}
    for members in groups.values():
        results.update(zip(members, encode([items[i] for i in members]), strict=True))
    return [results[i] for i in range(len(items))]
