"""Lets the attention of packed vision and sound towers make one launch for all segments.

transformers' packed towers split Q, K and V at the segments, for which the host reads their lengths, and call
attention once for each segment. If the name of their attention holds "flash", they call it once and hand over
where the segments begin. So our function has such a name, and each packed attention gets a copy of its
configuration with that name. All else, the tower's own masks and configuration too, stays as it was.

An attention is packed if it takes `cu_seqlens`, and no part of it does or is a fused block, which attends
itself (`tower_blocks`). It is run over the same random rows
before and after; it keeps our function only if both agree. What does not is named in the log.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from cluster.config.machine import has_triton
from cluster.model.cuda.packed_attention import MAX_WIDTH, PackedAttention
from cluster.model.cuda.tower_blocks import is_fused
from cluster.model.layers.trial import ENCODER_TOLERANCES, agree

logger = logging.getLogger(__name__)

NAME = "packed_segments_like_flash"  # transformers looks for "flash" in it
_LENGTHS = (70, 5, 1, 64, 130)  # of the trial's segments: less than a tile, a whole one, several
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]
_TAKEN = ("cu_seqlens", "max_seqlen")


def optimise_packed_attention(module: nn.Module, attend: Attend | None = None) -> int:
    """Replaces what packed attention anywhere in `module` calls; returns how many modules were changed. Call
    it in evaluation mode, with the weights on the device that computes. attend: as `PackedAttention.attend`,
    which is the default where triton can be used."""
    found = [part for part in module.modules() if _is_packed(part)]
    if not found:
        return 0
    if attend is None and not has_triton():
        logger.warning("packed attention: one call for each segment, as triton cannot be used")
        return 0
    AttentionInterface.register(NAME, _Interface(attend or PackedAttention().attend))
    with torch.inference_mode():
        reasons = Counter((type(part).__name__, _replace(part)) for part in found)
    for (name, reason), count in reasons.items():
        if reason is None:
            logger.info("packed attention: one launch for all segments in %d %s", count, name)
        else:
            logger.warning("packed attention: %d %s: one call for each segment: %s", count, name, reason)
    return sum(count for (_, reason), count in reasons.items() if reason is None)


class _Interface:
    """The function as transformers calls it: query, key and value [1, heads, T, width]."""

    def __init__(self, attend: Attend):
        self._attend = attend

    def __call__(
        self, _module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, *, scaling: float, cu_seq_lens_q: Tensor, **_: object,
    ) -> tuple[Tensor, None]:  # fmt: skip
        if attention_mask is not None:
            raise ValueError("attention over packed segments takes no mask")
        rows = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return self._attend(*rows, cu_seq_lens_q, scaling)[None], None


def _is_packed(module: nn.Module) -> bool:
    return _takes_segments(module) and not any(
        _takes_segments(part) or is_fused(part) for part in module.modules() if part is not module
    )


def _takes_segments(module: nn.Module) -> bool:
    return "cu_seqlens" in inspect.signature(module.forward).parameters


def _replace(attention: nn.Module) -> str | None:
    """Why it could not be replaced; None: it was."""
    why_not = _unknown_form(attention)
    if why_not is not None:
        return why_not
    own: Any = attention
    before, device = own.config, next(attention.parameters()).device
    ours = copy.copy(before)
    ours._attn_implementation = NAME
    hook = None
    try:
        arguments, expected = _trial(attention)
        own.config = ours
        hook = attention.register_forward_pre_hook(_without_longest, with_kwargs=True)
        if agree(_output(attention, arguments), expected, ENCODER_TOLERANCES[expected.dtype]):
            return None
        reason = "the launch gives other numbers"
    except Exception as error:  # of a family or a compiler: it is not replaced, and the log says why
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # raises if the device itself is broken
        reason = f"{type(error).__name__}: {error}"
    own.config = before
    if hook is not None:
        hook.remove()
    return reason


def _unknown_form(attention: nn.Module) -> str | None:
    parameters = inspect.signature(attention.forward).parameters
    width, first = getattr(attention, "head_dim", None), next(attention.parameters(), None)
    if not set(_TAKEN) <= set(parameters) or not hasattr(attention, "config") or first is None:
        return "its form is not known"
    if getattr(attention, "is_causal", None) is not False:
        return "it may be causal"
    if not isinstance(width, int) or width > MAX_WIDTH:
        return f"heads of {width} channels"
    return None if first.dtype in ENCODER_TOLERANCES else f"it computes in {first.dtype}"


def _trial(attention: nn.Module) -> tuple[dict[str, Any], Tensor]:
    """What the attention is called with, and what it gives by itself."""
    linear = next(part for part in attention.modules() if isinstance(part, nn.Linear))
    device, generator = linear.weight.device, torch.Generator().manual_seed(0)
    starts = torch.tensor([0, *_LENGTHS]).cumsum(0)
    rows = torch.randn(int(starts[-1]), linear.in_features, generator=generator)
    arguments: dict[str, Any] = {
        "hidden_states": rows.to(device, linear.weight.dtype), "cu_seqlens": starts.int().to(device)
    }  # fmt: skip
    if "position_embeddings" in inspect.signature(attention.forward).parameters:
        angles = torch.randn(len(rows), attention.head_dim, generator=generator)  # type: ignore[arg-type]
        arguments["position_embeddings"] = (angles.cos().to(device), angles.sin().to(device))
    try:
        return arguments, _output(attention, arguments)
    except ValueError:  # HunYuan-VL's wants a batch of one, and a mask
        arguments |= {"hidden_states": arguments["hidden_states"][None], "attention_mask": None}
        return arguments, _output(attention, arguments)


def _output(attention: nn.Module, arguments: dict[str, Any]) -> Tensor:
    result = attention(**arguments)
    return result[0] if isinstance(result, tuple) else result


def _without_longest(
    _attention: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A number in place of the longest segment, which we do not use and transformers would ask the device
    for."""
    return args, {**keywords, "max_seqlen": 0}
