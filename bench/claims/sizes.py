"""Bytes, by the product's layouts and arithmetic: KV in INT8, KV sent, what a GPU holds for each phase."""

from __future__ import annotations

import torch

from bench.claims.claim import COUNTED, Claim, Found
from cluster.kvcache.memory import MemoryLayout
from cluster.model.kv_format import KvCacheDtype, kv_segments
from cluster.worker.memory_plan import PATCHES_PER_ROW, step_bytes
from deploy.simulator.hardware import A100, BLOCK_SIZE, H200, MODELS, num_kv_blocks
from kv_transfer.codecs.codec import Codec
from kv_transfer.codecs.quantisation import CODECS, GROUP_TOKENS, CodecName

KV = {"text-0.5b": (24, 2, 64), "vl-7b": (28, 4, 128), "vl-32b": (64, 8, 128)}  # layers, KV heads, width
# Parameters of encoder and language model, their widths, vocabulary, bytes of KV a token.
WHOLE = {
    "Qwen2.5-VL-7B": (0.68e9, 7.6e9, 1280, 3584, 152_064, 57_344),
    "InternVL2-26B": (5.9e9, 19.9e9, 3200, 6144, 92_553, 196_608),
}
CALL_ROWS, STEP_TOKENS, ANSWER_TOKENS, NUM_ANSWERS, CACHE_BYTES = 4096, 2048, 2048, 256, 4 << 30


def layout(model: str, kv_cache_dtype: KvCacheDtype = "auto") -> MemoryLayout:
    """The layout of a block of one group."""
    layers, heads, width = KV[model]
    rows = [(heads, width)] * 2 * layers
    return MemoryLayout(kv_segments(rows, GROUP_TOKENS, torch.bfloat16, kv_cache_dtype))


def kv_int8() -> Found:
    rows, ratio = [], 0.0
    for model, gpu in (("vl-7b", A100), ("vl-7b", H200), ("vl-32b", H200)):
        plain, coded = (layout(model, dtype).block_bytes // GROUP_TOKENS for dtype in ("auto", "int8"))
        ratio, fits = plain / coded, num_kv_blocks(MODELS[model], gpu) * BLOCK_SIZE / ANSWER_TOKENS
        counts = (f"{each:,.0f}" for each in (plain, coded, fits, fits * ratio))
        rows.append((f"{model}, {gpu.name}", *counts, f"{ratio:.2f}"))
    columns = ("model", "bytes a token: 16 bit", "INT8", "requests that fit: 16 bit", "INT8", "×")
    return Found(columns, rows, f"{ratio:.2f} times as many", ratio)


def transfer_volume() -> Found:
    rows: list[list[str]] = []
    ratios: dict[CodecName, list[float]] = {name: [] for name in CODECS}
    for model in KV:
        raw, token_bytes = layout(model), layout(model).block_bytes // GROUP_TOKENS
        for num_tokens in (1000, 4096, 8192):
            num_groups, rest = divmod(num_tokens, GROUP_TOKENS)
            row = [model, f"{num_tokens:,}", f"{num_tokens * token_bytes / 1e6:.1f}"]
            for name, found in ratios.items():
                sent = num_groups * Codec(raw, name, native=None).wire_layout.block_bytes + rest * token_bytes
                found.append(num_tokens * token_bytes / sent)
                row.append(f"{sent / 1e6:.1f} ({found[-1]:.2f})")
            rows.append(row)
    ours = ", ".join(f"{name} {min(found):.2f} to {max(found):.2f}" for name, found in ratios.items())
    columns = ("model", "prompt", "raw, MB", *(f"{name} (÷)" for name in ratios))
    return Found(columns, rows, f"times fewer bytes: {ours}", min(ratios["int8"]))


def memory() -> Found:
    rows, weights, tokens = [], [], []
    for model, (encoder, language, encoder_width, width, vocabulary, kv_bytes) in WHOLE.items():
        call = step_bytes(CALL_ROWS * PATCHES_PER_ROW, encoder_width, 0, 0, 2)
        step = step_bytes(STEP_TOKENS, width, vocabulary, NUM_ANSWERS, 2)
        whole = (2 * (encoder + language), call + step, CACHE_BYTES)
        held = {"EPD": whole, "E": (2 * encoder, call, CACHE_BYTES), "P or D": (2 * language, step, 0)}
        fits = {role: int((0.9 * A100.num_bytes - sum(sizes)) / kv_bytes) for role, sizes in held.items()}
        for role, sizes in held.items():
            left = "–" if role == "E" else f"{fits[role]:,}"
            rows.append((model, role, *(f"{size / 1e9:.1f}" for size in sizes), left))
        weights.append(f"{whole[0] / 2 / encoder:.1f}")
        tokens.append(fits["P or D"] / fits["EPD"])
    ours = f"weights ÷ {' and '.join(weights)} at E, KV × {min(tokens):.2f} and {max(tokens):.2f} at P and D"
    columns = ("model, A100", "worker", "weights, GB", "largest step", "encoder cache", "KV tokens")
    return Found(columns, rows, ours, max(tokens))


BYTES, MEMORY = "INT8 1.88, INT4 3.5 times fewer", "peak ÷ 15 at E, KV × 2.2 (arXiv 2501.05460)"
CLAIMS = {
    "kv_int8": Claim("Requests that fit, KV in INT8", "twice as many", COUNTED, kv_int8, 2.0),
    "transfer_volume": Claim("Fewer bytes of KV sent, INT8", BYTES, COUNTED, transfer_volume, 1.88),
    "memory": Claim("KV that fits without the encoder", MEMORY, COUNTED, memory, 2.2),
}
