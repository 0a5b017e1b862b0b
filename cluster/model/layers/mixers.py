"""Puts kernels in the place of mixers that keep states, where they compute the same."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.layers.search import LayerKernels
from cluster.model.layers.trial import agree
from cluster.model.state_step import MixerKernel, StatefulForward, StepState, StepStates
from cluster.model.states import StateSpan

logger = logging.getLogger(__name__)

_Steps = Sequence[Sequence[Sequence[int]]]
# Of successive steps: the new tokens of each sequence, cut where its state is kept. Prompts, answers alone,
# answers next to the rest of a prompt; cuts at and next to 16 tokens, which kernels may take at once; drafts
# (negative numbers), which no state takes in.
_STEPS: _Steps = (
    ((5,), (16, 3), (1,)),
    ((1,), (1,), (1,)),
    ((2,), (1,), (15, 2, 1)),
    ((1, -2), (2, -3), (16, -1)),
)
_NUM_AGAIN = 2  # of these, the first ones, that a mixer takes whose form has agreed in all
_PLACES = 4  # of states, for each sequence
_SCALE = 0.5


@torch.inference_mode()
def replace_mixers(step: StepStates, kernels: LayerKernels, hidden_size: int) -> int:
    """Returns how many are replaced. Call it after `kernels.replace_modules`. Blocks."""
    num_replaced, trial = 0, MixerTrial(kernels.name, kernels.mixer_tolerances)
    for forward in step.forwards:
        kernel = kernels.mixer(forward)
        if kernel is not None and trial.agrees(forward, kernel, hidden_size):
            forward.kernel = kernel
            num_replaced += 1
    if step.forwards:
        logger.info("%s: %d of %d mixers replaced", kernels.name, num_replaced, len(step.forwards))
    return num_replaced


class MixerTrial:
    """Compares kernels with the mixers of a model; those of a form that has agreed, which differ from it in
    their weights, over fewer steps: transformers' code takes tens of milliseconds for all."""

    def __init__(self, name: str, tolerances: Mapping[torch.dtype, float]):
        """name: of the kernels, for the log. tolerances: largest relative error (2-norm) of what a mixer
        gives, and of each of its states."""
        self._name, self._tolerances = name, tolerances
        self._agreed: set[Hashable] = set()

    def agrees(self, forward: StatefulForward, kernel: MixerKernel, hidden_size: int) -> bool:
        """Blocks."""
        form = (type(kernel), _form(forward))
        steps = _STEPS[:_NUM_AGAIN] if form in self._agreed else _STEPS
        try:
            agrees = _does_agree(forward, kernel, self._tolerances, hidden_size, steps)
        except Exception as error:  # compilers raise what they like; a device that broke raises it again
            logger.warning("%s: %s fails: %s", self._name, type(kernel).__name__, error)
            return False
        if agrees:
            self._agreed.add(form)
        return agrees


def _form(forward: StatefulForward) -> Hashable:
    parameters = forward.mixer.named_parameters()
    return (
        type(forward.mixer), forward.states.tensors,
        tuple((name, own.shape, own.dtype, own.is_contiguous()) for name, own in parameters),
    )  # fmt: skip


def _does_agree(
    forward: StatefulForward, kernel: MixerKernel, tolerances: Mapping[torch.dtype, float], hidden_size: int,
    steps: _Steps,
) -> bool:  # fmt: skip
    """Both run the same steps, over memories of their own."""
    first = next(own for own in forward.mixer.parameters() if not own.is_meta)
    dtype, generator = _dtype(forward), torch.Generator().manual_seed(0)
    if (tolerance := tolerances.get(dtype)) is None:
        return False
    layout = forward.layout
    num_blocks = len(_STEPS[0]) * _PLACES * layout.num_blocks
    theirs, ours = (BlockMemory(layout.kv_layout, num_blocks, first.device) for _ in range(2))
    for step, counts in enumerate(steps):
        sequences = [[*_spans(step, i, own, layout.num_blocks)] for i, own in enumerate(counts)]
        num_tokens = sum(abs(count) for own in counts for count in own)
        rows = _SCALE * torch.randn(num_tokens, hidden_size, generator=generator)
        rows = rows.to(first.device, dtype)
        expected = forward.run_module(rows, StepState(layout, theirs, sequences))
        if not agree(kernel(rows, StepState(layout, ours, sequences)), expected, tolerance):
            return False
        targets = [span.target for spans in sequences for span in spans if span.target]
        pairs = zip(*(_states(forward, targets, kv) for kv in (ours, theirs)), strict=True)
        if not all(agree(mine, other, tolerance) for mine, other in pairs):
            return False
    return True


def _spans(step: int, sequence: int, counts: Sequence[int], num_blocks: int) -> Iterator[StateSpan]:
    """The spans of a sequence. The state after a step lies in one of two places by turns, those within it in
    further ones."""

    def place(number: int) -> range:
        start = (sequence * _PLACES + number) * num_blocks
        return range(start, start + num_blocks)

    source = place((step - 1) % 2) if step else ()
    last = sum(count > 0 for count in counts) - 1
    for i, count in enumerate(counts):
        target = place(step % 2 if i == last else 2 + i) if count > 0 else ()
        yield StateSpan(abs(count), source, target)
        source = target


def _states(forward: StatefulForward, blocks: Sequence[Sequence[int]], kv: BlockMemory) -> Iterator[Tensor]:
    """Each state of the layer, of all sequences whose states lie in these blocks."""
    layout = forward.layout
    pages = layout.page_ids(torch.tensor([[*own] for own in blocks]).to(kv.buffer.device), kv)
    stored = layout.load(forward.number, pages, kv)
    for tensor, place in forward.states.places:
        yield stored[:, place].view(tensor.dtype)


def _dtype(forward: StatefulForward) -> torch.dtype:
    """The model's: that of what its convolutions keep."""
    return next((each.dtype for each in forward.states.tensors if not each.is_recurrent), torch.float32)
