"""An encoder's way to decode a file: in a process of its own (`processes`). A codec library that crashes
there, takes too much memory or does not return costs the item that it decodes.

Pixels and samples come in shared memory; their size and shape are checked. Any thread.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np

from cluster.media.opener import DecodeOrder, Written
from cluster.media.openers import opener_pool
from cluster.media.processes import ProcessPool
from cluster.media.program import result_bytes
from cluster.media.settings import MediaSettings
from cluster.types.media import MediaOptions, Modality


class Decoders:
    def __init__(self, num_openers: int, pool: ProcessPool[Written] | None = None):
        """Starts them without waiting."""
        self._pool = pool or opener_pool()
        self._pool.warm_up(num_openers)

    def decode(
        self,
        modality: Modality,
        data: bytes,
        settings: MediaSettings,
        options: MediaOptions,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> np.ndarray:
        """Image: [H, W, 3] uint8. Video: [T, H, W, 3] uint8, the frames that its probe names. Audio:
        [num_samples] float32. The array is private to the caller. Blocks no longer than the item `is_wanted`.
        Raises MediaError, NotWantedError and UnavailableError."""
        order = DecodeOrder(modality, options, settings, timeout_s=settings.limits.max_decode_s)
        read = functools.partial(read_array, modality, settings)
        return self._pool.ask_blocking(order, data, is_wanted, read)

    def close(self) -> None:
        """Running calls fail."""
        self._pool.close()


def read_array(modality: Modality, settings: MediaSettings, answer: Written, result: int) -> np.ndarray:
    """The array in the file `result`. Raises ValueError if it is not one that `modality` and `settings`
    allow."""
    shape, limits, dtype = (
        answer.shape,
        settings.limits,
        np.dtype(np.float32 if modality is Modality.AUDIO else np.uint8),
    )
    match modality, shape:
        case (Modality.IMAGE, (height, width, 3)):
            is_allowed = height * width <= limits.max_pixels
        case (Modality.VIDEO, (num_frames, height, width, 3)):
            is_allowed = num_frames * height * width <= limits.max_video_pixels
        case (Modality.AUDIO, (num_samples,)):
            is_allowed = num_samples <= settings.audio_cap()
        case _:
            is_allowed = False
    num_bytes = math.prod(shape) * dtype.itemsize
    if not is_allowed or min(shape) < 1:
        raise ValueError(f"an array of shape {shape} is not accepted")
    array = result_bytes(result, num_bytes).view(dtype).reshape(shape)
    if modality is Modality.AUDIO and not np.isfinite(array).all():
        raise ValueError("samples that are not finite numbers")
    return array
