"""Processors that are asked without their last step."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from cluster.media.normalising import Normalisation, find_normalisation, trial_images

MEAN, STD = [0.5, 0.4, 0.3], [0.2, 0.3, 0.1]
PART = SimpleNamespace(
    do_rescale=True, do_normalize=True, rescale_factor=1 / 255, image_mean=MEAN, image_std=STD
)


def planes(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """As torchvision normalises: [1, 3, h, w]."""
    pixels = torch.from_numpy(array).permute(2, 0, 1)[None]
    if not is_bare:
        mean, std = (torch.tensor(values).mul(1.0 / (1 / 255)).view(-1, 1, 1) for values in (MEAN, STD))
        pixels = pixels.float().sub_(mean).div_(std)
    return {"size": torch.tensor(array.shape), "pixels": pixels}


def columns(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """The first row of the image, as patches of 2 x 1 pixels: [patches, 6], channel by channel."""
    found = planes(array, is_bare)
    row = found["pixels"][0, :, 0, : array.shape[1] // 2 * 2]
    return {**found, "pixels": row.unflatten(1, (-1, 2)).movedim(1, 0).flatten(1)}


def pixels_last(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    found = columns(array, is_bare)
    return {**found, "pixels": found["pixels"].unflatten(1, (3, 2)).mT.flatten(1)}


@pytest.mark.parametrize("prepare", [planes, columns, pixels_last])
def test_the_step_is_found_wherever_the_channels_lie_and_gives_the_same_bits(prepare):
    found = find_normalisation(PART, {}, prepare, trial_images())
    assert found is not None and found.name == "pixels"
    for array in trial_images():
        expected, finished = prepare(array, False), found.finish(prepare(array, True))
        assert list(finished) == list(expected)
        assert all(torch.equal(finished[name], expected[name]) for name in expected)


def padded(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """It pads wide images, with zeros, after it has normalised."""
    found = planes(array, is_bare)
    missing = max(0, array.shape[1] - array.shape[0])
    return {**found, "pixels": torch.nn.functional.pad(found["pixels"], (0, 0, 0, missing))}


def deaf(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """It does not take the arguments."""
    return planes(array, False)


def strict(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """It refuses the arguments."""
    if is_bare:
        raise TypeError("do_rescale")
    return planes(array, False)


def rounded(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
    """One value of one item is another one in its last bit."""
    found = planes(array, is_bare)
    if not is_bare and array.shape[:2] == (37, 91):
        found["pixels"][0, 1, 2, 3] = found["pixels"][0, 1, 2, 3].nextafter(torch.tensor(9.0))
    return found


@pytest.mark.parametrize("prepare", [padded, deaf, strict, rounded])
def test_a_processor_that_differs_in_a_bit_computes_the_step_itself(prepare):
    assert find_normalisation(PART, {}, prepare, trial_images()) is None


@pytest.mark.parametrize(
    "kwargs",
    [
        {"do_normalize": False},
        {"do_rescale": False},
        {"image_mean": [0.5], "image_std": [0.5]},
        {"image_mean": 0.5},
    ],
)
def test_call_arguments_of_the_model_folder_count(kwargs):
    assert find_normalisation(PART, kwargs, planes, trial_images()) is None


def test_an_item_that_the_processor_refuses_does_not_count():
    def square_only(array: np.ndarray, is_bare: bool) -> dict[str, torch.Tensor]:
        if array.shape[0] != array.shape[1]:
            raise ValueError("not square")
        return planes(array, is_bare)

    assert isinstance(find_normalisation(PART, {}, square_only, trial_images()), Normalisation)
