"""What multiplies few tokens with the matrices of a model on this GPU: our kernels, as one of `CANDIDATES`
cuts them, or the library, whichever is fastest. Each matrix of a size is read once, from a recorded graph,
after the cache was overwritten: as in a step of answers it comes from the device's memory, and no launch
waits for the host. The log says what was chosen.

Runs once, when the model is loaded, on the loading thread, while no other uses the device. Takes seconds,
most of it for compiling.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.capture import Replay, capture_cuda
from cluster.model.cuda.layer_calls import summed
from cluster.model.cuda.products import CANDIDATES, ProductChoice, ProductCut, product_of_few

logger = logging.getLogger(__name__)

NUM_ROUNDS = 5
TOLERANCE = 1e-2  # relative, by the 2-norm, of products in 16 bits that are rounded once


@dataclass(frozen=True)
class TrialProduct:
    """weight [M, K] and bias [M] of a product; is_whole as in `product`."""

    weight: Tensor
    bias: Tensor | None
    is_whole: bool = False

    def times(self, x: Tensor, cut: ProductCut | None) -> Tensor:
        """Returns shares."""
        if cut is None:
            return F.linear(x, self.weight, self.bias)[None]
        return product_of_few(x, self.weight, self.bias, cut, is_whole=self.is_whole)


def replayed_s(replay: Replay) -> float:
    """The shortest of some rounds, as the device counts them: what else runs there makes a round longer."""
    times = []
    for _ in range(NUM_ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def measure(
    matrices: Sequence[TrialProduct], choice: ProductChoice, seconds: Callable[[Replay], float] = replayed_s
) -> None:  # fmt: skip
    """Tells `choice` what it found. Matrices of other types than 16 bits stay the library's. Where nothing
    can be recorded, or memory is short, the rest stays unmeasured, and the log says so."""
    try:
        _measure(matrices, choice, seconds)
    except RuntimeError as error:
        logger.warning("products: not measured: %s", error)
    torch.cuda.empty_cache()  # what torch keeps would count as used when the KV cache is planned


@torch.inference_mode()
def _measure(
    matrices: Sequence[TrialProduct], choice: ProductChoice, seconds: Callable[[Replay], float]
) -> None:  # fmt: skip
    by_size: defaultdict[tuple[int, int], list[TrialProduct]] = defaultdict(list)
    for matrix in matrices:
        if matrix.weight.dtype.itemsize == 2:
            num_outputs, width = matrix.weight.shape
            by_size[num_outputs, width].append(matrix)
    if not by_size:
        return
    device = matrices[0].weight.device
    # twice the cache: nothing of a matrix is left there
    cache_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(cache_bytes, dtype=torch.uint8, device=device)
    capture, generator = capture_cuda(), torch.Generator().manual_seed(0)
    for (num_outputs, width), same in by_size.items():
        chosen: dict[int, ProductCut | None] = {}
        for limit, candidates in CANDIDATES.items():
            x, *others = (
                torch.randn(limit, width, generator=generator).to(device, same[0].weight.dtype)
                for _ in range(1 + len(candidates))
            )
            tried = zip(candidates, others, strict=True)
            right = [cut for cut, other in tried if _is_right(same[0], other, cut)]
            found_s = {
                cut: seconds(capture(partial(_multiply_all, same, x, cut, scratch))) for cut in (None, *right)
            }
            chosen[limit] = min(found_s, key=lambda cut, found_s=found_s: found_s[cut])
        choice.set(same[0].weight, chosen)
        ways = (f"up to {limit} tokens by {cut or 'the library'}" for limit, cut in chosen.items())
        logger.info("products: %d × %d: %s", num_outputs, width, ", ".join(ways))


def _multiply_all(same: Sequence[TrialProduct], x: Tensor, cut: ProductCut | None, scratch: Tensor) -> Tensor:
    """Each matrix once. Shares are summed by a launch that any product has behind it."""
    last = scratch.zero_()
    for matrix in same:
        last = summed(matrix.times(x, cut), x.dtype)
    return last


def _is_right(matrix: TrialProduct, x: Tensor, cut: ProductCut) -> bool:
    """Whether it compiles here, and gives the library's product. x: which has not been multiplied yet; a
    launch that writes nothing would find the right numbers in memory that is used again."""
    try:
        found = matrix.times(x, cut).float().sum(0)
        expected = matrix.times(x, None)[0].float()
        error = float((found - expected).norm() / expected.norm())
    except Exception as raised:  # compilers raise what they like; a device that broke raises it again
        logger.warning("products: %s is left out: %s", cut, raised)
        return False
    if error <= TOLERANCE:
        return True
    logger.warning("products: %s is left out: its numbers are wrong by %.1f %%", cut, 100 * error)
    return False
