"""Voxtral's processor without mistral-common, which transformers' own needs for every prompt.

* transformers reads the vocabulary (`tekken.json`, or a converted `tokenizer.json`).
* `voxtral.jinja` writes the prompts of mistral-common's tokenizer v7, if the model folder has no template.
* A sound is `[BEGIN_AUDIO]` and one `[AUDIO]` for each embedding row: as many as its windows have, silence at
  the end included.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from transformers import ProcessorMixin, VoxtralConfig, VoxtralEncoderConfig, VoxtralProcessor

_BEGIN_AUDIO = "[BEGIN_AUDIO]"
_CONV_STRIDE = 2  # frames of a spectrum for each output of the encoder


class VoxtralMediaProcessor(VoxtralProcessor):
    apply_chat_template = ProcessorMixin.apply_chat_template
    frames_per_row: int

    @classmethod
    def of(cls, loaded: VoxtralProcessor, folder: Path) -> VoxtralMediaProcessor:
        """`loaded`: transformers' own processor of the model folder."""
        config = VoxtralConfig.from_pretrained(folder)
        made = cls(loaded.feature_extractor, loaded.tokenizer)
        template = loaded.chat_template or loaded.tokenizer.chat_template
        made.chat_template = template or Path(__file__).with_suffix(".jinja").read_text()
        audio = cast(VoxtralEncoderConfig, config.audio_config)
        made.frames_per_row = _CONV_STRIDE * audio.intermediate_size // audio.hidden_size
        return made

    def _process_audio(
        self,
        audio: Sequence[np.ndarray],
        *,
        max_source_positions: int,
        pad_to_multiple_of: int,
        **kwargs: Any,
    ) -> tuple[dict[str, Any], list[str]]:
        """audio: one waveform, [samples]. max_source_positions: frames of a window."""
        (waveform,) = audio
        num_windows = -(-len(waveform) // pad_to_multiple_of)
        inputs = self.feature_extractor(waveform, pad_to_multiple_of=pad_to_multiple_of, **kwargs)
        spectrum = inputs["input_features"][0]  # [mels, frames], or no frames from a `shapes_only` copy
        windows = spectrum.reshape(len(spectrum), num_windows, -1).transpose(0, 1)
        num_rows = num_windows * (max_source_positions // self.frames_per_row)
        return {"input_features": windows}, [_BEGIN_AUDIO + self.audio_token * num_rows]
