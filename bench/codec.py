"""The wire codecs and the checksum: speed against memcpy on one core, and what they do to attention.

    python -m bench.codec [--dtypes bf16,f16,f32] [--repeats 15] [--megabytes 96] [--heads 8] [--width 128]

Speed: buffers larger than the last cache, groups of scattered blocks, one thread, one call for all of them.
The functions are called alternately; the table shows medians of GB/s of raw KV, and their ratio to memcpy of
the same raw bytes in the same rounds.

Error: |out' - out| / |out| of attention over 1024 tokens, mean of 4 draws. The draws are:
* Gaussian K and V;
* one K channel of 16 is twenty times larger and the query's channel as much smaller, so the scores stay as
  they are;
* the K channel is larger and the query is not smaller, so the outliers dominate the scores.
"int4 / 32": int4 with one scale of V for 32 channels.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.arguments import parser_of
from bench.rounds import in_turns
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from cluster.native.library import load
from kv_transfer.codecs.checksum import checksum
from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.native import SOURCES
from kv_transfer.codecs.quantisation import CODECS, CodecName, dequantise, quantise

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LAYERS = 4
BLOCK_SIZE = 16
OUTLIER = 20.0
TOKENS = 1024
DRAWS = 4


def encode_groups(
    codec: Codec, kv: BlockMemory, blocks: Any, wire: BlockMemory, wire_blocks: Any, layers: Any = None
) -> None:
    codec.code(kv, wire, [codec.job(kv, blocks, wire, wire_blocks, layers)], encodes=True)


def decode_groups(codec: Codec, wire: BlockMemory, wire_blocks: Any, kv: BlockMemory, blocks: Any) -> None:
    codec.code(kv, wire, [codec.job(kv, blocks, wire, wire_blocks)], encodes=False)


def speeds(dtype: torch.dtype, heads: int, width: int, raw_bytes: int, repeats: int) -> dict[str, float]:
    """GB/s of raw KV per function."""
    layout = MemoryLayout(kv_segments([(heads, width)] * (2 * LAYERS), BLOCK_SIZE, dtype))
    per_group = 64 // BLOCK_SIZE
    groups = max(1, raw_bytes // (layout.block_bytes * per_group))
    kv, arrived = BlockMemory(layout, groups * per_group), BlockMemory(layout, groups * per_group)
    for segment in kv.segments:
        segment.normal_()
    blocks = np.random.default_rng(0).permutation(kv.num_blocks).reshape(groups, per_group)
    wire_blocks = np.arange(groups)
    functions: dict[str, Callable[[], object]] = {"memcpy": partial(arrived.buffer.copy_, kv.buffer)}
    for name in CODECS:
        codec = Codec(layout, name)
        wire = BlockMemory(codec.wire_layout, groups)
        functions[f"{name} encode"] = partial(encode_groups, codec, kv, blocks, wire, wire_blocks)
        functions[f"{name} decode"] = partial(decode_groups, codec, wire, wire_blocks, arrived, blocks)
    functions["checksum"] = partial(checksum, kv.descriptors(range(kv.num_blocks)))
    times = in_turns(list(functions.values()), rounds=repeats)
    medians = dict(zip(functions, map(statistics.median, times), strict=True))
    return {name: kv.buffer.numel() / 1e9 / seconds for name, seconds in medians.items()}


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[Q, Hq, Dv] float32; every query sees every key."""
    group = query.shape[1] // key.shape[1]
    query, key, value = (rows.float().transpose(0, 1) for rows in (query, key, value))
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    return F.scaled_dot_product_attention(query, key, value).transpose(0, 1)


def attention_error(key: Tensor, value: Tensor, query: Tensor, codec: CodecName, run: int) -> float:
    """key, value [TOKENS, H, D]."""

    def arrived(rows: Tensor, is_key: bool) -> Tensor:
        groups = rows.unflatten(0, (-1, 64))
        return dequantise(quantise(groups, codec, is_key, run), codec, rows.dtype, is_key, run).flatten(0, 1)

    expected = attention(query, key, value)
    actual = attention(query, arrived(key, True), arrived(value, False))
    return float((actual - expected).norm() / expected.norm())


def samples(width: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    key, value, query = (
        torch.randn(TOKENS, 4, width),
        torch.randn(TOKENS, 4, width),
        torch.randn(16, 8, width),
    )
    larger = torch.where(torch.arange(width) % 16 == 0, OUTLIER, 1.0)
    return {
        "Gaussian": (key, value, query),
        "K outliers x20, query / 20": (key * larger, value, query / larger),
        "K outliers x20": (key * larger, value, query),
    }


def print_speeds(arguments: argparse.Namespace) -> None:
    print(
        f"{arguments.heads} heads of {arguments.width}, {arguments.megabytes} MB of raw KV: GB/s (of memcpy)"
    )
    for name in arguments.dtypes.split(","):
        table = speeds(
            DTYPES[name], arguments.heads, arguments.width, arguments.megabytes << 20, arguments.repeats
        )
        cells = (f"{what} {speed:.1f} ({speed / table['memcpy']:.2f})" for what, speed in table.items())
        print(f"{name:5}" + "   ".join(cells), flush=True)


def print_errors() -> None:
    kinds: dict[str, tuple[CodecName, int]] = {
        "int8": ("int8", 64),
        "int4": ("int4", 64),
        "int4 / 32": ("int4", 32),
    }
    print(f"\n{'relative error of attention':40}" + "".join(f"{kind:>12}" for kind in kinds))
    for width in (64, 128):
        draws = [samples(width) for _ in range(DRAWS)]
        for sample in draws[0]:
            means = [
                statistics.fmean(attention_error(*draw[sample], codec, run) for draw in draws)
                for codec, run in kinds.values()
            ]
            print(f"D={width:<4} {sample:33}" + "".join(f"{mean:12.4f}" for mean in means), flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", default="bf16,f16,f32")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=128)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kernels = load(SOURCES)
    print(f"variant {kernels.variant if kernels else 'none: torch and numpy'}, one thread")
    print_speeds(arguments)
    print_errors()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
