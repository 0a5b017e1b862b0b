"""Replaces decoder layers by kernels of a device, and runs a whole text model by them where that is
possible."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import nn

from cluster.model.layers.parts import DecoderParts, decoder_parts
from cluster.model.layers.trial import Observed, Trial, WholeDecoder
from cluster.model.state_step import MixerKernel, StatefulForward

logger = logging.getLogger(__name__)

Settings = Mapping[str, Any]  # of a replacement: what JSON can hold
Replacement = TypeVar("Replacement")


class ReplacementSource(Protocol):
    """Where the replacement of a module comes from."""

    def replacement(
        self, module: nn.Module, candidates: Iterable[Settings], build: Callable[[Settings], Replacement],
        agrees: Callable[[Replacement, Settings], bool],
    ) -> Replacement | None:  # fmt: skip
        """The first candidate that agrees with `module`; None: there is none. `candidates` is read only as
        far as candidates are tried."""
        ...


class Compared:
    """Builds the candidates and compares them with the module."""

    def replacement(
        self, module: nn.Module, candidates: Iterable[Settings], build: Callable[[Settings], Replacement],
        agrees: Callable[[Replacement, Settings], bool],
    ) -> Replacement | None:  # fmt: skip
        built = ((build(settings), settings) for settings in candidates)
        return next((candidate for candidate, settings in built if agrees(candidate, settings)), None)


@dataclass(frozen=True)
class TextParts:
    """A text model whose layers are replaced, and its head."""

    rotary: nn.Module
    layers: Sequence[nn.Module]
    norm: nn.Module
    head: nn.Module


class LayerKernels(Protocol):
    """The kernels of one device.

    name: for the log.
    source: where replacements come from.
    is_timed: a replacement must also be faster than its layer.
    whole_tolerance: largest relative error (2-norm) of the logits of a whole decoder.
    mixer_tolerances: largest relative error (2-norm) of what a mixer gives, and of each of its states.
    """

    name: str
    is_timed: bool
    whole_tolerance: float
    mixer_tolerances: Mapping[torch.dtype, float]

    @property
    def source(self) -> ReplacementSource: ...

    def can_replace(self, parts: DecoderParts) -> bool:
        """Whether there may be candidates for a layer of such parts. Only then the layer is run."""
        ...

    def candidates(self, parts: DecoderParts, observed: Observed) -> Iterable[Settings]:
        """Replacements that may compute what the layer computes, the best first; empty: there is none. What
        names do not say (form of the norms, of the rotary embedding) is tried: a candidate for each form. One
        half of a layer may be replaced alone. Equal settings, in layers of one model, mean equal work."""
        ...

    def build(self, parts: DecoderParts, settings: Settings) -> nn.Module:
        """A module that is called as the layer is: hidden_states, then keywords, of which it needs
        `position_embeddings` and `paged`; returns one tensor. Writes K and V into the batch's slots and
        announces its layer (`PagedBatch.on_layer`). Blocks."""
        ...

    def tolerance(self, parts: DecoderParts, settings: Settings) -> float:
        """Largest relative error (2-norm) of what the replacement adds to its input."""
        ...

    def replace_modules(self, text_model: nn.Module, head: nn.Module) -> nn.Module | None:
        """Replaces, in place, modules outside of replaced layers. Returns the replacement of the head; None:
        it stays. Blocks."""
        ...

    def mixer(self, forward: StatefulForward) -> MixerKernel | None:
        """What may compute a mixer that keeps states (`cluster.model.layers.mixers`); None: there is
        nothing."""
        ...

    def whole(self, parts: TextParts) -> WholeDecoder | None:
        """None: these parts do not run in one call."""
        ...


def replace_layers(text_model: nn.Module, kernels: LayerKernels, trial: Trial) -> int:
    """Replaces decoder layers of `text_model` in place; returns how many. Call it before
    `kernels.replace_modules`. Blocks: on a CPU, some seconds for a gigabyte of weights."""
    # without their parts: a replaced layer must not live until all are replaced
    found = [
        (parent, name)
        for parent in text_model.modules()
        for name, child in parent.named_children()
        if (parts := decoder_parts(child)) is not None and kernels.can_replace(parts)
    ]
    is_faster: dict[str, bool] = {}  # by settings
    replaced: set[nn.Module] = set()
    with torch.inference_mode():
        for parent, name in found:
            replacement = _replacement(getattr(parent, name), kernels, trial, is_faster)
            if replacement is not None:
                setattr(parent, name, replacement)
                replaced.add(replacement)
    logger.info("%s: %d decoder layers replaced", kernels.name, len(replaced))
    left = [layer for layer in getattr(text_model, "layers", ()) if layer not in replaced]
    for name, number in Counter(type(layer).__name__ for layer in left).items():
        logger.info("%s: %d layers run by their modules: %s", kernels.name, number, name)
    return len(replaced)


def _replacement(
    layer: nn.Module, kernels: LayerKernels, trial: Trial, is_faster: dict[str, bool]
) -> nn.Module | None:
    """The first candidate that agrees with the layer and is fast enough; None: there is none."""
    parts = cast(DecoderParts, decoder_parts(layer))
    seen: list[Observed] = []

    def candidates() -> Iterator[Settings]:
        if (observed := trial.observe(layer)) is not None:
            seen.append(observed)
            yield from kernels.candidates(parts, observed)

    def agrees(candidate: nn.Module, settings: Settings) -> bool:
        if not trial.agrees(candidate, seen[0], kernels.tolerance(parts, settings)):
            return False
        key = json.dumps(settings, sort_keys=True)
        # beside a mixer, whose own code runs here, what is saved could not be seen
        is_timed = kernels.is_timed and seen[0].heads is not None
        if is_timed and key not in is_faster:
            own_s, its_s = trial.seconds(layer), trial.seconds(candidate)
            is_faster[key] = its_s < own_s
            logger.info("%s: %.0f us instead of %.0f: %s", kernels.name, 1e6 * its_s, 1e6 * own_s, key)
        return is_faster.get(key, True)

    return kernels.source.replacement(
        layer, candidates(), lambda settings: kernels.build(parts, settings), agrees
    )


def whole_decoder(
    text_model: nn.Module, head: nn.Module, kernels: LayerKernels, trial: Trial
) -> WholeDecoder | None:
    """A decoder that computes what `text_model` and `head` compute one after the other, or None.

    Call it after `replace_layers` and `kernels.replace_modules`. It shares the weights of the replaced
    layers. It has no place for what a model adds between two layers (deep-stack features): such a step needs
    the model's own forward.
    """
    layers, rotary = (getattr(text_model, name, None) for name in ("layers", "rotary_emb"))
    norm = getattr(text_model, "norm", getattr(text_model, "embedding_norm", None))
    if not (isinstance(layers, nn.ModuleList) and len(layers)):
        return None
    if not (isinstance(rotary, nn.Module) and isinstance(norm, nn.Module)):
        return None
    with torch.inference_mode():
        decoder = kernels.whole(TextParts(rotary, [*layers], norm, head))
        if not trial.all_agree(decoder is not None) or decoder is None:
            return None
        if not trial.agrees_whole(decoder, head, kernels.whole_tolerance):
            return None
    return decoder
