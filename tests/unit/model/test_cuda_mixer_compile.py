"""The kernels of mixers compile for GPUs that are not here, in the sizes of served models. Wants triton, and
compiles only where it does not interpret."""

from __future__ import annotations

import os
import re
from collections import Counter

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreting: nothing is compiled", allow_module_level=True)

from cluster.model.cuda import channel_kernels, delta_kernels, mamba_kernels, mixer_kernels  # noqa: E402
from tests.unit.model.compiling import check_compiles  # noqa: E402

# Of Qwen3.5-9B over KV in blocks of 16
DELTA = {"KEY_HEADS": 16, "GROUP": 2, "K": 128, "V": 128}
KEYS = {"Q0": 0, "K0": 2048, "V0": 4096, "KEY_STEP": 128, "VALUE_STEP": 256}
STATE = {"K_PAD": 128, "TILE": 32, "PAGE": 8192, "OFFSET": 16384}
GATES = {"B0": 12288, "A0": 12320, "GATE_STEP": 2, "BETA": 1.0}
ONE_DECAY = {"decays": None, "LOWEST": 0.0}  # of a head
# Of Kimi Linear
KIMI = {"KEY_HEADS": 32, "GROUP": 1, "K": 128, "V": 128}
CHANNELS = {"HEADS": 32, "K": 128, "K_PAD": 128, "V": 128}
# Of Bamba, and of Nemotron-H, whose groups are eight
BAMBA = {"GROUPS": 1, "GROUP": 128, "N": 256, "P": 64}
BAMBA_STATE = {"N_PAD": 256, "PAGE": 8192, "OFFSET": 17408}
NEMOTRON = {"GROUPS": 8, "GROUP": 16, "N": 128, "P": 64}
MIXER_KINDS = {
    **dict.fromkeys(("skips", "scores", "sums"), "*fp32"), "decays": "*bf16",
    "decay_stride": "i32", "low": "fp32", "high": "fp32",
    "rows": "*bf16", "mixed": "*bf16", "rates": "*fp32", "shifts": "*fp32", "memory": "*fp32",
    "systems": "*fp32", "factors": "*fp32", "chunk_spans": "*i64", "chunk_begins": "*i64",
    "sequences": "*i64", "num_sequences": "i32", "source": "*i64", "target": "*i64", "row_stride": "i32",
    "page_stride": "i32", "first_page": "i32", "num_spans": "i32", "epsilon": "fp32",
}  # fmt: skip


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    ("module", "name", "constants", "kinds"),
    [
        (
            delta_kernels, "few_tokens",
            {**ONE_DECAY, **DELTA, **GATES, **STATE, "IS_DECODE": True}, {"memory": "*fp32"},
        ),
        (
            delta_kernels, "few_tokens",
            {**ONE_DECAY, **DELTA, **GATES, **STATE, "IS_DECODE": False}, {"memory": "*fp32"},
        ),
        (
            delta_kernels, "few_tokens",
            {**KIMI, **GATES, **STATE, "LOWEST": -5.0, "IS_DECODE": False}, {"memory": "*fp32"},
        ),
        (channel_kernels, "channel_sums", {**CHANNELS, "B0": 12288, "LOWEST": 0.0}, {}),
        (channel_kernels, "channel_systems", {**CHANNELS, "EXACT": False}, {}),
        (delta_kernels, "many_tokens", {**KIMI, **STATE, "EXACT": False}, {"memory": "*fp32"}),
        (
            mixer_kernels, "convolve",
            {"bias": None, **DELTA, **KEYS, "TOKENS": 8, "TILE": 256, "TAPS": 4, "PAGE": 16384},
            {"memory": "*bf16"},
        ),
        (delta_kernels, "chunk_systems", {**DELTA, **GATES, "K_PAD": 128, "EXACT": False, "HEADS": 2}, {}),
        (
            delta_kernels, "chunk_systems", {**DELTA, **GATES, "K_PAD": 128, "EXACT": True, "HEADS": 2},
            {"mixed": "*fp32", "rows": "*fp32"},
        ),
        (delta_kernels, "solve_systems", {}, {}),
        (delta_kernels, "many_tokens", {"sums": None, **DELTA, **STATE, "EXACT": False}, {"memory": "*fp32"}),
        (
            delta_kernels, "many_tokens", {"sums": None, **DELTA, **STATE, "EXACT": True},
            {"memory": "*fp32", "mixed": "*fp32", "out": "*fp32"},
        ),
        (
            delta_kernels, "gated_norm",
            {"GROUP": 2, "HEADS": 32, "TILE": 8, "V": 128, "PAD": 128, "Z0": 8192, "VALUE_STEP": 256,
             "IS_SIGMOID": False}, {},
        ),
        (
            mamba_kernels, "few_tokens",
            {**BAMBA, **BAMBA_STATE, "TILE": 16, "T0": 16896, "IS_DECODE": False}, {"memory": "*fp32"},
        ),
        (mamba_kernels, "chunk_scores", {**NEMOTRON, "T0": 18432, "EXACT": False, "HEADS": 8}, {}),
        (
            mamba_kernels, "many_tokens", {**BAMBA, **BAMBA_STATE, "TILE": 16, "EXACT": False},
            {"memory": "*fp32"},
        ),
        (
            mamba_kernels, "many_tokens", {**BAMBA, **BAMBA_STATE, "TILE": 16, "EXACT": True},
            {"memory": "*fp32", "mixed": "*fp32", "out": "*fp32"},
        ),
        (
            mamba_kernels, "gated_norm",
            {"WIDTH": 8192, "GROUP_WIDTH": 1024, "PAD": 1024, "NORM_FIRST": False}, {},
        ),
        (
            mixer_kernels, "short_convolution",
            {"WIDTH": 2048, "TILE": 256, "TAPS": 3, "PAGE": 8192, "bias": None}, {"memory": "*bf16"},
        ),
    ],
    ids=[
        "few_tokens, answers", "few_tokens", "few_tokens, channels", "channel_sums", "channel_systems",
        "many_tokens, channels", "convolve", "chunk_systems", "chunk_systems, exact",
        "solve_systems", "many_tokens", "many_tokens, exact", "gated_norm",
        "state space, few_tokens", "chunk_scores", "state space, many_tokens",
        "state space, many_tokens, exact", "state space, gated_norm", "short_convolution",
    ],
)  # fmt: skip
def test_a_kernel_of_a_mixer_compiles(module, name: str, constants, kinds, capability: int) -> None:
    given = {"x": "*bf16", **MIXER_KINDS, **kinds}
    options = {
        "many_tokens": {"num_warps": 8, "num_stages": 1},
        "solve_systems": {"num_warps": 2},
        "chunk_systems": {"num_stages": 1},
        "chunk_scores": {"num_stages": 1},
        "channel_sums": {"num_warps": 8},
        "channel_systems": {"num_warps": 8, "num_stages": 1},
    }
    given_options = {"num_warps": 4, **options.get(name, {})}
    check_compiles(module, name, constants, given, capability, **given_options)


@pytest.mark.parametrize(
    ("module", "constants"),
    [
        (delta_kernels, {**ONE_DECAY, **DELTA, **GATES, **STATE}),
        (mamba_kernels, {**NEMOTRON, "N_PAD": 128, "PAGE": 8192, "OFFSET": 16384, "TILE": 32, "T0": 18432}),
    ],
    ids=["delta rule", "state space"],
)
def test_an_answer_is_computed_alike_beside_prompts(module, constants) -> None:
    """By as many fused operations, and sums over the same threads: its bits are those in a step of
    answers."""
    found = []
    for is_decode in (True, False):
        given = {**constants, "IS_DECODE": is_decode}
        made = check_compiles(module, "few_tokens", given, MIXER_KINDS, 90, num_warps=4)
        operations = Counter(re.findall(r"\b(?:fma|mul|add|sub|div|ex2)\.[a-z.]*f32", made.asm["ptx"]))
        layouts = dict(re.findall(r"(#\w+) = (#ttg\.blocked<.*?>)", made.asm["ttgir"]))
        sums = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<(\S+), (#\w+)', made.asm["ttgir"], re.DOTALL)
        found.append((operations, [(shape, layouts.get(layout)) for shape, layout in sums]))
    assert found[0] == found[1] and found[0][0] and found[0][1]
