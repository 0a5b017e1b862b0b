"""What the processors compute, as plain torch: fast enough to run inside the training loop.

`patchify` equals the image and video processors on input that needs no resizing; `log_mel` equals the Whisper
feature extractor without its padding to 10 s. Dimensions: N tubelet patches, F mel frames, B clips.
"""

from collections.abc import Sequence

import numpy as np
import torch

from deploy.demo_model.training.build import PATCHES, Processor

SAMPLES_PER_FRAME = 160
FOURIER_LENGTH = 400


class MediaFeatures:
    """The constants of one processor."""

    def __init__(self, processor: Processor) -> None:
        images = processor.image_processor
        self._mean = torch.tensor(images.image_mean).view(1, 3, 1, 1)
        self._std = torch.tensor(images.image_std).view(1, 3, 1, 1)
        filters = np.asarray(processor.feature_extractor.mel_filters)
        self._mel_filters = torch.tensor(filters, dtype=torch.float32).T.contiguous()
        self._window = torch.hann_window(FOURIER_LENGTH)

    def patchify(self, frames: np.ndarray) -> tuple[torch.Tensor, list[int]]:
        """[T, H, W, 3] uint8 -> ([N, 384] float32, grid [t, h, w] in patches); a single frame counts as
        two.
        """
        side, merge, depth = PATCHES["patch_size"], PATCHES["merge_size"], PATCHES["temporal_patch_size"]
        pixels = torch.from_numpy(np.array(frames)).permute(0, 3, 1, 2).float()
        pixels = (pixels / 255 - self._mean) / self._std
        if len(pixels) % depth:
            pixels = torch.cat([pixels, pixels[-1:]])
        num_frames, channels, height, width = pixels.shape
        t, h, w = num_frames // depth, height // side, width // side
        pixels = pixels.view(t, depth, channels, h // merge, merge, side, w // merge, merge, side)
        patches = pixels.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(t * h * w, channels * depth * side * side)
        return patches, [t, h, w]

    def log_mel(self, clips: Sequence[np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
        """Samples -> (mels [B, 80, F] float32, mask [B, F] of the frames that each clip has)."""
        num_frames = torch.tensor([num_mel_frames(len(clip)) for clip in clips])
        longest = int(num_frames.max())
        padded = torch.zeros(len(clips), longest * SAMPLES_PER_FRAME + 2 * FOURIER_LENGTH)
        for row, clip in enumerate(clips):
            padded[row, : len(clip)] = torch.from_numpy(clip)
        spectrum = torch.stft(
            padded, FOURIER_LENGTH, SAMPLES_PER_FRAME, window=self._window, return_complex=True
        )
        mels = torch.clamp(self._mel_filters @ spectrum.abs() ** 2, min=1e-10).log10()
        mels = torch.maximum(mels, mels.amax((1, 2), keepdim=True) - 8.0)
        mask = torch.arange(longest)[None] < num_frames[:, None]
        return ((mels + 4) / 4)[:, :, :longest], mask.long()


def num_mel_frames(num_samples: int) -> int:
    """Frames of a clip."""
    return -(-num_samples // SAMPLES_PER_FRAME)


def num_audio_tokens(num_frames: int) -> int:
    """Tokens of a clip with so many mel frames: four frames each."""
    return ((num_frames - 1) // 2 - 1) // 2 + 1


def num_image_tokens(grid: Sequence[int]) -> int:
    """Tokens of an image or clip: one for each square of merged patches."""
    return grid[0] * grid[1] * grid[2] // PATCHES["merge_size"] ** 2
