"""NemotronH Omni's processor, one item in a call: transformers' own gives sounds in another form than other
processors, and tells its video processor how many frames are a tubelet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from transformers import NemotronH_Omni_Reasoning_V3Processor

from cluster.errors import ConfigError

_MIN_FRAMES = 2  # of a spectrum: with fewer, the feature extractor divides by zero


class NemotronMediaProcessor(NemotronH_Omni_Reasoning_V3Processor):
    @classmethod
    def of(cls, loaded: NemotronH_Omni_Reasoning_V3Processor) -> NemotronMediaProcessor:
        """`loaded`: transformers' own processor of the model folder. Raises ConfigError."""
        _check_images_alone(loaded.image_processor)
        made = cls.__new__(cls)
        made.__dict__.update(loaded.__dict__)
        return made

    def _process_videos(self, videos: Any, **kwargs: Any) -> Any:
        tubelet = {"temporal_patch_size": self.video_temporal_patch_dim}
        return super()._process_videos(videos, **{**tubelet, **kwargs})

    def _process_audio(self, audio: Sequence[np.ndarray], **kwargs: Any) -> tuple[dict[str, Any], list[str]]:
        """audio: one waveform, [samples]. Raises ValueError if it is too short."""
        (waveform,) = audio
        if (least := _MIN_FRAMES * self.feature_extractor.hop_length) > len(waveform):
            raise ValueError(f"{len(waveform)} samples of sound are fewer than {least}")
        features, mask, counts = super()._process_audio([waveform], kwargs)
        text = self.replace_audio_token({"num_tokens": counts}, 0)
        return {"input_features": features, "input_features_mask": mask}, [text]


def _check_images_alone(images: Any) -> None:
    """Raises ConfigError if an image gets more patches the more images a prompt has."""
    fits = (images.max_model_len - 4) * round(1 / images.downsample_ratio) ** 2
    if not 0 < images.max_num_patches <= fits:
        raise ConfigError(
            "model type 'nemotron_h_omni' is not supported with this processor: by its max_num_patches "
            f"({images.max_num_patches}) and max_model_len ({images.max_model_len}), the size of an image "
            "depends on how many there are"
        )
