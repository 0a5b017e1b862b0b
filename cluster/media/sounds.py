"""A sound, or the sound track of a video: one mono waveform at the model's rate.

No header gives the exact number of samples after resampling. The door therefore decodes as well, without
keeping the samples.
"""

from __future__ import annotations

from collections.abc import Iterator

import av
import numpy as np

from cluster.errors import MediaError, NoSoundError
from cluster.media.container import DecodeBudget, first_stream, open_container
from cluster.media.settings import MediaSettings

# Hz; outside this range resampling makes huge outputs from small files, or is too slow
SAMPLE_RATES = range(2_000, 768_001)

# Otherwise FFmpeg makes two equal channels 3 dB louder; other libraries take the mean.
MONO_IS_THE_MEAN = {"rematrix_maxval": "1.0"}
# Codecs give 1,024 and fewer: an array for each and its check would cost more than the samples.
PIECE_SAMPLES = 1 << 14


def sound_pieces(data: bytes, settings: MediaSettings, budget: DecodeBudget) -> Iterator[np.ndarray]:
    """Consecutive pieces of the waveform, at least one: [num_samples] float32 of the first audio stream,
    mixed to mono and resampled by FFmpeg. Raises MediaError if it is too long or not finite."""
    num_samples, cap = 0, settings.audio_cap()
    for frame in _resampled(data, settings.sampling_rate, budget):
        piece = frame.to_ndarray().reshape(-1)
        num_samples += len(piece)
        if num_samples > cap:
            raise MediaError(
                f"longer than {cap / settings.sampling_rate:g} seconds, the most this server takes"
            )
        if not np.isfinite(piece).all():
            raise MediaError("it has samples that are not finite numbers")
        yield piece
    if not num_samples:
        raise NoSoundError("no audio samples")


def _resampled(data: bytes, sampling_rate: int, budget: DecodeBudget) -> Iterator[av.AudioFrame]:
    resampler = av.AudioResampler(
        format="flt", layout="mono", rate=sampling_rate, frame_size=PIECE_SAMPLES, options=MONO_IS_THE_MEAN
    )
    with open_container(data, budget) as container:
        stream = first_stream(container, "audio", budget)
        for packet in container.demux(stream):
            budget.take_packet()
            for frame in packet.decode():
                if frame.sample_rate not in SAMPLE_RATES:
                    raise MediaError(f"a sampling rate of {frame.sample_rate} Hz is not accepted")
                frame.pts = None  # otherwise the resampler would fill gaps in the times with silence
                yield from resampler.resample(frame)
        yield from resampler.resample(None)
