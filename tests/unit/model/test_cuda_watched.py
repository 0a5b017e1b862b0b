"""What Triton's interpreter does not mind, and a GPU does, is found (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("wants TRITON_INTERPRET=1", allow_module_level=True)


@triton.jit
def right(x, out):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0)))


@triton.jit
def to_one_place(x, out):
    tl.store(out, tl.load(x + tl.program_id(0)))


@triton.jit
def from_a_neighbour(x, out):
    tl.store(x + tl.program_id(0), tl.load(x + (tl.program_id(0) + 1) % 4))


@triton.jit
def beyond(x, out):
    tl.store(out + tl.program_id(0), tl.load(x + tl.program_id(0) + 1))


@triton.jit
def read_again(x, out):
    tl.store(out + tl.program_id(0), 1.0)
    tl.store(x + tl.program_id(0), tl.load(out + tl.program_id(0)))


@triton.jit
def in_place(x, out):
    tl.store(x + tl.program_id(0), tl.load(x + tl.program_id(0)) + 1.0)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (right, None), (to_one_place, "two programs write the same"), (beyond, "leaves the tensors"),
        (from_a_neighbour, "reads what another one writes"), (read_again, "reads what it has written"),
        (in_place, "writes what it has read"),
    ],
    ids=lambda each: each if isinstance(each, str) else getattr(each, "__name__", "nothing"),
)  # fmt: skip
def test_a_launch_that_a_gpu_may_get_wrong_fails(kernel, fault: str | None) -> None:
    x, out = torch.arange(5.0)[:4], torch.zeros(4)
    if fault is None:
        kernel[(4,)](x, out)
        assert torch.equal(out, x)
        return
    with pytest.raises(Exception, match=fault):  # the interpreter hides the kind of what is raised in it
        kernel[(4,)](x, out)
