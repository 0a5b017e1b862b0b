"""Draws tokens. A drawn token depends only on (logits, parameters, seed, position).

Noise is a counter-based function of (seed, position, token id), without a generator or state. A request
therefore draws the same tokens at every batch size, in every row, on every replica, and after a replay. In
the formula all arithmetic is modulo 2^64, and `mix` is the finalizer of SplitMix64 (Steele, Lea, Flood: "Fast
splittable pseudorandom number generators", 2014):

    row   = mix(mix(seed) + (position + 1) * GAMMA)
    bits  = mix(row + (token_id + 1) * GAMMA) >> 11                 53 bits
    u     = (bits + 0.5) / 2^53                                     in (0, 1): in double, at most 1 - 2^-53
    token = argmax over kept token ids of logit / temperature - log(-log(u))  (Gumbel-max: exact softmax draw)

The filters have transformers' order: temperature, top-k, top-p, min-p.

On the CPU a native kernel draws (`cpu/sampling.cpp`), on a GPU Triton's (`cuda/draw.py`); both compute
logarithms in double only for tokens that can win. Without a compiler torch draws. Triton's kernels also
filter: they keep what `keep_likely` keeps unless a sum of probabilities is within about 1e-5 of a filter's
boundary.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_float, c_int64
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cluster.config.machine import has_triton
from cluster.lost_device import is_device_lost
from cluster.model.cpu import library
from cluster.model.cuda.draw import GREEDY, RECORD, draw_tokens, reading
from cluster.types.request import SamplingParams

logger = logging.getLogger(__name__)
_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
# Logits that are filtered, or drawn by torch, together. Measured on one core with rows of 151,936: torch
# draws 32 rows in 60 ms in such groups and in 393 ms all at once. `python -m bench.kernels` measures the time
# of a row.
_MAX_GROUP_ELEMENTS = 1 << 18
# The same on other devices, where each group costs launches: 128 MiB for each number of 64 bit.
_MAX_DEVICE_ELEMENTS = 1 << 24


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    on_drawn: Callable[[Tensor], None] = lambda tokens: None,
) -> list[int]:
    """One token id per row. logits: [B, V] float32, any device. `positions[i]`: index of the drawn token in
    row i's sequence (prompt + generated). `on_drawn(tokens [B] int64)` is called when the tokens are there
    or, on a GPU, enqueued. Waits for the tokens, and not for what `on_drawn` enqueues."""
    if logits.device.type == "cuda" and _kernels_draw(logits.device):
        tokens = draw_tokens(logits, draw_records(params, positions, logits.shape[-1]))
    else:
        tokens = _sample_by_torch(logits, params, positions)
    read = reading(tokens)
    on_drawn(tokens)
    return read().tolist()


def _sample_by_torch(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Or by the native kernel, on the CPU."""
    sampled = [row for row, p in enumerate(params) if p.temperature > 0]
    has_greedy = len(sampled) < len(params)
    tokens = _greedy_tokens(logits) if has_greedy else logits.new_empty(len(params), dtype=torch.int64)
    keys = {row: _row_key(params[row].seed, positions[row]) for row in sampled}
    native = native_library() if logits.device.type == "cpu" else None
    if native is not None and (plain := [row for row in sampled if not _has_filter(params[row])]):
        temperatures = [params[row].temperature for row in plain]
        tokens[plain] = draw_native(native, logits, plain, temperatures, [keys[row] for row in plain])
        sampled = [row for row in sampled if _has_filter(params[row])]
    for some, scores in _likely(logits, params, sampled):
        tokens[some] = _draw(native, scores, [keys[row] for row in some])
    return tokens


def _likely(
    logits: Tensor, params: Sequence[SamplingParams], rows: Sequence[int]
) -> Iterator[tuple[Sequence[int], Tensor]]:
    """Some of `rows`, and their scores, -inf for tokens that the filters drop; as many together as memory
    and time allow."""
    most = _MAX_GROUP_ELEMENTS if logits.device.type == "cpu" else _MAX_DEVICE_ELEMENTS
    group = max(1, most // logits.shape[-1])
    for start in range(0, len(rows), group):
        some = rows[start : start + group]
        temperature = _column([params[row].temperature for row in some], logits)
        yield some, keep_likely(logits[some] / temperature, [params[row] for row in some])


def draw_records(params: Sequence[SamplingParams], positions: Sequence[int], vocab_size: int) -> np.ndarray:
    """[B] of `cuda.draw.RECORD`: how the kernels draw a token of each row."""
    records = np.zeros(len(params), dtype=RECORD)
    temperatures = np.array([p.temperature for p in params])
    seeds = np.array([p.seed & _MASK for p in params], dtype=np.uint64)
    records["key"] = _row_keys(seeds, np.array(positions, dtype=np.uint64)).view(np.int64)
    with np.errstate(over="ignore"):  # infinite in float32
        records["temperature"] = np.where(temperatures > 0, temperatures, GREEDY)
        records["top_k"] = [p.top_k if 0 < p.top_k < vocab_size else 0 for p in params]
        records["limit"] = [1.0 - p.top_p if p.top_p < 1 else 0.0 for p in params]
        records["min_p"] = [p.min_p if p.min_p > 0 else 0.0 for p in params]
    return records


@cache
def _kernels_draw(device: torch.device) -> bool:
    """Whether Triton's kernels run on this GPU, and draw what torch draws there, with filters and without.
    The first call tries it, when a worker warms up."""
    if not has_triton():
        return False
    plain, both = (
        SamplingParams(temperature=1.0, top_k=k, top_p=p, seed=3) for k, p in ((0, 1.0), (50, 0.9))
    )
    logits, positions = torch.linspace(-3, 3, 9001, device=device).expand(8, -1), range(8)
    try:
        is_equal = all(
            torch.equal(
                draw_tokens(logits, draw_records(params, positions, logits.shape[-1])),
                _sample_by_torch(logits, params, positions),
            )
            for params in ([plain] * 8, [plain, both] * 4)
        )
    except Exception as error:
        if is_device_lost(error):
            raise
        logger.warning("torch draws tokens: our kernels do not run on %s", device, exc_info=True)
        return False
    if not is_equal:
        logger.warning("torch draws tokens: our kernels draw others on %s", device)
    return is_equal


def _greedy_tokens(logits: Tensor) -> Tensor:
    """[B] int64. On the CPU numpy searches, as it has vector instructions for that: one row of 151,936 takes
    0.01 ms, where torch takes 0.13 ms, and no other thread is woken."""
    if logits.device.type != "cpu":
        return logits.argmax(dim=-1)
    return torch.from_numpy(logits.numpy().argmax(axis=-1))


def _has_filter(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _draw(native: ctypes.CDLL | None, scores: Tensor, keys: Sequence[int]) -> Tensor:
    if native is None:
        return draw(scores, keys)
    return draw_native(native, scores, range(len(keys)), [1.0] * len(keys), keys)


def draw(scores: Tensor, keys: Sequence[int]) -> Tensor:
    """[S] int64 token ids. scores: [S, V], -inf for dropped tokens; keys: of the rows' noise."""
    noise = gumbel_noise(torch.tensor(keys, dtype=torch.int64, device=scores.device), scores.shape[-1])
    return (scores.double() + noise).argmax(dim=-1)


def draw_native(
    native: ctypes.CDLL,
    logits: Tensor,
    rows: Sequence[int],
    temperatures: Sequence[float],
    keys: Sequence[int],
) -> Tensor:
    """Equals `draw(logits[rows] / temperatures, keys)`, also for NaN and rows of -inf, without a copy of the
    logits. The token differs only if two sums are closer than double's rounding, because torch has its own
    logarithm. logits: [B, V] float32 on the CPU."""
    logits = logits.float() if logits.stride(-1) == 1 else logits.float().contiguous()
    count = len(rows)
    tokens = torch.empty(count, dtype=torch.int64)
    native.draw_tokens(
        logits.data_ptr(), logits.stride(0), logits.shape[-1], (c_int64 * count)(*rows),
        (c_int64 * count)(*keys),
        (c_float * count)(*temperatures), tokens.data_ptr(), count, torch.get_num_threads(),
    )  # fmt: skip
    return tokens


def native_library() -> ctypes.CDLL | None:
    kernels = library.load()
    return kernels.cdll if kernels else None


def keep_likely(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`scores` [S, V] with -inf for tokens that top-k, top-p or min-p drop. The most probable token always
    stays."""
    vocab_size = scores.shape[-1]
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    if any(k < vocab_size for k in top_k):
        largest = scores.topk(max(k for k in top_k if k < vocab_size), dim=-1).values
        last_kept = torch.tensor(top_k, device=scores.device)[:, None] - 1
        limited = last_kept < vocab_size - 1
        smallest_kept = largest.gather(1, last_kept.clamp(max=largest.shape[1] - 1))
        scores = scores.masked_fill((scores < smallest_kept) & limited, float("-inf"))
    if any(p.top_p < 1 for p in params):
        scores = scores.masked_fill(_outside_top_p(scores, [p.top_p for p in params]), float("-inf"))
    if any(p.min_p > 0 for p in params):
        probs = scores.softmax(dim=-1)
        floor = _column([p.min_p for p in params], scores) * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < floor, float("-inf"))
    return scores


def _outside_top_p(scores: Tensor, top_p: Sequence[float]) -> Tensor:
    """[S, V] bool: tokens outside the smallest set with probability top_p. The sort is stable, so ties are
    dropped in the same order on every machine."""
    ascending, order = _ascending(scores)
    tail = ascending.softmax(dim=-1).cumsum(dim=-1)
    limit = _column([1.0 - p for p in top_p], scores)
    filtered_rows = torch.tensor([p < 1 for p in top_p], device=scores.device)[:, None]
    drop = (tail <= limit) & filtered_rows
    drop[:, -1] = False
    return torch.zeros_like(drop).scatter(1, order, drop)


def _ascending(scores: Tensor) -> tuple[Tensor, Tensor]:
    """As `scores.sort(dim=-1, stable=True)`. On the CPU numpy sorts integers made of score and token id with
    vector instructions, in a seventh of the time of torch's own sort."""
    if scores.device.type != "cpu":
        return scores.sort(dim=-1, stable=True)
    bits = (scores + 0.0).view(torch.int32)  # adding 0 turns -0 into 0
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    keys.bitwise_left_shift_(32).bitwise_or_(torch.arange(scores.shape[-1]))
    keys.numpy().sort(axis=-1)
    order = keys.bitwise_and_(0xFFFFFFFF)
    return scores.gather(1, order), order


def gumbel_noise(row_keys: Tensor, vocab_size: int) -> Tensor:
    """[S, vocab_size] float64 standard Gumbel noise; row_keys: [S] int64 (the bits of an unsigned 64-bit
    key)."""
    token_ids = torch.arange(1, vocab_size + 1, dtype=torch.int64, device=row_keys.device)
    bits = _mix_tensor(row_keys[:, None] + token_ids * _signed(GAMMA))
    uniform = (_shift_right(bits, 11).double() + 0.5) * 2.0**-53
    uniform.clamp_(max=1 - 2.0**-53)  # otherwise the largest rounds to 1
    return uniform.log_().neg_().log_().neg_()


def _row_key(seed: int, position: int) -> int:
    return _signed(_mix(_mix(seed & _MASK) + (position + 1) * GAMMA))


def _row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """`_row_key` of uint64 arrays, whose products wrap modulo 2^64; uint64."""
    return _mix_array(_mix_array(seeds) + (positions + np.uint64(1)) * np.uint64(GAMMA))


def _mix_array(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(MIX_1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(MIX_2)
    return x ^ (x >> np.uint64(31))


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * MIX_1) & _MASK
    x = ((x ^ (x >> 27)) * MIX_2) & _MASK
    return x ^ (x >> 31)


def _mix_tensor(x: Tensor) -> Tensor:
    """`_mix` on int64 tensors: products wrap modulo 2^64."""
    x = (x ^ _shift_right(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _signed(MIX_2)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, count: int) -> Tensor:
    """Logical shift; torch's own shift keeps the sign."""
    return (x >> count) & ((1 << (64 - count)) - 1)


def _signed(x: int) -> int:
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
