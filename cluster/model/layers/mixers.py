"""Puts kernels in the place of mixers that keep states, where they compute the same."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from cluster.model.layers.search import LayerKernels
from cluster.model.layers.trial import agree
from cluster.model.states import MixerKernel, StatefulForward, StepStates

logger = logging.getLogger(__name__)

_NUM_TOKENS = (9, 1, 4)  # of successive steps
_NUM_SEQUENCES = 2
_SCALE = 0.5
# Largest relative error (2-norm) of what a mixer gives, and of each of its states: five times what was seen.
_TOLERANCES = {torch.float32: 5e-6, torch.bfloat16: 2e-3}


@torch.inference_mode()
def replace_mixers(step: StepStates, kernels: LayerKernels, hidden_size: int) -> int:
    """Returns how many are replaced. Call it after `kernels.replace_modules`. Blocks."""
    num_replaced = 0
    for forward in step.forwards:
        kernel = kernels.mixer(forward.mixer, forward.states)
        if kernel is not None and _agrees(forward, kernel, hidden_size):
            forward.kernel = kernel
            num_replaced += 1
    if step.forwards:
        logger.info("%s: %d of %d mixers replaced", kernels.name, num_replaced, len(step.forwards))
    return num_replaced


def _agrees(forward: StatefulForward, kernel: MixerKernel, hidden_size: int) -> bool:
    first = next(own for own in forward.mixer.parameters() if not own.is_meta)
    dtype, generator = _dtype(forward), torch.Generator().manual_seed(0)
    shape = (_NUM_SEQUENCES, forward.states.num_bytes)
    theirs, ours = (torch.zeros(shape, dtype=torch.uint8, device=first.device) for _ in range(2))
    for step, num_tokens in enumerate(_NUM_TOKENS):
        rows = _SCALE * torch.randn(_NUM_SEQUENCES, num_tokens, hidden_size, generator=generator)
        rows = rows.to(first.device, dtype)
        expected = forward.run_module(rows, theirs, is_first=step == 0)
        if not agree(kernel(rows, ours), expected, _TOLERANCES[dtype]):
            return False
    return all(
        agree(_view(ours, forward, i), _view(theirs, forward, i), _TOLERANCES[dtype])
        for i in range(len(forward.states.tensors))
    )


def _dtype(forward: StatefulForward) -> torch.dtype:
    """The model's: that of what its convolutions keep."""
    return next((each.dtype for each in forward.states.tensors if not each.is_recurrent), torch.float32)


def _view(stored: Tensor, forward: StatefulForward, i: int) -> Tensor:
    tensor, place = forward.states.places[i]
    return stored[:, place].view(tensor.dtype)
