"""The model's own transformers processor, run on inputs without pixels and sound, to learn only sizes.

Image and video processors run on meta tensors, which have a shape and no memory. Their metadata (grids, tile
counts, sizes) are real numbers. Feature extractors get silence and skip the spectrum, because its number of
frames depends only on the padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL.Image import Resampling

if TYPE_CHECKING:
    import torch

    from cluster.types.media import MediaProbe


def shapes_only(processor: Any) -> Any:
    """A copy of a transformers processor for blank inputs; the tokenizer is shared."""
    blank = copy.copy(processor)
    for name in ("image_processor", "video_processor"):
        if getattr(processor, name, None) is not None:
            setattr(blank, name, _Shapes(getattr(processor, name)))
    extractor = getattr(processor, "feature_extractor", None)
    if extractor is not None:
        blank.feature_extractor = _silent(extractor)
    return blank


def blank_image(probe: MediaProbe) -> torch.Tensor:
    """[3, height, width] uint8, meta."""
    import torch

    return torch.empty(3, probe.height, probe.width, dtype=torch.uint8, device="meta")


def blank_video(probe: MediaProbe) -> torch.Tensor:
    """[frames, 3, height, width] uint8, meta."""
    import torch

    shape = (probe.num_frames, 3, probe.height, probe.width)
    return torch.empty(shape, dtype=torch.uint8, device="meta")


def blank_audio(probe: MediaProbe) -> np.ndarray:
    """[samples] float32."""
    return np.zeros(probe.num_samples, np.float32)


class _Shapes:
    """An image or video processor that replaces its meta outputs by zeros. Processors read the shapes of the
    outputs, and some of them through numpy."""

    def __init__(self, processor: Any):
        """A bicubic resize clamps its values, which meta tensors do not have: more than half of the time of a
        layout. Any other resize gives the same shapes."""
        import torch

        self._processor = copy.copy(processor)
        if getattr(processor, "resample", None) is not None:
            self._processor.resample = Resampling.BILINEAR
        for name in ("norm_mean", "norm_std"):  # NemotronH Omni's: tensors of these meet the pixels
            if (value := getattr(processor, name, None)) is not None:
                setattr(self._processor, name, torch.empty(len(value), device="meta"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with _numbers_are_real():
            outputs = self._processor(*args, **kwargs)
        for key, value in outputs.items():
            if getattr(value, "is_meta", False):
                outputs[key] = _zeros(value.shape)
        return outputs


def _numbers_are_real() -> AbstractContextManager[object]:
    """Inside, `torch.tensor` makes no meta tensors: Llama 4's processor computes with sizes on the device of
    the pixels."""
    import torch
    from torch.overrides import TorchFunctionMode

    class RealNumbers(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if func is torch.tensor and isinstance(args[0], torch.Tensor):  # which warns
                return args[0]
            if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "meta":
                kwargs = {**kwargs, "device": None}
            return func(*args, **kwargs)

    return RealNumbers()


def _zeros(shape: Sequence[int]) -> torch.Tensor:
    """A view of a single zero, so it needs no memory."""
    import torch

    return torch.zeros(()).expand(*shape)


class _NoFrames:
    """Parakeet's feature extractor, for processors that count the rows of a sound by its samples."""

    def __init__(self, extractor: Any):
        self._extractor = extractor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extractor, name)

    def __call__(self, waveforms: Sequence[np.ndarray], **_: Any) -> Any:
        import torch
        from transformers import BatchFeature

        frames = torch.zeros(len(waveforms), 0, self._extractor.feature_size)
        return BatchFeature({"input_features": frames, "attention_mask": torch.zeros(len(waveforms), 0)})


def _silent(extractor: Any) -> Any:
    """A copy of a feature extractor of Whisper's or Parakeet's kind that computes no spectrum. Others are
    returned unchanged, because it is not known whether they work without."""
    import transformers as hf

    known = (
        hf.WhisperFeatureExtractor,
        hf.Qwen3ASRFeatureExtractor,
        hf.MossTranscribeDiarizeFeatureExtractor,
    )
    if isinstance(extractor, hf.ParakeetFeatureExtractor):
        return _NoFrames(extractor)
    if not isinstance(extractor, known):
        return extractor
    silent = copy.copy(extractor)

    def no_frames(waveforms: np.ndarray, *_: Any) -> np.ndarray:
        return np.zeros((len(waveforms), extractor.feature_size, 0), np.float32)

    setattr(silent, "_torch_extract_fbank_features", no_frames)  # noqa: B010 - not declared
    return silent
