"""What kernels that are launched early (`early`) do first. Importing needs triton."""

from __future__ import annotations

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]


@triton.jit
def let_next_begin(EARLY: tl.constexpr):
    """Programs of the next kernel may begin once all of this one have come here. Not before a kernel whose
    grid is as many programs as the device holds at once: where others run, its programs are spread unevenly,
    and stay so."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(EARLY: tl.constexpr):
    """Returns when the kernel before this one has ended and its writes are seen. All programs call it."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(EARLY: tl.constexpr):
    """Both: of a kernel that reads nothing before."""
    let_next_begin(EARLY)
    wait_for_last(EARLY)
