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


@dataclass(frozen=True)
class PositionRule:
    axes: int  # 1, or 3 for multimodal rotary positions
    of_prompt: Callable[
        [nn.Module, Prompt], PromptPositions
    ]  # first argument: `model.model` of transformers' class


def _one_dimensional(_base: nn.Module, prompt: Prompt) -> PromptPositions:
    return PromptPositions(torch.arange(len(prompt.token_ids)), 0)


def _qwen_vl(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL: image and video ranges are marked by token type."""
    ids = torch.tensor([prompt.token_ids])
    token_types = torch.zeros_like(ids)
    for span in prompt.media:
        token_types[0, span.offset : span.end] = 1 if span.modality is Modality.IMAGE else 2
    position_ids, _ = base.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=token_types,
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        second_per_grid_ts=_seconds(prompt),
        attention_mask=torch.ones_like(ids),
    )
    return _prompt_positions(position_ids[:, 0])


def _qwen_omni(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Time-aligned positions of the Omni thinkers; audio interleaved with its video is not expressed."""
    ids = torch.tensor([prompt.token_ids])
    mel_frames = [span.geometry.num_mel_frames for span in _spans(prompt, Modality.AUDIO)]
    position_ids, _ = base.get_rope_index(
        input_ids=ids,
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=False,
        audio_seqlens=torch.tensor(mel_frames) if mel_frames else None,
        second_per_grids=_seconds(prompt),
    )
    return _prompt_positions(position_ids[:, 0])


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


def _prompt_positions(position_ids: Tensor) -> PromptPositions:
    """position_ids [3, T]. `generate` goes on counting from the last prompt token, not from transformers' own rope delta;
    the two differ where a clip's time axis runs ahead of the text that follows it (Qwen2.5-VL)."""
    following = {float(p) + 1 for p in position_ids[:, -1]}
    if len(following) != 1:
        raise UnsupportedError("a prompt must end with text, not with a media item")
    delta = following.pop() - position_ids.shape[-1]
    if delta != int(delta):
        raise UnsupportedError(
            f"a clip's frame rate gives fractional positions after it (offset {delta}); use another"
        )
    return PromptPositions(position_ids, int(delta))


ONE_DIMENSIONAL = PositionRule(1, _one_dimensional)
QWEN_VL = PositionRule(3, _qwen_vl)
QWEN_OMNI = PositionRule(3, _qwen_omni)
