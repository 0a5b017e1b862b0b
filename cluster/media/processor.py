"""The model's own preprocessing (transformers), with and without the pixels.

* `layout`, for the door: the text and the number of embedding rows of an item. The processor itself is asked
  about an item of that size without content (`shapes`).
* `begin` and `finish`, for the encoder: the tensors of one item that `get_image_features`,
  `get_video_features` and `get_audio_features` take. The two may run in different places (`normalising`).

Both make the same calls (`calls`), so they agree. `mm_processor_kwargs.json` in the model folder holds
call-time arguments; without them some processors (Qwen2.5-Omni's) ignore parts of their own saved
configuration.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from cluster.config.checkpoint import check_family, placeholder_ids, read_config, read_json, takes_media
from cluster.config.families import EncoderForm, ModelFamily, family_of_type
from cluster.errors import ConfigError, MediaError, UnsupportedError
from cluster.media.calls import NOTHING, ProcessorCalls, make_layout, setting_of
from cluster.media.normalising import (
    WITHOUT,
    Normalisation,
    find_normalisation,
    trial_clips,
    trial_images,
)
from cluster.media.settings import DEFAULT_OPTIONS, MediaLimits, MediaSettings, VideoSampling, naming
from cluster.media.shapes import blank_audio, blank_image, blank_video, shapes_only
from cluster.types.media import MediaLayout, MediaOptions, MediaProbe, Modality

if TYPE_CHECKING:
    import torch

DEFAULT_LIMITS = MediaLimits()
FRAMES_AS_IMAGES = (EncoderForm.TILED_IMAGES, EncoderForm.MASKED_TILES)  # to the model a clip is T images
NUM_CACHED_LAYOUTS = 4096  # a few KB each for the timestamps of a long clip
FALLBACK_FPS = 2.0  # for processors without a rate
# for processors without a rate and a number of frames; LLaVA-OneVision was trained with it
FALLBACK_NUM_FRAMES = 32
TRIAL_ITEMS = {
    Modality.IMAGE: MediaProbe(Modality.IMAGE, 64, 64),
    Modality.VIDEO: MediaProbe(Modality.VIDEO, 64, 64, num_frames=4, fps=2.0),
    Modality.AUDIO: MediaProbe(Modality.AUDIO, num_samples=16_000),
}


class MediaProcessor:
    """One model's preprocessing. Thread safe after loading."""

    def __init__(
        self,
        processor: Any,
        config: dict[str, Any],
        call_kwargs: dict[str, Any],
        limits: MediaLimits,
        fingerprint: str,
    ):
        self.transformers_processor = processor  # its tokenizer and chat template make the prompts
        self.fingerprint = fingerprint
        self._family = family = family_of_type(config["model_type"])
        self.row_tokens = _row_tokens(processor, config, family)
        self.modalities = tuple(self.row_tokens)
        self._calls = ProcessorCalls(processor, family, call_kwargs)
        self._shape_calls = ProcessorCalls(shapes_only(processor), family, call_kwargs)
        self.settings = self._make_settings(limits)
        self._cached_layout = functools.lru_cache(NUM_CACHED_LAYOUTS)(self._layout)

    @classmethod
    def load(cls, path: str | Path, limits: MediaLimits = DEFAULT_LIMITS) -> MediaProcessor | None:
        """None for a text-only model. Raises ConfigError for a model whose processor cannot be used in this
        way. Takes seconds."""
        folder = Path(path)
        config = read_config(folder)
        check_family(config)
        if not takes_media(config):
            return None
        from cluster.media.torchvision_compat import ensure_torchvision

        ensure_torchvision()
        from transformers import AutoProcessor

        call_kwargs_file = folder / "mm_processor_kwargs.json"
        call_kwargs = read_json(call_kwargs_file) if call_kwargs_file.is_file() else {}
        try:
            processor = AutoProcessor.from_pretrained(str(path), mistral_format=False)
        except (OSError, ValueError, ImportError) as error:
            raise ConfigError(f"no usable processor in {path}: {error}") from error
        if config["model_type"] == "voxtral":
            from cluster.media.voxtral import VoxtralMediaProcessor

            processor = VoxtralMediaProcessor.of(processor, folder)
        elif config["model_type"] == "nemotron_h_omni":
            from cluster.media.nemotron import NemotronMediaProcessor

            processor = NemotronMediaProcessor.of(processor)
        settings = json.dumps([processor.to_dict(), call_kwargs], sort_keys=True, default=str)
        fingerprint = hashlib.sha256(settings.encode()).hexdigest()[:16]
        loaded = cls(processor, config, call_kwargs, limits, fingerprint)
        loaded._try_out()
        return loaded

    def layout(
        self,
        probe: MediaProbe,
        options: MediaOptions = DEFAULT_OPTIONS,
        sound: MediaProbe | None = None,
        *,
        item_idx: int = 0,
    ) -> MediaLayout:
        """Exactly what the processor would make of such an item. `sound`: the sound track of a clip that is
        heard. Decodes nothing. Takes milliseconds, or microseconds for a repeated question. Raises
        MediaError, UnsupportedError."""
        self._check_modality(probe.modality)
        with naming(probe.modality, item_idx):
            return self._cached_layout(probe, options, sound)

    @property
    def bounds_whole_clips(self) -> bool:
        """Whether the pixel bounds hold for all frames of a clip together: fewer frames may then be
        larger."""
        return self._family.bounds_whole_clips

    def patch_side(self, modality: Modality) -> int:
        """Side of a patch in pixels. A geometry with a grid counts patches."""
        processor = self.transformers_processor
        part = processor.video_processor if modality is Modality.VIDEO else processor.image_processor
        return part.patch_size

    def warm_up(self) -> None:
        """Does what the first item would have to wait for."""
        _ = self._normalisations

    def begin(
        self,
        modality: Modality,
        array: np.ndarray,
        options: MediaOptions = DEFAULT_OPTIONS,
    ) -> dict[str, torch.Tensor]:
        """Model inputs of one item from the array that `decoders` give, for a batch of one, up to `finish`:
        pixels are bytes where they can be. Pooling follows the encoder and changes nothing here. Raises
        MediaError, UnsupportedError."""
        self._check_modality(modality)
        options = msgspec.structs.replace(options, temporal_pooling=1, spatial_pooling=1)
        more = NOTHING if self._normalisations.get(modality) is None else WITHOUT
        with naming(modality, None):
            return self._model_inputs(modality, self._process(modality, array, options, more))

    def finish(self, modality: Modality, begun: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of `begin`, on any device, as the processor gives them."""
        normalisation = self._normalisations.get(modality)
        return dict(begun) if normalisation is None else normalisation.finish(begun)

    def _layout(self, probe: MediaProbe, options: MediaOptions, sound: MediaProbe | None) -> MediaLayout:
        calls = self._shape_calls
        try:
            match probe.modality:
                case Modality.IMAGE:
                    processed = calls.image(blank_image(probe), options)
                case Modality.VIDEO:
                    heard = None if sound is None else self._blank_audio(sound)
                    processed = calls.video(blank_video(probe), probe, options, heard)
                case Modality.AUDIO:
                    processed = calls.audio(self._blank_audio(probe), options)
        except ValueError as error:  # raised by processors for sizes that they do not take
            raise MediaError(f"this model's processor refuses it: {error}") from error
        return make_layout(processed, probe.modality, self.row_tokens)

    def _blank_audio(self, probe: MediaProbe) -> np.ndarray:
        most = self.settings.max_audio_samples
        if most is not None and probe.num_samples > most:
            seconds = most / self.settings.sampling_rate
            raise MediaError(f"longer than {seconds:g} seconds, the most this model takes")
        return blank_audio(probe)

    @functools.cached_property
    def _normalisations(self) -> Mapping[Modality, Normalisation | None]:
        """What `begin` leaves to `finish`."""
        calls, processor = self._calls, self.transformers_processor
        parts = {
            Modality.IMAGE: (lambda: processor.image_processor, calls.kwargs["images_kwargs"], trial_images),
            Modality.VIDEO: (lambda: processor.video_processor, calls.kwargs["videos_kwargs"], trial_clips),
        }

        def find(modality: Modality) -> Normalisation | None:
            def prepare(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
                more = WITHOUT if is_bare else NOTHING
                return self._model_inputs(modality, self._process(modality, array, DEFAULT_OPTIONS, more))

            part, kwargs, arrays = parts[modality]
            return find_normalisation(part(), kwargs, prepare, arrays())

        return {modality: find(modality) for modality in parts if modality in self.modalities}

    def _process(
        self, modality: Modality, array: np.ndarray, options: MediaOptions, more: Mapping[str, Any]
    ) -> dict[str, Any]:
        import torch

        if modality is Modality.AUDIO:
            return self._calls.audio(array, options).inputs
        pixels = torch.from_numpy(array if array.flags.writeable else array.copy()).movedim(-1, -3)
        if modality is Modality.IMAGE:
            return self._calls.image(pixels, options, more).inputs
        num_frames, _, height, width = pixels.shape
        probe = MediaProbe(modality, width, height, num_frames=num_frames, fps=FALLBACK_FPS)
        return self._calls.video(pixels, probe, options, more=more).inputs

    def _model_inputs(self, modality: Modality, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        import torch

        unused = self.transformers_processor.unused_input_names
        tensors = {
            key: value
            for key, value in inputs.items()
            if isinstance(value, torch.Tensor) and key not in unused
        }
        if modality is Modality.VIDEO and self._family.encoders[modality] in FRAMES_AS_IMAGES:
            frames = tensors.pop("pixel_values_videos", None)
            if frames is not None:
                tensors["pixel_values"] = frames.flatten(0, 1)  # [1, T, 3, h, w]
        return tensors

    def _make_settings(self, limits: MediaLimits) -> MediaSettings:
        processor = self.transformers_processor
        video = VideoSampling()
        if Modality.VIDEO in self.modalities:
            video = _sampling(processor.video_processor, self._calls.kwargs["videos_kwargs"])
        if Modality.AUDIO not in self.modalities:
            return MediaSettings(limits, video)
        extractor = processor.feature_extractor
        cuts = self._family.cuts_sounds
        most = None if cuts else _max_samples(processor, self._calls.kwargs["audio_kwargs"])
        return MediaSettings(limits, video, extractor.sampling_rate, most)

    def _check_modality(self, modality: Modality) -> None:
        if modality not in self.modalities:
            raise UnsupportedError(f"this model takes no {modality} input")

    def _try_out(self) -> None:
        """Raises ConfigError if the processor cannot be asked about an item without content."""
        if not self.modalities:
            raise ConfigError(
                f"model type {self._family.model_type!r} is not supported: its processor names no "
                "placeholder token"
            )
        for modality in self.modalities:
            try:
                self.layout(TRIAL_ITEMS[modality])
            except Exception as error:
                reason = f"its processor cannot lay out an item of type {modality}: {error!r}"
                raise ConfigError(
                    f"model type {self._family.model_type!r} is not supported: {reason}"
                ) from error


def _row_tokens(processor: Any, config: Mapping[str, Any], family: ModelFamily) -> dict[Modality, str]:
    """For each modality that the processor takes: the token that it writes once for each embedding row. A
    model without a video token writes the image's for clips, too."""
    parts = {
        Modality.IMAGE: "image_processor",
        Modality.VIDEO: "video_processor",
        Modality.AUDIO: "feature_extractor",
    }
    ids = placeholder_ids(config)
    tokens: dict[Modality, str] = {}
    for modality in family.encoders_of(config):
        part = parts[modality]
        if getattr(processor, part, None) is None or getattr(processor, f"{modality}_token", None) is None:
            continue
        has_token = modality in ids and not (
            modality is Modality.VIDEO and family.clips_are_written_as_images
        )
        if has_token:
            tokens[modality] = processor.tokenizer.convert_ids_to_tokens(ids[modality])
        elif modality is Modality.VIDEO and Modality.IMAGE in tokens:
            tokens[modality] = tokens[Modality.IMAGE]
    return tokens


def _sampling(part: Any, kwargs: Mapping[str, Any]) -> VideoSampling:
    value = functools.partial(setting_of, part, kwargs)
    fps, num_frames = value("fps"), value("num_frames")
    max_frames = value("max_frames") or num_frames or FALLBACK_NUM_FRAMES
    min_frames = value("min_frames") or (1 if fps else max_frames)
    return VideoSampling(
        fps=float(fps or FALLBACK_FPS),
        min_frames=int(min_frames),
        max_frames=int(max_frames),
        multiple=int(value("temporal_patch_size") or 1),
    )


def _max_samples(processor: Any, audio_kwargs: Mapping[str, Any]) -> int | None:
    """Samples of the longest sound that the processor takes without truncating it; None: it takes any."""
    extractor = processor.feature_extractor
    seconds = getattr(processor, "max_audio_len", None)
    if seconds is not None:  # the processor makes the windows itself
        window = int(extractor.sampling_rate * extractor.chunk_length)
        return window * int(seconds // extractor.chunk_length)
    truncates = inspect.signature(extractor.__call__).parameters["truncation"].default
    if not audio_kwargs.get("truncation", truncates):
        return None
    if (samples := getattr(extractor, "n_samples", None)) is not None:
        return samples
    longest = inspect.signature(extractor.__call__).parameters["max_length"].default
    return audio_kwargs.get("max_length", longest)
