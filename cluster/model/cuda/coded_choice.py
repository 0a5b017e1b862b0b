"""Which linears and experts of a model compute from their codes on this GPU: those whose products are the
products of the plain weight. The others become plain, and the log names them. Runs once, on the loading
thread; takes seconds, most of it for compiling."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface

from cluster.model.collectives import Collectives
from cluster.model.cuda.coded_products import CODED_ROWS, whole_product
from cluster.model.cuda.expert_products import MANY_ROWS, experts_forward
from cluster.model.cuda.experts import local_parameters
from cluster.model.layers.codes import CodedExperts, CodedKernels, CodedLinear, ExpertsForward
from cluster.model.rank_linears import without_codes

logger = logging.getLogger(__name__)

CODED_KERNELS = CodedKernels(whole_product, experts_forward)
_ROWS = (1, 2, 17, CODED_ROWS + 1)  # each by another kernel
_NUM_COLUMNS = 16  # whose weights are compared one by one
# Relative, by the 2-norm. Sums of 16 bit numbers are rounded once, and of many rows the weights, too.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 1e-2}


_EXPERTS = "epdg_coded_experts"  # the name by which transformers calls our function
_NUM_CHOSEN = 2  # of the experts that are compared


@torch.inference_mode()
def keep_right_codes(
    model: nn.Module, dtype: torch.dtype, forward: ExpertsForward, collectives: Collectives | None = None
) -> None:
    """All tensors of `model` are on the device. One linear, and one layer's experts, of each form and size is
    compared. forward: of experts. collectives: of a rank: what is wrong on one of them becomes plain on all,
    which call this together."""
    has_linears = _keep_right_linears(model, dtype, collectives)
    if _keep_right_experts(model, dtype, forward, collectives) or has_linears:
        torch.cuda.empty_cache()  # what torch keeps would count as used when the KV cache is planned


def _keep_right_linears(model: nn.Module, dtype: torch.dtype, collectives: Collectives | None) -> bool:
    """Returns whether there are any."""
    linears = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, CodedLinear)
    ]
    faults: dict[object, str | None] = {}
    for _, _, linear in linears:
        if (form := _form(linear)) not in faults:
            faults[form] = _fault(linear, dtype)
            if faults[form] is not None:
                codes = linear.codes
                logger.warning(
                    "codes: %s of %d × %d: dequantised, because %s",
                    codes.kind.name, len(codes.numbers), codes.width, faults[form],
                )  # fmt: skip
    are_right = _right_on_all([faults[_form(linear)] is None for _, _, linear in linears], collectives)
    for (parent, name, linear), is_right in zip(linears, are_right, strict=True):
        if not is_right:
            setattr(parent, name, without_codes(linear, dtype))
    if linears:
        logger.info("codes: %d linears compute from their codes", sum(are_right))
    return bool(linears)


def _right_on_all(are_right: list[bool], collectives: Collectives | None) -> list[bool]:
    """Returns which modules no rank makes plain; all ranks have them in one order."""
    if collectives is None:
        return are_right
    agreed = collectives.all_agree_on(are_right)
    if num_others := sum(own != all_own for own, all_own in zip(are_right, agreed, strict=True)):
        logger.warning("codes: %d modules: dequantised, because they are on another rank", num_others)
    return agreed


def _form(linear: CodedLinear) -> object:
    return linear.codes.form, linear.bias is None


def _fault(linear: CodedLinear, dtype: torch.dtype) -> str | None:
    """Why it must not be used; None: it is right. Of a rank, its own part of the product is compared."""
    device, width = linear.numbers.device, linear.codes.width
    weight = linear.codes.plain(torch.float32)
    bias = None if linear.bias is None else linear.bias.float()
    generator = torch.Generator().manual_seed(0)
    for num_rows in _ROWS:
        x = torch.randn(num_rows, width, generator=generator).to(device, dtype)
        expected = F.linear(x.float(), weight, bias)
        if (fault := _fault_of_rows(partial(linear.multiply, x), expected, dtype)) is not None:
            return fault
    return (
        None if _has_right_numbers(linear, weight, bias, dtype) else "its numbers are not those of its codes"
    )


def _has_right_numbers(linear: CodedLinear, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether some columns of the weight are right bit by bit. A sum hides a number that is nearly right, as
    the smallest ones are that become zero. weight, bias: float32."""
    width = linear.codes.width
    columns = torch.arange(0, width, -(-width // _NUM_COLUMNS), device=weight.device)
    found = linear.multiply(F.one_hot(columns, width).to(dtype))  # by a kernel of those that were compared
    once = weight[:, columns].T
    twice = once.to(dtype).float()  # weights of short groups are rounded before a bias is added
    sums = (each if bias is None else each + bias for each in (once, twice))
    return any(torch.equal(found, each.to(dtype)) for each in sums)


def _fault_of_rows(multiply: Callable[[], Tensor], expected: Tensor, dtype: torch.dtype) -> str | None:
    """Why a product must not be used, by one of some rows; None: it is right."""
    try:
        error = float((multiply().float() - expected).norm() / expected.norm())
    except Exception as error:  # compilers raise what they like; a device that broke raises it again
        return f"its kernel for {len(expected)} rows fails: {error}"
    if not error <= _TOLERANCES[dtype]:  # also for NaN
        return f"its product of {len(expected)} rows is wrong by {error:.1%}"
    return None


def _keep_right_experts(
    model: nn.Module, dtype: torch.dtype, forward: ExpertsForward, collectives: Collectives | None
) -> bool:
    """Returns whether there are any."""
    found: list[tuple[Any, dict[str, CodedExperts], object]] = []
    faults: dict[object, str | None] = {}
    for experts in model.modules():
        coded = {name: each for name, each in experts.named_children() if isinstance(each, CodedExperts)}
        if not coded:
            continue
        form = (type(experts), *(each.codes.form for each in coded.values()))
        found.append((experts, coded, form))
        if form not in faults:
            with local_parameters(experts):
                faults[form] = fault_of_experts(experts, dtype, forward)
            if faults[form] is not None:
                logger.warning(
                    "codes: %d %s of %s: dequantised, because %s",
                    len(coded["down_proj"]), type(experts).__name__, coded["down_proj"].codes.kind.name,
                    faults[form],
                )  # fmt: skip
    are_right = _right_on_all([faults[form] is None for _, _, form in found], collectives)
    for (experts, coded, _), is_right in zip(found, are_right, strict=True):
        if is_right:
            _call(experts, forward)
        else:
            for name, each in coded.items():
                _make_plain(experts, name, each, dtype)
    if found:
        logger.info("codes: the experts of %d layers compute from their codes", sum(are_right))
    return bool(found)


def _call(experts: nn.Module, forward: ExpertsForward) -> None:
    own: Any = experts
    ExpertsInterface.register(_EXPERTS, forward)
    own.config = copy.copy(own.config)
    own.config._experts_implementation = _EXPERTS


def fault_of_experts(experts: nn.Module, dtype: torch.dtype, forward: ExpertsForward) -> str | None:
    """Why they must not compute from their codes, by a few of them; None: they are right."""
    down: Any = experts.down_proj
    num_experts, width, device = len(down), down.num_outputs, down.numbers.device
    compared = sorted({0, num_experts // 3, num_experts // 2, num_experts - 1})
    num_chosen = min(_NUM_CHOSEN, len(compared))
    generator = torch.Generator().manual_seed(0)
    many = () if dtype == torch.float32 else (MANY_ROWS * num_experts // num_chosen,)  # by other tiles
    for num_tokens in (1, 17, *many):
        scores = torch.rand(num_tokens, len(compared), generator=generator)
        chosen = torch.tensor(compared)[scores.topk(num_chosen).indices].to(device)
        x = torch.randn(num_tokens, width, generator=generator).to(device, dtype)
        weights = torch.rand(num_tokens, num_chosen, generator=generator).to(device, dtype)
        expected = _plain_forward(experts, x, chosen, weights, compared)
        multiply = partial(forward, experts, x, chosen, weights)
        if (fault := _fault_of_rows(multiply, expected, dtype)) is not None:
            return fault
    return None


def _plain_forward(
    experts: nn.Module, x: Tensor, chosen: Tensor, weights: Tensor, compared: list[int]
) -> Tensor:
    """What transformers computes with plain weights of x's dtype, in float32, one expert after the other."""
    own: Any = experts
    name = "gate_up_proj" if own.has_gate else "up_proj"
    out = torch.zeros(x.shape, device=x.device)
    for expert in compared:
        first, second = (
            getattr(own, each).of(expert).plain(x.dtype).float() for each in (name, "down_proj")
        )  # fmt: skip
        first_bias, bias = (
            getattr(own, f"{each}_bias")[expert].float() if own.has_bias else None
            for each in (name, "down_proj")
        )
        token, place = (chosen == expert).nonzero(as_tuple=True)
        rows = F.linear(x[token].float(), first, first_bias)
        rows = own._apply_gate(rows) if own.has_gate else own.act_fn(rows)
        products = F.linear(rows, second, bias) * weights[token, place, None].float()
        out.index_add_(0, token, products)
    return out


def _make_plain(experts: nn.Module, name: str, coded: CodedExperts, dtype: torch.dtype) -> None:
    own: Any = experts
    shape = len(coded), coded.num_outputs, coded.codes.width
    plain = torch.empty(shape, dtype=dtype, device=coded.numbers.device)
    for expert, matrix in enumerate(plain):
        matrix.copy_(coded.of(expert).plain(dtype))
    delattr(experts, name)
    turned = plain.transpose(1, 2).contiguous() if own.is_transposed else plain
    own.register_parameter(name, nn.Parameter(turned, requires_grad=False))
