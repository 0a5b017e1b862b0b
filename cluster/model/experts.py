"""What the experts of a model take of a step's memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from cluster.model.half_files import own_share
from cluster.model.layers.codes import CodedExperts

_CHOSEN = ("num_experts_per_tok", "moe_topk")  # names that families use for the experts of a token
# model types whose every expert computes every token, rows of zeros where the token has not chosen it
_ALL_COMPUTE = ("llama4_text",)


def expert_row_bytes(text: nn.Module, config: PreTrainedConfig) -> int:
    """The most bytes that are held at once for a token in transformers' grouped products; 0: the model has no
    experts. Each expert that a token has chosen gets a row of its own, also on ranks that do not have this
    expert. At first there are the rows and two products with gate and up, then four times the rows."""
    num_chosen = next((count for name in _CHOSEN if (count := getattr(config, name, None))), 1)
    if config.model_type in _ALL_COMPUTE:
        num_chosen = config.num_local_experts
    itemsize = next(text.parameters()).element_size()
    rows = (_row_bytes(inner, config.hidden_size, itemsize) for inner in _inner_widths(text, config))
    return num_chosen * max(rows, default=0)


def _inner_widths(text: nn.Module, config: PreTrainedConfig) -> Iterator[int]:
    """Columns of experts' second matrices, of this rank's part."""
    for module in text.modules():
        if isinstance(coded := module._modules.get("down_proj"), CodedExperts):
            yield coded.codes.width
        down = module._parameters.get("down_proj")
        if down is not None and down.ndim == 3:
            # [experts, hidden, inner] or [experts, inner, hidden]
            _, rows, columns = own_share(down).shape
            yield columns if rows == config.hidden_size else rows


def _row_bytes(inner: int, hidden_size: int, itemsize: int) -> int:
    return max(hidden_size + 4 * inner, 4 * hidden_size) * itemsize
