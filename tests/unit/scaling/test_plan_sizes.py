"""What the planner knows of quantised checkpoints: their memory on one GPU, and what they cost a step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.simulator.__main__ import main
from deploy.simulator.hardware import (
    H100,
    MODELS,
    OMNI_30B,
    VL_7B,
    VL_32B,
    WEIGHT_FORMATS,
    decode_curve,
    in_format,
    num_kv_blocks,
    prefill_curve,
)

ROOT = Path(__file__).parents[3]
NAMES = {
    "vl-7b": "Qwen2.5-VL-7B",
    "vl-32b": "Qwen3-VL-32B",
    "omni-30b-a3b": "Qwen3-Omni-30B-A3B, its thinker",
}


def test_the_parameters_are_those_of_the_cards() -> None:
    """Linears of attention and MLP and experts, by the layers' shapes; embeddings and head beside them."""
    mlp_7b, mlp_32b = 3 * 3584 * 18_944, 3 * 5120 * 25_600
    coded = {
        VL_7B: 28 * (2 * 3584**2 + 2 * 512 * 3584 + mlp_7b),
        VL_32B: 64 * (2 * 5120 * 8192 + 2 * 1024 * 5120 + mlp_32b),
        OMNI_30B: 48 * (2 * 2048 * 4096 + 2 * 512 * 2048 + 128 * 3 * 2048 * 768),
    }
    plain = {
        VL_7B: 2 * 152_064 * 3584, VL_32B: 2 * 151_936 * 5120,
        OMNI_30B: 2 * 152_064 * 2048,
    }  # fmt: skip
    assert OMNI_30B.num_in_experts == pytest.approx(48 * 128 * 3 * 2048 * 768, rel=0.001)
    for model, size in coded.items():
        assert model.num_coded == pytest.approx(size, rel=0.002)
        assert model.num_parameters == pytest.approx(size + plain[model], rel=0.005)


@pytest.mark.parametrize("name", NAMES)
def test_the_document_has_the_sizes_on_one_gpu(name: str) -> None:
    sizes = []
    for weights in WEIGHT_FORMATS:
        model = in_format(MODELS[name], weights)
        num_tokens = num_kv_blocks(model, H100) * model.block_size
        sizes.append(f"{model.weight_bytes / 1e9:.1f} GB, {num_tokens:,}")
    row = f"| {NAMES[name]} (`{name}`) | {' | '.join(sizes)} |"
    assert row in (ROOT / "docs/operations.md").read_text()


def test_codes_make_answers_faster_and_prompts_no_faster() -> None:
    plain, *coded = (in_format(VL_7B, weights) for weights in WEIGHT_FORMATS)
    times = [decode_curve(model, H100).seconds(1, 2048) for model in (plain, *coded)]
    assert times == sorted(times, reverse=True) and times[0] > 1.4 * times[1]
    for model in coded:
        assert prefill_curve(model, H100).seconds(2048, 0) > prefill_curve(plain, H100).seconds(2048, 0)
    fixed_s = [prefill_curve(in_format(OMNI_30B, weights), H100).fixed_s for weights in ("bf16", "fp8")]
    assert 0 < fixed_s[1] - fixed_s[0] < 2e-3  # its experts are not made plain


def test_a_quantised_model_fits_where_the_plain_one_does_not(capsys) -> None:
    command = "plan --workload 1-image --gpus a100:1 --model vl-32b --slo-ttft-s 20 --requests 20"
    assert main([*command.split(), "--weights", "fp8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"vl-32b on a100: 34\.4 GB of weights, 124,288 tokens of KV", out) and "EPD" in out
