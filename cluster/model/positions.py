"""Rotary positions of a prompt, from token ids and media geometries alone: no pixels, no embeddings.

Multimodal rotary positions come from transformers' own `get_rope_index`, which needs only its model's configuration, so
it runs in a process that has dropped the encoder's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cluster.errors import UnsupportedError
from cluster.types.media import MediaSpan, Modality
from cluster.types.request import Prompt


@dataclass(frozen=True)
class PromptPositions:
    position_ids: Tensor  # [T] or [3, T] (time, height, width), int64 or float32, on the CPU
    delta: int  # position of the token at context length n is n + delta, on every axis


PositionRule = Callable[[nn.Module, Prompt], PromptPositions]  # first argument: `model.model` of transformers' class


def one_dimensional(_base: nn.Module, prompt: Prompt) -> PromptPositions:
    return PromptPositions(torch.arange(len(prompt.token_ids)), 0)


def qwen_vl(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: image and video ranges are marked by token type."""
    ids = torch.tensor([prompt.token_ids])
    token_types = torch.zeros_like(ids)
    for span in prompt.media:
        token_types[0, span.offset : span.end] = 1 if span.modality is Modality.IMAGE else 2
    positions, delta = base.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=token_types,
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        second_per_grid_ts=_seconds(prompt),
        attention_mask=torch.ones_like(ids),
    )
    return PromptPositions(positions[:, 0], _whole(delta))


def qwen_omni(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Time-aligned positions of the Omni thinkers; audio interleaved with its video is not expressed."""
    ids = torch.tensor([prompt.token_ids])
    mel_frames = [span.geometry.num_mel_frames for span in _spans(prompt, Modality.AUDIO)]
    positions, delta = base.get_rope_index(
        input_ids=ids,
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=False,
        audio_seqlens=torch.tensor(mel_frames) if mel_frames else None,
        second_per_grids=_seconds(prompt),
    )
    return PromptPositions(positions[:, 0], _whole(delta))


def _spans(prompt: Prompt, modality: Modality) -> list[MediaSpan]:
    return [span for span in prompt.media if span.modality is modality]


def _grids(prompt: Prompt, modality: Modality) -> Tensor | None:
    """[items, 3] int64, in prompt order."""
    grids = [span.geometry.grid_thw for span in _spans(prompt, modality)]
    return torch.tensor(grids) if grids else None


def _seconds(prompt: Prompt) -> Tensor | None:
    """[videos] float32: seconds per temporal patch; 1 where the geometry does not say, as transformers assumes."""
    seconds = [span.geometry.second_per_grid for span in _spans(prompt, Modality.VIDEO)]
    return torch.tensor([1.0 if s is None else s for s in seconds]) if seconds else None


def _whole(delta: Tensor) -> int:
    value = float(delta)
    if value != int(value):
        raise UnsupportedError(f"this clip's frame rate gives a fractional position delta ({value}); use another rate")
    return int(value)
