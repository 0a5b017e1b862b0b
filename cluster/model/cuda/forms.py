"""What a norm or an activation computes: its module is compared with formulas in plain torch, which round as
our kernels do. So no kernel is compiled for a form that a model does not have. Runs while a model is
loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cluster.model.cuda.layer_calls import ActivationKind, GateActivation, Norm, NormForm
from cluster.model.layers.parts import epsilon_of

_TOLERANCE = 1e-2  # relative, by the 2-norm; bfloat16 has 8 bits
_QUICK_GELU = 1.702
_NUM_ROWS = 4
_WIDTH = 256  # of what activations are given

Form = TypeVar("Form")

_SCALED: dict[NormForm, Callable[[Tensor, Tensor], Tensor]] = {  # (x / rms in float32, weight) → y
    NormForm.ROUNDED: lambda scaled, weight: weight * scaled.to(weight.dtype),
    NormForm.FLOAT: lambda scaled, weight: (weight.float() * scaled).to(weight.dtype),
    NormForm.PLUS_ONE: lambda scaled, weight: ((1 + weight.float()) * scaled).to(weight.dtype),
}
_ACTIVATIONS: tuple[tuple[GateActivation, Callable[[Tensor], Tensor]], ...] = (
    (GateActivation(ActivationKind.SILU), F.silu),
    (GateActivation(ActivationKind.GELU), F.gelu),
    (GateActivation(ActivationKind.GELU_TANH), lambda x: F.gelu(x, approximate="tanh")),
    (GateActivation(ActivationKind.SILU, alpha=_QUICK_GELU), lambda x: x * torch.sigmoid(_QUICK_GELU * x)),
)


def norm_of(module: nn.Module) -> Norm | None:
    """Returns the norm as the kernels take it; None: the module computes something else."""
    weight, epsilon = module.get_parameter("weight"), cast(float, epsilon_of(module))
    x = _random(weight, weight.numel())
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    found = _closest(module(x), [(form, formula(scaled, weight)) for form, formula in _SCALED.items()])
    return None if found is None else Norm(weight.detach(), epsilon, found)


def activation_of(module: nn.Module, like: Tensor) -> GateActivation | None:
    """`like`: of the dtype and on the device that the module works with."""
    x = 3 * _random(like, _WIDTH)
    return _closest(module(x), [(activation, formula(x)) for activation, formula in _ACTIVATIONS])


def _closest(actual: Tensor, candidates: list[tuple[Form, Tensor]]) -> Form | None:
    """The first of least error."""
    wanted = actual.float()
    errors = [float((numbers.float() - wanted).norm()) for _, numbers in candidates]
    least = min(errors)
    return candidates[errors.index(least)][0] if least <= _TOLERANCE * float(wanted.norm()) else None


def _random(like: Tensor, width: int) -> Tensor:
    numbers = torch.randn(_NUM_ROWS, width, generator=torch.Generator().manual_seed(0))
    return numbers.to(like.device, like.dtype)
