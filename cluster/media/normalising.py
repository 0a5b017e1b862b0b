"""Processors asked without their last step: pixels stay bytes, and `(x - mean) / std` is computed from them
where the encoder is. A quarter of the bytes is laid out and travels; the values are the processor's, bit by
bit.

The step is elementwise, so it commutes with everything that only moves pixels. Whether a processor only moves
them after it, and where the channels then lie, trial items tell. A processor that differs in a bit (it pads
with zeros, averages, or does not take the arguments) computes the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from cluster.media.calls import setting_of

if TYPE_CHECKING:
    from torch import Tensor

    Prepare = Callable[[np.ndarray, bool], Mapping[str, Tensor]]  # array, whether without the step

WITHOUT = {"do_rescale": False, "do_normalize": False}  # arguments of transformers' processors
# (height, width) of trial images and frames: square, tall, wide, odd, of several tiles
TRIAL_SIZES = ((64, 64), (400, 40), (40, 400), (37, 91), (730, 510))
NUM_TRIAL_FRAMES = 2
NUM_CHANNELS = 3


@dataclass(frozen=True, eq=False)
class Normalisation:
    """`(x - mean) / std` of the pixels in one tensor, in float32, as torchvision computes it."""

    name: str  # of the tensor
    mean: Tensor  # broadcasts over the tensor, as `std` does
    std: Tensor

    def finish(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors, with float32 instead of bytes, on the device where the bytes are."""
        import torch

        pixels = tensors[self.name]
        mean, std = self.mean.to(pixels.device), self.std.to(pixels.device)
        return {**tensors, self.name: pixels.to(torch.float32).sub_(mean).div_(std)}


def find_normalisation(
    part: Any, kwargs: Mapping[str, Any], prepare: Prepare, arrays: Iterable[np.ndarray]
) -> Normalisation | None:
    """The last step of `part`, an image or video processor that is called with `kwargs`; None: the processor
    computes it. `arrays`: trial items; one that the processor refuses does not count. Takes some tens of
    milliseconds."""
    import torch

    value = partial(setting_of, part, kwargs)
    mean, std, factor = (value(name) for name in ("image_mean", "image_std", "rescale_factor"))
    channels = all(isinstance(values, list | tuple) and len(values) == NUM_CHANNELS for values in (mean, std))
    if not (value("do_rescale") and value("do_normalize") and channels and factor):
        return None
    scaled = [torch.tensor(values) * (1.0 / factor) for values in (mean, std)]  # as transformers fuses them
    pairs = [pair for array in arrays if (pair := _pair(prepare, array)) is not None]
    candidates = _candidates(*pairs[0], *scaled) if pairs else ()
    return next((each for each in candidates if all(_agrees(each, *pair) for pair in pairs)), None)


def trial_images() -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    for size in TRIAL_SIZES:
        yield random.integers(0, 256, (*size, NUM_CHANNELS), np.uint8)


def trial_clips() -> Iterator[np.ndarray]:
    for image in trial_images():
        yield np.stack([image, *[image[::-1]] * (NUM_TRIAL_FRAMES - 1)])


def _pair(prepare: Prepare, array: np.ndarray) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None:
    """What the processor makes of a trial item, and what it makes without the step. None: it refuses the
    item."""
    try:
        whole = prepare(array, False)
    except Exception:  # a library's, for a size that it does not take
        return None
    try:
        return whole, prepare(array, True)
    except Exception:  # it does not take the arguments
        return whole, {}


def _candidates(
    whole: Mapping[str, Tensor], bare: Mapping[str, Tensor], mean: Tensor, std: Tensor
) -> Iterator[Normalisation]:
    import torch

    for name in whole:
        pixels = bare.get(name)
        if pixels is None or pixels.dtype is not torch.uint8:
            continue
        if pixels.dim() >= 3 and pixels.shape[-3] == NUM_CHANNELS:  # planes
            yield Normalisation(name, mean.view(-1, 1, 1), std.view(-1, 1, 1))
        each, rest = divmod(pixels.shape[-1], NUM_CHANNELS)
        if not rest:  # columns of patches: channel by channel, or pixel by pixel
            yield Normalisation(name, mean.repeat_interleave(each), std.repeat_interleave(each))
            yield Normalisation(name, mean.repeat(each), std.repeat(each))


def _agrees(normalisation: Normalisation, whole: Mapping[str, Tensor], bare: Mapping[str, Tensor]) -> bool:
    import torch

    if list(whole) != list(bare) or bare[normalisation.name].dtype is not torch.uint8:
        return False
    try:
        finished = normalisation.finish(bare)
    except RuntimeError:  # of another shape
        return False
    return all(
        finished[name].dtype is tensor.dtype and torch.equal(finished[name], tensor)
        for name, tensor in whole.items()
    )
