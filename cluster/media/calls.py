"""The calls to a transformers processor for one item: inputs of the encoder and the text that stands for the
item; and the item's layout in a prompt, made from these.

The processor is the real one, which gets pixels and waveforms, or its `shapes_only` copy, which gets blanks.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.config.families import ModelFamily
from cluster.errors import MediaError, UnsupportedError
from cluster.types.media import MediaGeometry, MediaLayout, MediaOptions, MediaProbe, Modality

if TYPE_CHECKING:
    import torch

NOTHING: Mapping[str, Any] = {}
AREA_KEYS = ("shortest_edge", "longest_edge")  # of a processor that bounds the number of pixels

# The layout is stated, because the processors' guess is wrong for an image three pixels high.
_TENSORS = {"return_tensors": "pt", "input_data_format": "channels_first"}


@dataclass(frozen=True)
class Processed:
    """`inputs`: by the processor's names, for a batch of one. `text`: replaces the item in the prompt."""

    inputs: dict[str, Any]
    text: str
    sound_inputs: Mapping[str, Any] | None = None  # of a clip that is heard


class ProcessorCalls:
    """Thread safe. All calls raise MediaError or UnsupportedError if the client can fix it, and whatever the
    processor raises."""

    def __init__(self, processor: Any, family: ModelFamily, call_kwargs: Mapping[str, Any]):
        """call_kwargs: call-time arguments from the model folder."""
        self._processor = processor
        self._family = family
        self.kwargs = processor._merge_kwargs(
            tokenizer_init_kwargs=processor.tokenizer.init_kwargs, **call_kwargs
        )
        # what a processor must be given beside the arguments of its image processor (LFM2-VL)
        takes = inspect.signature(processor._process_images).parameters.values()
        must = [
            each.name
            for each in takes
            if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
        ]
        self._beside = {name: self.kwargs[name] for name in must if name in self.kwargs}

    def image(
        self, pixels: torch.Tensor, options: MediaOptions, more: Mapping[str, Any] = NOTHING
    ) -> Processed:
        """pixels: [3, height, width] uint8. `more`: arguments for the image processor."""
        processor = self._processor
        kwargs = {**self.kwargs["images_kwargs"], **_TENSORS, **more}
        kwargs |= _area(processor.image_processor, kwargs, options, unit=self._family.frames_of_an_image)
        text = [processor.image_token]
        images = processor.prepare_inputs_layout(images=[pixels], text=text, **self.kwargs)[0]
        inputs, (text,) = processor._process_images(images, **{**self._beside, **kwargs})
        if self._is_pooled(options):
            inputs["image_grid_thw"] = self._pooled(
                inputs["image_grid_thw"], processor.image_processor, options
            )
            text = processor.replace_image_token(inputs, 0, **kwargs)
        return Processed(dict(inputs), text)

    def video(
        self,
        frames: torch.Tensor,
        probe: MediaProbe,
        options: MediaOptions,
        sound: np.ndarray | None = None,
        more: Mapping[str, Any] = NOTHING,
    ) -> Processed:
        """frames: [T, 3, height, width] uint8. sound: [samples] float32, if the clip is heard. `more`:
        arguments for the video processor."""
        processor = self._processor
        kwargs = {**self.kwargs["videos_kwargs"], **_TENSORS, **more}
        kwargs |= {"do_sample_frames": False, "return_metadata": True, "video_metadata": [_metadata(probe)]}
        share = probe.num_frames if self._family.bounds_whole_clips else 1
        kwargs |= _area(processor.video_processor, kwargs, options, share)
        heard = None
        # these processors compute times from the requested rate, not from the clip's own
        if self._family.hears_clips:
            kwargs |= {} if options.fps is None else {"fps": options.fps}
            kwargs = {**self.kwargs, "videos_kwargs": kwargs}
            if sound is not None:
                heard = self.audio(sound, MediaOptions()).inputs
                kwargs |= {
                    "load_audio_from_video": True,
                    "processed_audio": heard,
                    "video_to_audio_indices": [0],
                }
        elif options.audio_in_video:
            raise UnsupportedError(
                "use_audio_in_video: this model does not take the sound of a clip",
                param="mm_processor_kwargs.use_audio_in_video",
            )
        inputs, (text,) = processor._process_videos([frames], **kwargs)
        if self._is_pooled(options):
            inputs["video_grid_thw"] = self._pooled(
                inputs["video_grid_thw"], processor.video_processor, options
            )
            for key in ("second_per_grid_ts", "video_second_per_grid"):
                if key in inputs:
                    inputs[key] = [seconds * options.temporal_pooling for seconds in inputs[key]]
            text = processor.replace_video_token(inputs, 0, **kwargs)
        return Processed(dict(inputs), text, heard)

    def audio(self, waveform: np.ndarray, options: MediaOptions) -> Processed:
        """waveform: [samples] float32."""
        if _has_vision_options(options):
            raise UnsupportedError(
                "min_pixels, max_pixels, temporal_pooling and spatial_pooling are for images and videos"
            )
        processor = self._processor
        kwargs = {**self.kwargs["audio_kwargs"], "return_tensors": "pt"}
        kwargs["sampling_rate"] = processor.feature_extractor.sampling_rate
        inputs, (text,) = processor._process_audio([waveform], **kwargs)
        return Processed(dict(inputs), text)

    def _is_pooled(self, options: MediaOptions) -> bool:
        if options.temporal_pooling == options.spatial_pooling == 1:
            return False
        if min(options.temporal_pooling, options.spatial_pooling) < 1:
            raise MediaError("temporal_pooling and spatial_pooling must be at least 1")
        if not self._family.can_pool:
            raise UnsupportedError(
                f"temporal_pooling and spatial_pooling are not supported for {self._family.model_type} "
                "models",
                param="mm_processor_kwargs",
            )
        return True

    def _pooled(self, grids: torch.Tensor, part: Any, options: MediaOptions) -> torch.Tensor:
        """[1, 3] patches before merging → the grid with which the processor writes as many tokens as there
        are pooled rows."""
        import torch

        time, height, width = grids[0].tolist()
        rows = (time, height // part.merge_size, width // part.merge_size)
        factors = (options.temporal_pooling, options.spatial_pooling, options.spatial_pooling)
        time, height, width = (-(-count // factor) for count, factor in zip(rows, factors, strict=True))
        return torch.tensor([[time, height * part.merge_size, width * part.merge_size]])


def _has_vision_options(options: MediaOptions) -> bool:
    pixels = (options.min_pixels, options.max_pixels)
    return pixels != (None, None) or options.temporal_pooling * options.spatial_pooling != 1


def _area(
    part: Any, kwargs: Mapping[str, Any], options: MediaOptions, share: int = 1, unit: int = 1
) -> dict[str, Any]:
    """Call arguments for `min_pixels` and `max_pixels`. share: number of images that are bounded together.
    unit: how often the processor counts each of their pixels.

    * If one of the model's own bounds contradicts the client's, the client's wins. However, nothing is
      enlarged beyond the model's own upper bound.
    * Only processors that bound the number of pixels take these arguments. If a model has fixed sizes,
      shrinking its input first would lose detail and save nothing."""
    if options.min_pixels is None and options.max_pixels is None:
        return {}
    size = kwargs.get("size") or part.size or {}
    if any(size.get(key) is None for key in AREA_KEYS):
        raise UnsupportedError(
            "min_pixels and max_pixels: this model uses fixed sizes", param="mm_processor_kwargs"
        )
    own_min, own_max = (size[key] // unit for key in AREA_KEYS)
    if options.min_pixels is not None and options.min_pixels > own_max:
        raise MediaError(
            f"min_pixels is {options.min_pixels}; nothing is enlarged beyond this model's own limit of "
            f"{own_max}",
            param="mm_processor_kwargs.min_pixels",
        )
    least = own_min if options.min_pixels is None else options.min_pixels * share
    most = own_max if options.max_pixels is None else options.max_pixels * share
    if options.min_pixels is None:
        least = min(least, most)
    elif options.max_pixels is None:
        most = max(least, most)
    if not 0 < least <= most:
        raise MediaError(
            f"min_pixels, {least // share}, must be above 0 and at most max_pixels, {most // share}"
        )
    return {"size": dict(zip(AREA_KEYS, (least * unit, most * unit), strict=True))}


def setting_of(part: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The value with which a part of a processor is called: the call's, or else its own."""
    given = kwargs.get(name)
    return getattr(part, name, None) if given is None else given


def _metadata(probe: MediaProbe) -> Any:
    from transformers.video_utils import VideoMetadata

    total = probe.num_source_frames or probe.num_frames
    fps = probe.source_fps or probe.fps
    return VideoMetadata(
        total_num_frames=total,
        fps=fps,
        width=probe.width,
        height=probe.height,
        duration=total / fps if fps else None,
        frames_indices=list(probe.frame_idx or range(probe.num_frames)),
    )


def make_layout(processed: Processed, modality: Modality, row_tokens: Mapping[Modality, str]) -> MediaLayout:
    """row_tokens: the token that the processor writes once for each embedding row. Raises MediaError for an
    item without rows."""
    inputs: list[tuple[Modality, Mapping[str, Any]]] = [(modality, processed.inputs)]
    if processed.sound_inputs is not None:
        inputs.append((Modality.AUDIO, processed.sound_inputs))
    text, runs = cut_runs(processed.text, [row_tokens[kind] for kind, _ in inputs])
    num_rows = [sum(length for part, length in runs if part == i) for i in range(len(inputs))]
    if 0 in num_rows:
        raise MediaError("too small or too short for this model: it has no embedding row")
    geometries = (_geometry(kind, given, rows) for (kind, given), rows in zip(inputs, num_rows, strict=True))
    parts = tuple(zip((kind for kind, _ in inputs), geometries, strict=True))
    return MediaLayout(text, tuple(runs), parts)


def cut_runs(text: str, tokens: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """The text with every run of one of the tokens shortened to one token, and (index of the token, length)
    of each run."""
    runs: list[tuple[int, int]] = []

    def cut(match: re.Match[str]) -> str:
        part = next(i for i, token in enumerate(tokens) if match.group().startswith(token))
        runs.append((part, len(match.group()) // len(tokens[part])))
        return tokens[part]

    pattern = "|".join(f"(?:{re.escape(token)})+" for token in tokens)
    return re.sub(pattern, cut, text), runs


def _geometry(modality: Modality, inputs: Mapping[str, Any], num_rows: int) -> MediaGeometry:
    """Only processors of models with multimodal positions return the fields that the positions need."""
    grid = inputs.get(f"{modality}_grid_thw")
    seconds = inputs.get("second_per_grid_ts", inputs.get("video_second_per_grid"))
    mask = inputs.get("feature_attention_mask")
    return MediaGeometry(
        num_rows,
        None if grid is None else tuple(grid[0].tolist()),
        None if seconds is None else float(seconds[0]),
        None if mask is None else int(mask.sum()),
    )
