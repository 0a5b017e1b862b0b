"""What the experts of a model take of a step's memory."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

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
    rows = (_row_bytes(down, config.hidden_size) for down in _down_projections(text))
    return num_chosen * max(rows, default=0)


def _down_projections(text: nn.Module) -> Iterator[Tensor]:
    for module in text.modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.ndim == 3:
            yield down.to_local() if isinstance(down, DTensor) else down


def _row_bytes(down: Tensor, hidden_size: int) -> int:
    """down: [experts, hidden, inner] or [experts, inner, hidden], with this rank's part of the inner."""
    _, rows, columns = down.shape
    inner = columns if rows == hidden_size else rows
    return max(hidden_size + 4 * inner, 4 * hidden_size) * down.element_size()
