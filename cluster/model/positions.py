"""Rotary positions of a prompt, from token ids and media geometries only, without pixels and embeddings.

Multimodal rotary positions come from transformers' own `get_rope_index`. It needs only the model's
configuration, so it runs in a process without the encoder's weights. It gets the prompt without generated
tokens. Generated tokens of a resumed prompt continue from there, as in decode: `get_rope_index` would mistake
a generated placeholder token for media.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cluster.config.families import PositionForm
from cluster.errors import UnsupportedError
from cluster.types.media import Modality, PlacedMedia
from cluster.types.request import Prompt


@dataclass(frozen=True)
class PromptPositions:
    position_ids: Tensor  # [T] or [axes, T] (Qwen: time, height, width), int64 or float32, on the CPU
    delta: int  # position of the token at context length n is n + delta, on every axis


@dataclass(frozen=True)
class PositionRule:
    axes: int  # that a position of text needs: 1, or 3
    as_asked: Callable[[nn.Module, Prompt], PromptPositions]  # for a prompt without generated tokens

    def of_prompt(self, base: nn.Module, prompt: Prompt) -> PromptPositions:
        """Positions of a whole prompt. `base`: `model.model` of transformers' class."""
        asked = self.as_asked(base, prompt.as_asked)
        if prompt.num_generated == 0:
            return asked
        first = asked.position_ids.shape[-1]
        generated = torch.arange(first, len(prompt.token_ids)) + asked.delta
        generated = generated.to(asked.position_ids).expand(*asked.position_ids.shape[:-1], -1)
        return PromptPositions(torch.cat([asked.position_ids, generated], dim=-1), asked.delta)

    def with_axes(self, position_ids: Tensor) -> Tensor:
        """[T] or [3, T] → [1, T] or [3, 1, T], as the text model takes them."""
        if self.axes == 3 and position_ids.ndim == 1:
            position_ids = position_ids.expand(3, -1)
        return position_ids.unsqueeze(-2)


def _one_dimensional(_base: nn.Module, prompt: Prompt) -> PromptPositions:
    return PromptPositions(torch.arange(len(prompt.token_ids)), 0)


def _qwen_vl(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL."""
    ids = torch.tensor([prompt.token_ids])
    position_ids, _ = base.get_rope_index(
        input_ids=ids,
        mm_token_type_ids=_token_types(prompt),
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        second_per_grid_ts=_seconds(prompt),
        attention_mask=torch.ones_like(ids),
    )
    return _prompt_positions(position_ids[:, 0])


def _hunyuan_vl(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Returns as many axes as the configuration has sections. The text model gives every axis the positions
    of a text alone."""
    if not prompt.media:
        return _one_dimensional(base, prompt)
    ids = torch.tensor([prompt.token_ids])
    grids = _grids(prompt, Modality.IMAGE)
    position_ids, _ = base.get_rope_index(ids, _token_types(prompt), image_grid_thw=grids)
    return PromptPositions(position_ids[:, 0], 0)


def _qwen_omni(base: nn.Module, prompt: Prompt) -> PromptPositions:
    """Time-aligned positions of the Omni thinkers. `get_rope_index` supports no mix: either all clips of a
    prompt are heard, or none."""
    ids = torch.tensor([prompt.token_ids])
    sounds = _items(prompt, Modality.AUDIO)
    mel_frames = [sound.geometry.num_mel_frames for sound in sounds]
    clips = _items(prompt, Modality.VIDEO)
    is_heard = [any(clip.offset < sound.offset <= clip.end for sound in sounds) for clip in clips]
    if any(is_heard) and not all(is_heard):
        raise UnsupportedError(
            "either all clips of a prompt or none are heard with their sound (audio_in_video)"
        )
    position_ids, _ = base.get_rope_index(
        input_ids=ids,
        image_grid_thw=_grids(prompt, Modality.IMAGE),
        video_grid_thw=_grids(prompt, Modality.VIDEO),
        attention_mask=torch.ones_like(ids),
        use_audio_in_video=any(is_heard),
        audio_seqlens=torch.tensor(mel_frames) if mel_frames else None,
        second_per_grids=_seconds(prompt),
    )
    return _prompt_positions(position_ids[:, 0])


def _token_types(prompt: Prompt) -> Tensor:
    """[1, T] int64: 1 in the ranges of images, 2 in those of clips."""
    token_types = torch.zeros(1, len(prompt.token_ids), dtype=torch.int64)
    for item in prompt.media:
        for offset, length in item.ranges:
            token_types[0, offset : offset + length] = 1 if item.modality is Modality.IMAGE else 2
    return token_types


def _items(prompt: Prompt, modality: Modality) -> list[PlacedMedia]:
    return [item for item in prompt.media if item.modality is modality]


def _grids(prompt: Prompt, modality: Modality) -> Tensor | None:
    """[items, 3] int64, in prompt order."""
    grids = [item.geometry.grid_thw for item in _items(prompt, modality)]
    return torch.tensor(grids) if grids else None


def _seconds(prompt: Prompt) -> Tensor | None:
    """[videos] float32: seconds per temporal patch; 1 if the geometry does not say, as in transformers."""
    seconds = [clip.geometry.second_per_grid for clip in _items(prompt, Modality.VIDEO)]
    return torch.tensor([1.0 if s is None else s for s in seconds]) if seconds else None


def _prompt_positions(position_ids: Tensor) -> PromptPositions:
    """position_ids [3, T]. `generate` continues counting from the last prompt token, not from transformers'
    own rope delta. The two differ if a clip's time axis runs ahead of the text after it (Qwen2.5-VL)."""
    following = {float(p) + 1 for p in position_ids[:, -1]}
    if len(following) != 1:
        raise UnsupportedError("a prompt must end with text, not with a media item")
    delta = following.pop() - position_ids.shape[-1]
    if delta != int(delta):
        raise UnsupportedError(
            f"this clip's frame rate gives fractional positions after it (offset {delta}); use another rate"
        )
    return PromptPositions(position_ids, int(delta))


RULES: Mapping[PositionForm, PositionRule] = {
    PositionForm.ONE_DIMENSIONAL: PositionRule(1, _one_dimensional),
    PositionForm.QWEN_VL: PositionRule(3, _qwen_vl),
    PositionForm.HUNYUAN_VL: PositionRule(1, _hunyuan_vl),
    PositionForm.QWEN_OMNI: PositionRule(3, _qwen_omni),
}
