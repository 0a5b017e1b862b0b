"""Runs one dummy token through a text backbone to learn the widths of K and V per layer, which configurations
express differently in each family. Refuses, by name, a backbone that needs something from attention that our
backends would silently ignore."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import cast

import msgspec
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from cluster.errors import ConfigError
from cluster.model.state_probe import StateSpy
from cluster.model.state_step import cache_argument
from cluster.model.states import LayerStates
from cluster.model.support import head_of, head_owner, may_keep_states
from cluster.model.token_inputs import layer_inputs

_PROBE_NAME = "epdg_probe"
# keywords that families pass along and that no attention function reads, or that ours reads
_HARMLESS = frozenset(
    ("scaling", "sliding_window", "softcap", "s_aux", "dropout", "position_ids", "use_cache",
     "output_attentions", "cache_position", "position_embeddings", "return_dict", "output_router_logits",
     "is_causal")
)  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """Row shapes of one layer's K and V, its window, and whose KV it attends over."""

    key: tuple[int, int]  # (kv heads, key width)
    value: tuple[int, int]  # (kv heads, value width); the width differs from the key's in MLA
    window: int | None  # a token sees itself and the `window - 1` tokens before it; None: all
    owner: int | None = None  # an earlier layer, over whose K and V it attends; None: over its own

    @classmethod
    def from_json(
        cls, key: list[int], value: list[int], window: int | None, owner: int | None = None
    ) -> LayerShape:
        return cls((key[0], key[1]), (value[0], value[1]), window, owner)


@dataclass(frozen=True)
class Probed:
    """What a text model needs beside its weights."""

    shapes: Sequence[LayerShape]  # of every layer with attention, in order
    states: tuple[LayerStates, ...] = ()  # of a hybrid model: of every layer that has some
    attention: tuple[str, ...] = ()  # of a hybrid model: names of the modules that call attention, in order

    def to_json(self) -> object:
        return [[astuple(shape) for shape in self.shapes], msgspec.to_builtins(self.states), self.attention]

    @classmethod
    def from_json(cls, fields: list) -> Probed:
        shapes, states, attention = fields
        return cls(
            [LayerShape.from_json(*shape) for shape in shapes],
            msgspec.convert(states, tuple[LayerStates, ...]),
            tuple(attention),
        )


class _ShapeRecorder:
    """Shapes by layer, and the reasons why the backbone cannot be used."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.modules: dict[int, nn.Module] = {}  # that called attention, by layer
        self._keys: list[tuple[Tensor, int]] = []  # with the layer that made it
        self.objections: set[str] = set()

    def see(self, module: nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict) -> None:
        layer_idx = getattr(module, "layer_idx", None)
        if layer_idx is None or layer_idx in self.shapes:
            self.objections.add("it calls attention more than once per layer (cross attention?)")
            return
        owner = next((own for seen, own in self._keys if seen is key), None)
        if owner is None:
            self._keys.append((key, layer_idx))
        self.modules[layer_idx] = module
        self.shapes[layer_idx] = LayerShape(
            (key.shape[1], key.shape[3]),
            (value.shape[1], value.shape[3]),
            cast(int | None, kwargs.get("sliding_window")) or None,
            owner,
        )
        self.objections.update(
            f"its attention takes '{name}'"
            for name, given in kwargs.items()
            if name not in _HARMLESS and given is not None
        )
        if kwargs.get("is_causal") is False or mask is not None:
            self.objections.add("its attention is not causal")


def _probe_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probe: _ShapeRecorder | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    if probe is None:
        name = cast(PreTrainedConfig, module.config).model_type
        raise ConfigError(
            f"model type '{name}' is not supported: its layers pass no arguments on to attention"
        )
    probe.see(module, key, value, attention_mask, kwargs)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_PROBE_NAME, _probe_attention)


@torch.inference_mode()
def probe_backbone(text_model: PreTrainedModel, hidden_size: int) -> Probed:
    """Changes the backbone's attention implementation; the caller must set the final one."""
    text_model.set_attn_implementation(_PROBE_NAME)
    recorder = _ShapeRecorder()
    dummy = torch.zeros(1, 1, hidden_size, dtype=text_model.dtype, device=text_model.device)
    token = torch.zeros(1, dtype=torch.int64, device=text_model.device)
    config = text_model.config
    given = {"inputs_embeds": dummy, "probe": recorder, **_beside(text_model, token)}
    spy = StateSpy(config) if may_keep_states(type(text_model), config) else None
    if spy is None:
        text_model(use_cache=False, **given)
    else:
        _run_watched(text_model, spy, given)
    _check_windows(config, recorder)
    num_layers, states = config.num_hidden_layers, () if spy is None else spy.states
    if states:
        if sorted(recorder.shapes) != sorted(spy.kv_layers if spy is not None else ()):
            recorder.objections.add("some of its layers keep KV without calling the attention interface")
        if not recorder.shapes:
            recorder.objections.add("none of its layers has attention")
    elif sorted(recorder.shapes) != list(range(num_layers)):
        recorder.objections.add(
            f"only layers {sorted(recorder.shapes)} of {num_layers} call the attention interface"
        )
    if recorder.objections:
        raise ConfigError(
            f"model type '{config.model_type}' is not supported: {'; '.join(sorted(recorder.objections))}"
        )
    shapes = with_owners_first([recorder.shapes[i] for i in sorted(recorder.shapes)])
    if not states:
        return Probed(shapes)
    if any(shape.owner is not None for shape in shapes):
        shapes = [replace(shape, owner=None) for shape in shapes]
    names = {module: name for name, module in text_model.named_modules()}
    return Probed(shapes, states, tuple(names[recorder.modules[i]] for i in sorted(recorder.modules)))


def _run_watched(text_model: PreTrainedModel, spy: StateSpy, given: Mapping[str, object]) -> None:
    argument = cache_argument(text_model)
    try:
        with spy.watching(text_model):
            text_model(use_cache=True, **{argument: spy}, **given)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        name = text_model.config.model_type
        raise ConfigError(
            f"model type '{name}' is not supported: it keeps states in a form of its own: {error}"
        ) from error


def with_owners_first(shapes: list[LayerShape]) -> list[LayerShape]:
    """The shapes, if layers without KV of their own are the last ones: block memory is found by the layer's
    number. Else every layer stores its KV, shared or not."""
    num_owners = sum(shape.owner is None for shape in shapes)
    is_so = all(shape.owner is None for shape in shapes[:num_owners])
    return shapes if is_so else [replace(shape, owner=None) for shape in shapes]


def _check_windows(config: PreTrainedConfig, recorder: _ShapeRecorder) -> None:
    """Objects to a window that exists only in the mask or in transformers' cache, because it would be lost.
    The cache gives every layer the window of a configuration without `layer_types`."""
    window = getattr(config, "sliding_window", None)
    is_short = window is not None and window < getattr(config, "max_position_embeddings", window + 1)
    implied = ("sliding_attention",) * (config.num_hidden_layers if is_short else 0)
    for layer_idx, layer_type in enumerate(getattr(config, "layer_types", None) or implied):
        shape = recorder.shapes.get(layer_idx)
        if layer_type == "sliding_attention" and (shape is None or shape.window is None):
            recorder.objections.add("its sliding window is not passed to the attention interface")


@torch.inference_mode()
def check_post_head(
    model: PreTrainedModel, text_model: PreTrainedModel, post_head: Callable[[Tensor], Tensor] | None
) -> None:
    """Compares `post_head(head(backbone))` with the logits of the model's own forward for one text token.
    Call it after `probe_backbone` and before the final attention implementation is set. Raises
    ConfigError."""
    token = torch.tensor([[1]], device=text_model.device)
    embedded = model.get_input_embeddings()(token)
    beside, recorder = _beside(text_model, token[0]), _ShapeRecorder()
    hidden = text_model(inputs_embeds=embedded, use_cache=False, probe=recorder, **beside).last_hidden_state
    logits = head_of(model)(hidden)
    ours = (logits if post_head is None else post_head(logits)).float()
    # ranks that share the embedding cannot make inputs of layers of ids as the family's own forward does
    given = {"inputs_embeds": embedded, **beside} if beside else {"input_ids": token}
    whole = head_owner(model)
    reference = whole(**given, attention_mask=None, use_cache=False, probe=_ShapeRecorder()).logits.float()
    if not torch.allclose(ours, reference, rtol=1e-2, atol=1e-3):
        raise ConfigError(
            f"model type '{model.config.model_type}' is not supported: its logits differ from head(backbone) "
            "by a rule "
            "that this cluster does not know"
        )


def _beside(text_model: PreTrainedModel, token_ids: Tensor) -> Mapping[str, object]:
    make = layer_inputs(text_model)
    return {} if make is None else make(token_ids)


def kv_row_shapes(shapes: Sequence[LayerShape]) -> list[tuple[int, int]]:
    """For every layer with KV of its own: (heads, width) of K, then of V."""
    return [row for shape in shapes if shape.owner is None for row in (shape.key, shape.value)]


def window_of_all(shapes: list[LayerShape]) -> int | None:
    """The largest window of all layers; None if a layer has none."""
    windows = [shape.window for shape in shapes if shape.window is not None]
    return max(windows) if windows and len(windows) == len(shapes) else None
