"""Media files that are trusted: they are opened in this process, by the functions that openers run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from cluster.errors import ConfigError
from cluster.media.container import DecodeBudget
from cluster.media.decode import decoded_parts, survey
from cluster.media.processor import MediaProcessor
from cluster.media.settings import DEFAULT_OPTIONS, MediaSettings, naming
from cluster.media.survey import probe_of
from cluster.types.media import MediaOptions, MediaProbe, Modality


def media_processor(folder: Path) -> MediaProcessor:
    """The processor of a model. Raises ConfigError for one without media."""
    processor = MediaProcessor.load(folder)
    if processor is None:
        raise ConfigError(f"{folder} has no media encoder")
    return processor


def decode(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> np.ndarray:
    """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8, the frames that `probe` names. Audio: [num_samples]
    float32.

    Blocks while it decodes. Raises MediaError."""
    with naming(modality, item_idx):
        parts = list(decoded_parts(modality, data, settings, options, DecodeBudget(settings.limits)))
        match modality:
            case Modality.IMAGE:
                return parts[0]
            case Modality.VIDEO:
                return np.stack(parts)
            case Modality.AUDIO:
                return np.concatenate(parts)


def probe(
    modality: Modality,
    data: bytes,
    settings: MediaSettings,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> MediaProbe:
    """Raises MediaError, whose message names the item unless `item_idx` is None."""
    with naming(modality, item_idx):
        found = survey(modality, data, settings, options, DecodeBudget(settings.limits))
        return probe_of(modality, found, settings, options)


def prepare(
    processor: MediaProcessor,
    modality: Modality,
    array: np.ndarray,
    options: MediaOptions = DEFAULT_OPTIONS,
    *,
    item_idx: int | None = 0,
) -> dict[str, Tensor]:
    """Model inputs of one item, as the processor gives them for a batch of one."""
    with naming(modality, item_idx):
        return processor.finish(modality, processor.begin(modality, array, options))


class TrustedDecoders:
    """Decodes as `cluster.media.decoders.Decoders` does, without processes."""

    def decode(
        self,
        modality: Modality,
        data: bytes,
        settings: MediaSettings,
        options: MediaOptions,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> np.ndarray:
        return decode(modality, data, settings, options, item_idx=None)


def trusted_decoders() -> Any:
    return TrustedDecoders()
