"""What the compiler makes of the kernels of a decoder step: registers, spilled bytes, shared memory, how many
programs fit on a multiprocessor, instructions and loads of the inner loop that reads most, and of products
the rate at which they could read if instructions alone took time (`issue`). Needs Triton and no GPU:
`python -m bench.gpu.compiled [--capability 90] [--only REGEX]`.

The launchers are called with tensors of no memory, and their launches compiled instead of launched, so warps,
stages and constants are theirs.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from bench.gpu import matrices
from bench.gpu.issue import CONVERSIONS, PROCESSORS, bound
from bench.gpu.matrices import empty
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, StepTensors
from cluster.model.cuda import adapter_products, coded_products, layer_calls, paged_attention, products
from cluster.model.kv_format import KvCacheDtype, kv_segments, layer_cache

SHARED_BYTES, REGISTERS, WARPS = 228 << 10, 65536, 64  # of one multiprocessor of an H100
# hidden width, query heads, KV heads, width of a head, of the MLP, norms of q and k
MODELS = {
    "0.5B": (896, 14, 2, 64, 4864, False), "7B": (3584, 28, 4, 128, 18944, False),
    "Qwen3-0.6B": (1024, 16, 8, 128, 3072, True),
}  # fmt: skip
STEPS = {"1 answer": (1, 1), "16 answers": (16, 16), "64 answers": (64, 64), "512 prompt tokens": (512, 1)}
_KINDS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int8: "*i8",
    torch.int16: "*i16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


_FIRST_EARLY = 90  # the first capability with early launches


@dataclass(frozen=True)
class Launch:
    what: str
    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]


def launches() -> Iterator[Launch]:
    """Those of one layer, in each model and step, and of other products."""
    import triton

    found: list[tuple[Any, tuple[int, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        found.append((self, grid, dict(zip(self.arg_names, args, strict=False)) | kwargs))

    triton.runtime.jit.JITFunction.run = run
    for module in (layer_calls, products, paged_attention, coded_products, adapter_products):
        module.early = lambda _device: {"EARLY": True, "launch_pdl": True}  # type: ignore[assignment]
    for model in MODELS:
        for step, sizes in STEPS.items():
            for kv_cache_dtype in ("auto", "int8"):
                _layer(model, *sizes, kv_cache_dtype)
                kv = "" if kv_cache_dtype == "auto" else ", INT8 KV"
                for kernel, grid, arguments in found:
                    yield Launch(f"{model}, {step}{kv}", kernel, grid, arguments)
                found.clear()
    for what in matrices.calls():
        for kernel, grid, arguments in found:
            yield Launch(what, kernel, grid, arguments)
        found.clear()


def _layer(model: str, num_tokens: int, num_seqs: int, kv_cache_dtype: KvCacheDtype) -> None:
    hidden, heads, kv_heads, width, inner, has_norms = MODELS[model]
    norm = layer_calls.Norm(empty(hidden), 1e-6)
    of_heads = layer_calls.Norm(empty(width), 1e-6) if has_norms else None
    segments = kv_segments([(kv_heads, width)] * 2, 16, torch.bfloat16, kv_cache_dtype)
    cache = layer_cache(BlockMemory(MemoryLayout(segments), 1), 0)
    x, rows = empty(num_tokens, hidden), empty(num_tokens, heads, width)
    qkv = (heads + 2 * kv_heads) * width
    layer_calls.add_norm(x, products.product(empty(num_tokens, inner), empty(hidden, inner), None), norm)
    shares = products.product(x, empty(qkv, hidden), None)
    rope = layer_calls.Rope(width, query_norm=of_heads, key_norm=of_heads)
    tables = empty(num_tokens, width)
    layer_calls.rope_write(shares, tables, tables, empty(num_tokens, dtype=torch.int32), cache, heads, rope)
    tiles = paged_attention.tiles_for(heads, cache, torch.bfloat16)
    sizes = {"starts": num_seqs + 1, "contexts": num_seqs, "rows": num_seqs}
    names = [field.name for field in dataclasses.fields(StepTensors)]
    given: dict[str, Any] = {
        name: empty(sizes.get(name, num_tokens), dtype=torch.int32) for name in names
    } | {
        "tables": empty(num_seqs, 512, dtype=torch.int32), "block_size": 16,
        "is_decode": num_tokens == num_seqs,
    }  # fmt: skip
    step = StepTensors(**given)
    plan = paged_attention.plan(step, tiles, None)
    layer = LayerAttention(width**-0.5)
    paged_attention.attend(rows, cache, layer, step, plan, tiles, PROCESSORS)
    layer_calls.gate(
        products.product(x, empty(2 * inner, hidden), None), layer_calls.GateActivation(), x.dtype
    )


def compiled(launch: Launch, capability: int) -> Any:
    from triton import compile as compile_source
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        value = launch.arguments.get(name, parameter.default if parameter.has_default else None)
        is_special = not parameter.do_not_specialize
        if capability < _FIRST_EARLY and name == "EARLY":
            value = False
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1 and is_special):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[place,] = _KINDS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if type(value) is int and value % 16 == 0 and is_special:
                attributes[place,] = [["tt.divisibility", 16]]
    options = {name: value for name, value in launch.arguments.items() if name not in launch.kernel.arg_names}
    if capability < _FIRST_EARLY:
        options.pop("launch_pdl", None)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    return compile_source(source, target=GPUTarget("cuda", capability, 32), options=options)


def instructions(made: Any) -> tuple[list[tuple[int, str]], dict[str, int], str]:
    """Address and text of each, addresses of labels, and what cuobjdump says of resources."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        commands = [knobs.nvidia.nvdisasm.path, "-c"], [knobs.nvidia.cuobjdump.path, "-res-usage"]
        code, usage = (
            subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout
            for command in commands
        )
    found, labels, waiting = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            waiting.append(label[1])
        elif text := re.match(r"\s*/\*([0-9a-f]+)\*/\s+(.*?)\s*;", line):
            labels |= dict.fromkeys(waiting, int(text[1], 16))
            waiting.clear()
            found.append((int(text[1], 16), text[2]))
    return found, labels, usage


def row(launch: Launch, made: Any) -> str:
    code, labels, usage = instructions(made)
    jumps = [(at, re.search(r"BRA.*?(\.L_x_\d+)", text)) for at, text in code]
    loops = [(labels[to[1]], at) for at, to in jumps if to and labels.get(to[1], at) < at]
    inner = [each for each in loops if not any(each[0] <= at < to < each[1] for at, to in loops)]
    reads = [at for at, text in code if re.search(r"\bLDG(STS)?\.", text)]
    loop = max(inner, key=lambda each: sum(each[0] <= at <= each[1] for at in reads), default=None)
    body = [text for at, text in code if loop is None or loop[0] <= at <= loop[1]]
    rest = [text for at, text in code if loop and not loop[0] <= at <= loop[1]]
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    warps, shared = made.metadata.num_warps, made.metadata.shared
    by_registers = REGISTERS // (-(-registers // 8) * 8 * 32 * warps)
    fit = min(by_registers, SHARED_BYTES // (shared + 1024), WARPS // warps, 32)
    size = f"{len(body)}{'' if loop else ' (no loop)'}"
    rest = rest[: next((i for i, text in enumerate(rest) if text == "EXIT"), None)]
    work = matrices.work(launch.kernel.__name__, launch.grid, launch.arguments)
    rate = bound(work, body, rest, warps) if work else ""
    used = [
        sum(bool(re.search(pattern, text)) for text in body)
        for pattern in (r"\bLDSM?\b", rf"\b({CONVERSIONS})\b")
    ]
    numbers = (prod(launch.grid), fit, warps, registers, stack, shared, size, *used, loads(body), rate)
    return f"| {launch.what} | {launch.kernel.__name__} | " + " | ".join(map(str, numbers)) + " |"


def loads(body: list[str]) -> str:
    """Copies go to shared memory and are not waited for."""
    found = Counter()
    for text in body:
        if match := re.search(r"\bLDG(STS)?\.E(?:\.BYPASS|\.STRONG\.\w+)*(?:\.[US]?(8|16|64|128))?", text):
            found[f"{'copies of ' if match[1] else ''}{match[2] or 32} bits"] += 1
    return ", ".join(f"{count} x {width}" for width, count in sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.compiled", description=__doc__)
    parser.add_argument("--capability", type=int, default=90)
    parser.add_argument("--only", default="", help="of the lines: model, step, kernel")
    args = parser.parse_args()
    print(
        "| step | kernel | programs | fit | warps | registers | spilled | shared | instructions | LDS |",
        end="",
    )
    print(" conversions | loads | GB/s by instructions |\n" + "| --- " * 13 + "|")
    seen: set[str] = set()
    for launch in launches():
        if not re.search(args.only, f"{launch.what} {launch.kernel.__name__}"):
            continue
        made = compiled(launch, args.capability)
        if made.hash not in seen:
            print(row(launch, made), flush=True)
        seen.add(made.hash)


if __name__ == "__main__":
    main()
