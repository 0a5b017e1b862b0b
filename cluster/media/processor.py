"""The model's own preprocessing (transformers), and its arithmetic without the pixels.

`geometry` is the door's half: exact placeholder counts from a probe. `prepare` is the encoder's half: the tensors that
`get_image_features`, `get_video_features` and `get_audio_features` take, for one item. Both read the same
`_VisionSizes`, so they agree; `tests/unit/media` checks them against the full processor.

`mm_processor_kwargs.json` in the model folder holds call-time arguments; some processors (Qwen2.5-Omni's) ignore parts
of their own saved configuration without them.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cluster.errors import ConfigError, MediaError, UnsupportedError
from cluster.media.decode import DecodedMedia
from cluster.media.settings import MediaLimits, MediaSettings, VideoSampling, naming
from cluster.types.media import MediaGeometry, MediaProbe, Modality

if TYPE_CHECKING:
    import torch

VISION = (Modality.IMAGE, Modality.VIDEO)
FAMILIES: dict[str, tuple[Modality, ...]] = {
    "qwen2_vl": VISION,
    "qwen2_5_vl": VISION,
    "qwen2_5_omni_thinker": (*VISION, Modality.AUDIO),
}
DEFAULT_LIMITS = MediaLimits()
OMNI_DEFAULT_FPS = (
    2.0  # what Qwen2_5OmniProcessor assumes about a video's rate unless `fps` is in its call arguments
)


class _VisionSizes(msgspec.Struct, frozen=True):
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    max_total_pixels: int | None = None  # video: shared by all frames (`cap_pixels_per_frame`)

    def grid(self, num_frames: int, height: int, width: int) -> tuple[int, int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        max_pixels = self.max_pixels
        if self.max_total_pixels is not None:
            share = self.max_total_pixels * self.temporal_patch_size // num_frames
            max_pixels = max(min(max_pixels, share), int(self.min_pixels * 1.05))
        try:
            resized_height, resized_width = smart_resize(
                height, width, self.patch_size * self.merge_size, self.min_pixels, max_pixels
            )
        except ValueError as error:
            raise MediaError(
                f"{width}x{height} pixels: the sides may differ by a factor of 200 at most"
            ) from error
        grid_t = -(-num_frames // self.temporal_patch_size)
        return grid_t, resized_height // self.patch_size, resized_width // self.patch_size


class MediaProcessor:
    """One model's preprocessing. Thread safe after loading."""

    def __init__(
        self, processor: Any, family: str, call_kwargs: dict[str, Any], limits: MediaLimits, fingerprint: str
    ):
        merged = processor._merge_kwargs(**call_kwargs)
        self.modalities = FAMILIES[family]
        self.fingerprint = fingerprint
        self._processor = processor
        self._family = family
        self._images_kwargs, self._videos_kwargs = merged["images_kwargs"], merged["videos_kwargs"]
        self._image_sizes = _vision_sizes(processor.image_processor, self._images_kwargs)
        self._video_sizes = _vision_sizes(processor.video_processor, self._videos_kwargs)
        self._extractor: Any = processor.feature_extractor if Modality.AUDIO in self.modalities else None
        self.settings = self._make_settings(limits)

    @classmethod
    def load(cls, path: str | Path, limits: MediaLimits = DEFAULT_LIMITS) -> MediaProcessor | None:
        """None for a text-only model. Raises ConfigError for a model family this class does not know. Takes seconds."""
        folder = Path(path)
        try:
            config = json.loads((folder / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable config.json in {path}: {error}") from error
        family = config.get("model_type")
        if family not in FAMILIES:
            if any(key.endswith(("vision_config", "audio_config", "thinker_config")) for key in config):
                raise ConfigError(f"model type {family!r} is not supported; supported: {', '.join(FAMILIES)}")
            return None
        from cluster.media.torchvision_compat import ensure_torchvision

        ensure_torchvision()
        from transformers import AutoProcessor

        call_kwargs_file = folder / "mm_processor_kwargs.json"
        call_kwargs = json.loads(call_kwargs_file.read_text()) if call_kwargs_file.is_file() else {}
        try:
            processor = AutoProcessor.from_pretrained(str(path))
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"no usable processor in {path}: {error}") from error
        settings = msgspec.json.encode(
            [processor.to_dict(), call_kwargs], enc_hook=str, order="deterministic"
        )
        return cls(processor, family, call_kwargs, limits, hashlib.sha256(settings).hexdigest()[:16])

    def geometry(self, probe: MediaProbe, *, item_idx: int = 0) -> MediaGeometry:
        """Exactly what the processor would make of such an item. No decoding. Raises MediaError, UnsupportedError."""
        self._check_modality(probe.modality)
        with naming(probe.modality, item_idx):
            match probe.modality:
                case Modality.IMAGE:
                    grid = self._image_sizes.grid(1, probe.height, probe.width)
                    # an image is repeated to fill one temporal patch
                    return MediaGeometry(math.prod(grid) // self._image_sizes.merge_size**2, grid_thw=grid)
                case Modality.VIDEO:
                    grid = self._video_sizes.grid(probe.num_frames, probe.height, probe.width)
                    num_tokens = math.prod(grid) // self._video_sizes.merge_size**2
                    return MediaGeometry(num_tokens, grid, self._second_per_grid(probe.fps))
                case Modality.AUDIO:
                    return self._audio_geometry(probe.num_samples)

    def prepare(
        self, modality: Modality, decoded: DecodedMedia, *, item_idx: int | None = 0
    ) -> dict[str, torch.Tensor]:
        """Model inputs of one item, as the processor gives them for a batch of one. Raises MediaError."""
        self._check_modality(modality)
        with naming(modality, item_idx):
            match modality:
                case Modality.IMAGE:
                    return self._prepare_image(decoded)
                case Modality.VIDEO:
                    return self._prepare_video(decoded)
                case Modality.AUDIO:
                    return self._prepare_audio(decoded)

    def _prepare_image(self, decoded: DecodedMedia) -> dict[str, torch.Tensor]:
        # "channels_last": transformers would guess, and guess wrong for an image three pixels high
        kwargs = {**self._images_kwargs, "return_tensors": "pt", "input_data_format": "channels_last"}
        return dict(self._processor.image_processor(images=[decoded.array], **kwargs))

    def _prepare_video(self, decoded: DecodedMedia) -> dict[str, torch.Tensor]:
        import torch

        kwargs = {**self._videos_kwargs, "return_tensors": "pt", "input_data_format": "channels_last"}
        kwargs |= {"do_sample_frames": False, "return_metadata": False}
        inputs = dict(self._processor.video_processor(videos=[decoded.array], **kwargs))
        seconds = self._second_per_grid(decoded.fps)
        if seconds is not None:
            inputs["video_second_per_grid"] = torch.tensor([seconds])
        return inputs

    def _prepare_audio(self, decoded: DecodedMedia) -> dict[str, torch.Tensor]:
        self._audio_geometry(len(decoded.array))
        inputs = dict(
            self._extractor(
                decoded.array,
                sampling_rate=self.settings.sampling_rate,
                padding="max_length",
                return_attention_mask=True,
                return_tensors="pt",
            )
        )
        inputs["feature_attention_mask"] = inputs.pop("attention_mask")
        return inputs

    def _audio_geometry(self, num_samples: int) -> MediaGeometry:
        if num_samples > self._extractor.n_samples:
            raise MediaError(f"longer than {self._extractor.chunk_length} seconds, the most this model takes")
        num_frames = -(-num_samples // self._extractor.hop_length)
        num_tokens = ((num_frames - 1) // 2 + 1 - 2) // 2 + 1  # two strided convolutions
        if num_tokens < 1:
            raise MediaError("too short to be heard by this model")
        return MediaGeometry(num_tokens, num_mel_frames=num_frames)

    def _second_per_grid(self, fps: float) -> float | None:
        """Qwen2.5-VL: from the frames' own rate. Omni: transformers does not look at the clip, so neither do we."""
        if self._family == "qwen2_vl":
            return None
        if self._family == "qwen2_5_omni_thinker":
            fps = self._videos_kwargs.get("fps") or OMNI_DEFAULT_FPS
        return self._video_sizes.temporal_patch_size / fps

    def _make_settings(self, limits: MediaLimits) -> MediaSettings:
        video, kwargs = self._processor.video_processor, self._videos_kwargs
        sampling = VideoSampling(
            fps=float(kwargs.get("fps") or video.fps or OMNI_DEFAULT_FPS),
            min_frames=int(kwargs.get("min_frames") or video.min_frames),
            max_frames=int(kwargs.get("max_frames") or video.max_frames),
            multiple=self._video_sizes.temporal_patch_size,
        )
        if self._extractor is None:
            return MediaSettings(limits, sampling)
        return MediaSettings(limits, sampling, self._extractor.sampling_rate, self._extractor.n_samples)

    def _check_modality(self, modality: Modality) -> None:
        if modality not in self.modalities:
            raise UnsupportedError(f"this model takes no {modality} input", param="messages")


def _vision_sizes(processor: Any, kwargs: dict[str, Any]) -> _VisionSizes:
    def value(name: str) -> Any:
        given = kwargs.get(name)
        return getattr(processor, name, None) if given is None else given

    if not value("do_resize"):
        raise ConfigError("processors with do_resize off are not supported")
    size = value("size")
    factor = value("patch_size") * value("merge_size")
    total = int(processor.max_video_tokens * factor * factor * 0.9) if value("cap_pixels_per_frame") else None
    return _VisionSizes(
        value("patch_size"),
        value("merge_size"),
        value("temporal_patch_size"),
        size["shortest_edge"],
        size["longest_edge"],
        total,
    )
