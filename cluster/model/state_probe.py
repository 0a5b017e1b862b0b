"""Runs one dummy token through a text backbone to learn which of its modules keep states, and of which form.
Later, a few tokens show whether its states are complete: whether a prompt computed in pieces gives what it
gives in one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.batches import SequenceChunk
from cluster.model.states import LayerStates, StateSpan, StateTensor

if TYPE_CHECKING:
    from cluster.model.language import LanguageModel

# A prompt, and how it is cut. Pieces of one token and of several; of more tokens than a convolution sees.
_NUM_TOKENS = 23
_CUTS: Sequence[Sequence[int]] = ((23,), (9, 1, 1, 7, 5), (1,) * 6 + (17,))
# Largest relative error (2-norm) of the logits. A mixer that ignores its state gives 0.09 and more.
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE_16_BIT = 0.06


class StateSpy(DynamicCache):
    """A cache that notes what layers keep in it during one forward.

    kv_layers: numbers of the layers that keep K and V."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config=config)
        self.kv_layers: set[int] = set()
        self._running: list[str] = []  # names of the modules that are being called
        self._mixers: dict[int, str] = {}  # by layer: the module that keeps the states

    @contextmanager
    def watching(self, text_model: nn.Module) -> Iterator[None]:
        """The forward inside is the one that is noted."""
        hooks = []
        for name, module in text_model.named_modules():
            hooks.append(module.register_forward_pre_hook(partial(self._enter, name)))
            hooks.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def states(self) -> tuple[LayerStates, ...]:
        """The states of every layer that has some, in the order of the layers."""
        return tuple(
            LayerStates(self._mixers[layer_idx], layer_idx, _tensors(self.layers[layer_idx]))
            for layer_idx in sorted(self._mixers)
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self.kv_layers.add(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._mixers.setdefault(layer_idx, self._running[-1])
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._mixers.setdefault(layer_idx, self._running[-1])
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)

    def _enter(self, name: str, _module: nn.Module, _args: object) -> None:
        self._running.append(name)

    def _leave(self, _module: nn.Module, _args: object, _output: object) -> None:
        self._running.pop()


def _tensors(layer: Any) -> tuple[StateTensor, ...]:
    return tuple(
        StateTensor(is_recurrent, number, tuple(kept.shape[1:]), str(kept.dtype))
        for is_recurrent, states in ((False, layer.conv_states), (True, layer.recurrent_states))
        for number, kept in states.items()
        if kept is not None
    )


def check_states(model: LanguageModel) -> None:
    """Raises ConfigError unless a prompt in pieces, beside another sequence, gives what it gives alone and
    whole."""
    ids = [(7 * i + 3) % model.vocab_size for i in range(_NUM_TOKENS)]
    try:
        whole, *others = [_run(model, ids, cuts) for cuts in _CUTS]
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model type '{model.family}' is not supported: its layers do not run with states: {error}"
        ) from error
    tolerance = _TOLERANCES.get(model.dtype, _TOLERANCE_16_BIT)
    for logits in others:
        error = float((logits - whole).norm() / whole.norm())
        if not error <= tolerance:
            raise ConfigError(
                f"model type '{model.family}' is not supported: in pieces, a prompt gives other logits than "
                f"in one (relative error {error:.2g}): its layers keep more than their states"
            )


def _run(model: LanguageModel, ids: Sequence[int], cuts: Sequence[int]) -> Tensor:
    """[1, vocab_size]: after the last token. In every step but the first a second sequence runs, too, with a
    piece of the same length: mixers are called for both together."""
    num_kv = -(-len(ids) // model.block_size)
    size = model.state_blocks
    kv = BlockMemory(model.kv_layout, 2 * (num_kv + 2 * size), model.device)
    every = list(range(kv.num_blocks))
    tables = [every[:num_kv], every[num_kv : 2 * num_kv]]
    states = [every[2 * num_kv + i * size : 2 * num_kv + (i + 1) * size] for i in range(4)]
    start, logits = 0, torch.empty(0)
    for step, count in enumerate(cuts):
        chunks = [_chunk(ids, start, count, tables[0], states[step % 2], states[1 - step % 2])]
        if step:
            before = start - cuts[0]
            other = _chunk(ids[::-1], before, count, tables[1], states[2 + step % 2], states[3 - step % 2])
            chunks.insert(0, other)
        logits = model.forward(chunks, kv)[-1:]
        start += count
    return logits


def _chunk(
    ids: Sequence[int], start: int, count: int, table: list[int], source: list[int], target: list[int]
) -> SequenceChunk:
    span = StateSpan(count, source if start else (), target)
    return SequenceChunk(ids[start : start + count], start, start, table, states=(span,))
