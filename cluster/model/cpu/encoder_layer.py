"""A block of a vision or audio encoder that runs in one native call (`encoder_layer.cpp`).

The call does norms, fused q/k/v, the rotary embedding, attention inside sequences, projection, MLP and both
residuals. `encoder_search` decides which blocks it replaces and how they are called.

Runs on its caller's thread and on as many OpenMP threads as torch would use there. The blocks of a model
share what follows from the arguments of a call (`EncoderSteps`), so only one thread may run them at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_double, c_int64, c_void_p
from enum import IntEnum
from typing import cast

import torch
from torch import Tensor, nn

from cluster.errors import InternalError
from cluster.model.cpu.library import Kernels, fields
from cluster.model.cpu.modules import PackedWeights, pointer
from cluster.model.layers.blocks import BlockParts
from cluster.model.layers.parts import epsilon_of

_NUM_KEPT_STEPS = 2  # windows and whole images alternate in a tower


class Activation(IntEnum):
    """Mirrors `Activation` of encoder_layer.cpp."""

    GATED = 0
    GELU = 1
    GELU_TANH = 2
    QUICK_GELU = 3


class _EncoderLayer(ctypes.Structure):
    """Mirrors `EncoderLayer` of encoder_layer.cpp."""

    _fields_ = (
        *fields(c_void_p, "qkv out up down attention_norm attention_shift mlp_norm mlp_shift"),
        *fields(c_int64, "heads head_width activation is_bf16"),
        *fields(c_double, "attention_epsilon mlp_epsilon scale"),
    )


class _EncoderStep(ctypes.Structure):
    """Mirrors `EncoderStep` of encoder_layer.cpp."""

    _fields_ = (*fields(c_void_p, "starts visible cos sin"), *fields(c_int64, "sequences num_rows threads"))


class EncoderSteps:
    """What the blocks of towers are told about the rows of a call; made by the first block of the call that
    attends to these sequences.

    A step is found again by the tensors it was made from. It keeps them, so no other tensor has their
    identity."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[tuple[Tensor | None, ...], _EncoderStep, tuple], ...] = ()

    def packed(self, num_rows: int, starts: Tensor, rotary: tuple[Tensor, Tensor] | None) -> _EncoderStep:
        """starts: [sequences + 1] first row of each sequence. rotary: cos and sin, [rows, head width]."""
        cos, sin = rotary or (None, None)
        return self._find((starts, cos, sin), num_rows, lambda: starts, lambda: None)

    def padded(self, sequences: int, length: int, mask: Tensor | None) -> _EncoderStep:
        """Sequences of one length. mask: None, or [sequences, 1, 1 or length, length] bool, the same for all
        rows of a sequence."""
        return self._find(
            (mask, None, None),
            sequences * length,
            lambda: torch.arange(sequences + 1) * length,
            lambda: None if mask is None else _visible(mask, sequences, length),
        )

    def _find(
        self,
        keys: tuple[Tensor | None, ...],
        num_rows: int,
        starts: Callable[[], Tensor],
        visible: Callable[[], Tensor | None],
    ) -> _EncoderStep:
        threads = torch.get_num_threads()
        for known, step, _ in self._kept:
            same = all(a is b for a, b in zip(known, keys, strict=True)) and keys[0] is not None
            if same and step.threads == threads and step.num_rows == num_rows:
                return step
        new_starts = starts().int().contiguous()
        if new_starts.ndim != 1 or int(new_starts[0]) != 0 or int(new_starts[-1]) != num_rows:
            raise InternalError(f"the sequences of an encoder call do not cover its {num_rows} rows")
        rotary = [None if key is None else key.float().contiguous() for key in keys[1:]]
        tensors = (new_starts, visible(), *rotary)
        step = _EncoderStep(*map(pointer, tensors), len(new_starts) - 1, num_rows, threads)
        self._kept = ((keys, step, tensors), *self._kept)[:_NUM_KEPT_STEPS]
        return step


def _visible(mask: Tensor, sequences: int, length: int) -> Tensor:
    """[sequences * length] bool: which rows the others see."""
    fits = mask.dtype is torch.bool and mask.ndim == 4 and mask.shape[1] == 1 and mask.shape[-1] == length
    if not fits or not bool((mask == mask[:, :, :1]).all()):
        raise InternalError(f"a native encoder layer cannot use an attention mask {mask.shape}, {mask.dtype}")
    return mask[:, 0, 0].expand(sequences, length).contiguous()


class NativeEncoderLayer:
    """Takes the place of a block's `forward`. Holds a packed copy of all weights."""

    def __init__(
        self, parts: BlockParts, activation: Activation, kernels: Kernels, steps: EncoderSteps, *,
        returns_tuple: bool
    ):  # fmt: skip
        up, gate_up = parts.up[0], parts.up[1] if len(parts.up) == 2 else None
        weights = (
            PackedWeights(kernels, _joined_weight(parts.projections), bias=_joined_bias(parts.projections)),
            PackedWeights(kernels, parts.out.weight, bias=parts.out.bias),
            PackedWeights(
                kernels, up.weight, up=None if gate_up is None else gate_up.weight, bias=up.bias,
                up_bias=None if gate_up is None else gate_up.bias,
            ),
            PackedWeights(kernels, parts.down.weight, bias=parts.down.bias),
        )  # fmt: skip
        norms = (parts.attention_norm, parts.mlp_norm)
        kept = [_kept(norm, name) for norm in norms for name in ("weight", "bias")]
        self._kept = (weights, kept)
        self._layer = _EncoderLayer(
            *(packed.address for packed in weights), *map(pointer, kept), parts.num_heads, parts.head_width,
            activation, parts.dtype == torch.bfloat16,
            *(cast(float, epsilon_of(norm)) for norm in norms), parts.head_width**-0.5,
        )  # fmt: skip
        self._address = ctypes.addressof(self._layer)
        self._dtype, self._hidden, self._width = parts.dtype, parts.hidden_size, parts.head_width
        self._steps = steps
        self._argument_names, self._returns_tuple = parts.arguments, returns_tuple
        self._run: Callable[..., None] = kernels.cdll.encoder_layer

    def __call__(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor | tuple[Tensor]:
        """[rows, hidden] with `cu_seqlens`, or [sequences, length, hidden], to the same shape. Blocks."""
        kwargs.update(zip(self._argument_names, args, strict=False))
        x = hidden_states.contiguous()
        if x.dtype is not self._dtype or x.shape[-1] != self._hidden:
            raise InternalError(
                f"a native encoder layer needs {self._hidden} {self._dtype} values, not {x.shape}, {x.dtype}"
            )
        step = self._step(x, kwargs)
        y = torch.empty_like(x)
        if x.numel():
            self._run(self._address, ctypes.addressof(step), x.data_ptr(), y.data_ptr())
        return (y,) if self._returns_tuple else y

    def _step(self, x: Tensor, kwargs: dict[str, object]) -> _EncoderStep:
        starts = cast("Tensor | None", kwargs.get("cu_seqlens"))
        rotary = cast("tuple[Tensor, Tensor] | None", kwargs.get("position_embeddings"))
        mask = cast("Tensor | None", kwargs.get("attention_mask"))
        if starts is None and x.ndim == 3 and rotary is None:
            return self._steps.padded(*x.shape[:2], mask)
        if starts is None or x.ndim != 2 or mask is not None:
            raise InternalError("a native encoder layer needs packed rows, or sequences of equal length")
        if rotary is not None and any(part.shape != (len(x), self._width) for part in rotary):
            raise InternalError(f"a native encoder layer cannot use a rotary embedding of {rotary[0].shape}")
        return self._steps.packed(len(x), starts, rotary)


def _joined_weight(linears: Sequence[nn.Linear]) -> Tensor:
    return torch.cat([linear.weight for linear in linears])


def _joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(linear.bias is None for linear in linears):
        return None
    biases = [
        torch.zeros(linear.out_features, dtype=linear.weight.dtype) if linear.bias is None else linear.bias
        for linear in linears
    ]
    return torch.cat(biases)


def _kept(norm: nn.Module, name: str) -> Tensor | None:
    value = getattr(norm, name, None)
    return None if value is None else cast(Tensor, value).detach().contiguous()
