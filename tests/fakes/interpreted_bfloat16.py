"""Triton's interpreter multiplies the bits of bfloat16 numbers as integers, and cuts float32 where it should
round. Inside of `rounded_bfloat16()` it does what GPUs do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch


@contextmanager
def rounded_bfloat16() -> Iterator[None]:
    from triton import language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def wide(each: Any) -> Any:
        if each.dtype.scalar != tl.bfloat16:
            return each
        return TensorHandle((each.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(self: Any, source: Any, kind: Any) -> Any:
        if (source.dtype.scalar, kind.scalar) != (tl.float32, tl.bfloat16):
            return cast(self, source, kind)
        bits = torch.from_numpy(np.array(source.data)).bfloat16().view(torch.int16).numpy().view(np.uint16)
        return TensorHandle(bits, tl.bfloat16)

    def product(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, wide(a), wide(b), *rest)

    with mock.patch.multiple(InterpreterBuilder, create_dot=product, cast_impl=rounded):
        yield
