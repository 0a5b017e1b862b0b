"""Sizes and tensors as our Triton kernels take them."""

from __future__ import annotations

from torch import Tensor

from cluster.model.kv_format import PlainRows, QuantisedRows, RowStore


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def tensors_of(store: RowStore) -> tuple[Tensor, Tensor | None]:
    """Contents [num_blocks, block_size, Hk, width], and their scales if there are any."""
    match store:
        case PlainRows(data):
            return data, None
        case QuantisedRows(codes, scales):
            return codes, scales
    raise TypeError(f"no kernel reads {type(store).__name__}")
