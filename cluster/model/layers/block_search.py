"""Finds the blocks of vision and audio towers that a device's kernels can run, and replaces their `forward`.

A block is recognised by its parts (`blocks`). The block and its replacement then run the same random rows:
the replacement takes over only if it adds the same to its input. A block that differs, or is not recognised,
stays, and the log names it.

A replaced block stays in its tower, because transformers finds by class the blocks whose output it records.
It has no parts any more. Runs on the thread that loads the model.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from cluster.model.layers.blocks import BlockParts, block_parts
from cluster.model.layers.search import ReplacementSource, Settings
from cluster.model.layers.trial import ENCODER_TOLERANCES, agree

logger = logging.getLogger(__name__)

_TRIAL_SHAPE = (2, 7)  # of sequences of equal length
_TRIAL_SCALE = 0.1  # of the input, so that what a block of small weights adds does not vanish behind it

BlockForward = Callable[..., Tensor | tuple[Tensor]]  # is called as the block's own


class BlockKernels(Protocol):
    """The kernels of one device.

    name: for the log.
    source: where replacements come from.
    trial_lengths: of the packed sequences over which a block and its replacement are compared.
    """

    trial_lengths: Sequence[int]

    @property
    def name(self) -> str: ...

    @property
    def source(self) -> ReplacementSource: ...

    def builder(self, parts: BlockParts) -> Callable[[bool], BlockForward] | None:
        """What makes the replacement of a block of such parts; its argument: whether the block returns its
        rows in a tuple. None: no kernel takes such parts."""
        ...


def replace_blocks(module: nn.Module, kernels: BlockKernels) -> int:
    """Replaces blocks anywhere in `module`, in place; returns how many. Call it in evaluation mode. Waits for
    the device."""
    left, count = Counter[tuple[str, str]](), 0
    with torch.inference_mode():
        for blocks in [child for child in module.modules() if isinstance(child, nn.ModuleList)]:
            for block in blocks:
                why_not = _replace(block, kernels)
                count += why_not is None
                if why_not is not None and any(True for _ in block.children()):
                    left[type(block).__name__, why_not] += 1
    logger.info("%s: %d encoder blocks replaced", kernels.name, count)
    for (name, reason), number in left.items():
        logger.info("%s: %d blocks run by their modules: %s: %s", kernels.name, number, name, reason)
    return count


def replace_forward(block: nn.Module, forward: BlockForward) -> None:
    """Leaves the block without parts."""
    for name in [name for name, _ in block.named_children()]:
        delattr(block, name)
    block.forward = forward


def _replace(block: nn.Module, kernels: BlockKernels) -> str | None:
    """Why it could not be replaced; None: it was."""
    if (parts := block_parts(block)) is None:
        return "its form is not known"
    if (build := kernels.builder(parts)) is None:
        return "no kernel takes its parts"
    trial = _BlockTrial(parts, kernels.trial_lengths)
    forward = kernels.source.replacement(
        block, trial.candidates(), lambda settings: build(settings["returns_tuple"]),
        lambda candidate, _settings: trial.agrees(candidate),
    )  # fmt: skip
    if forward is None:
        return trial.why_not or "the kernels give other numbers"
    replace_forward(block, forward)
    return None


class _BlockTrial:
    """Random rows, and what the block adds to them. The block runs only if a candidate is asked for."""

    def __init__(self, parts: BlockParts, lengths: Sequence[int]):
        """lengths: of packed sequences."""
        self._parts, self._lengths = parts, lengths
        self.why_not: str | None = None  # why there is no candidate

    def candidates(self) -> Iterator[Settings]:
        self._x, self._keywords = _arguments(self._parts, self._lengths)
        try:
            result = self._parts.block(self._x, **self._keywords)
        except Exception as error:  # of a family that wants other arguments
            self.why_not = f"{type(error).__name__}: {error}"
            return
        first, *others = result if isinstance(result, tuple) else (result,)
        if not isinstance(first, Tensor) or others:
            self.why_not = "it returns more than rows"
            return
        self._added = first.float() - self._x.float()
        yield {"returns_tuple": isinstance(result, tuple)}

    def agrees(self, candidate: BlockForward) -> bool:
        result = candidate(self._x, **self._keywords)
        added = (result[0] if isinstance(result, tuple) else result).float() - self._x.float()
        return agree(added, self._added, ENCODER_TOLERANCES[self._parts.dtype])


def _arguments(parts: BlockParts, lengths: Sequence[int]) -> tuple[Tensor, dict[str, object]]:
    """Rows, and what the block is called with besides them."""
    generator, device = torch.Generator().manual_seed(0), parts.out.weight.device
    shape = (sum(lengths),) if parts.is_packed else _TRIAL_SHAPE
    x = torch.randn(*shape, parts.hidden_size, generator=generator) * _TRIAL_SCALE
    if parts.is_packed:
        keywords: dict[str, object] = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int().to(device)}
    else:
        keywords = {"attention_mask": None}
    if parts.is_rotated:
        angles = torch.randn(shape[-1], parts.head_width, generator=generator)
        dtype = torch.float32 if parts.is_packed else parts.dtype  # Pixtral rotates in the model's
        keywords["position_embeddings"] = tuple(
            each.to(device, dtype) for each in (angles.cos(), angles.sin())
        )
    return x.to(device, parts.dtype), keywords
