"""How the kernels of a layer are launched: with arguments that they have, on tensors of the GPU, over grids
that follow from the step's sizes alone, without a read of the device. What they compute:
test_cuda_layer_kernels.py and test_cuda_paged_attention.py, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, PagedBatch, StepTensors
from cluster.model.cuda.layer_calls import GateActivation, Norm, Rope, add_norm, gate, lookup, rope_write
from cluster.model.cuda.paged_attention import (
    MAX_PLACES,
    MAX_SHARES,
    attend,
    plan,
    step_tensors,
    tiles_for,
)
from cluster.model.kv_format import LayerCache, kv_segments, layer_cache
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import Launch, strict_triton

HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, HIDDEN, INNER = 6, 2, 80, 16, 48, 100
BF16 = torch.bfloat16


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    with SimulatedCuda(), strict_triton() as made:
        yield made


def memory(kv_cache_dtype) -> BlockMemory:
    segments = kv_segments([(KV_HEADS, WIDTH)] * 2, BLOCK_SIZE, BF16, kv_cache_dtype)
    return BlockMemory(MemoryLayout(segments), 8, "cuda")


def step_of(kv: BlockMemory, counts: list[int], contexts: list[int]) -> StepTensors:
    return step_tensors(
        PagedBatch(
            kv, BLOCK_SIZE, torch.zeros(sum(counts), dtype=torch.int64, device="cuda"), counts, contexts,
            torch.zeros(len(counts), 4, dtype=torch.int64, device="cuda"),
            torch.ones(len(counts), dtype=torch.int64, device="cuda"), [()] * len(counts),
        )
    )  # fmt: skip


def layer(step: StepTensors, cache: LayerCache, attention: LayerAttention) -> tuple[Tensor, Tensor]:
    """Everything of a decoder layer but its products, whose results are empty. Returns what the projections
    down and out would get."""
    num_tokens = len(step.seqs)
    tiles = tiles_for(HEADS, cache, BF16)
    made = plan(step, tiles, attention.sliding_window)

    def product(width: int) -> Tensor:
        return torch.empty(1, num_tokens, width, dtype=BF16, device="cuda")

    norm = Norm(torch.ones(HIDDEN, dtype=BF16, device="cuda"), 1e-6)
    head_norm = Norm(torch.ones(WIDTH, dtype=BF16, device="cuda"), 1e-6)
    cos, sin = torch.ones(2, num_tokens, WIDTH, dtype=BF16, device="cuda")
    slots = torch.zeros(num_tokens, dtype=torch.int32, device="cuda")
    residual = torch.zeros(num_tokens, HIDDEN, dtype=BF16, device="cuda")
    add_norm(residual, product(HIDDEN), norm)
    rope = Rope(WIDTH, query_norm=head_norm, key_norm=head_norm)
    query = rope_write(product((HEADS + 2 * KV_HEADS) * WIDTH), cos, sin, slots, cache, HEADS, rope)
    out = attend(query, cache, attention, step, made, tiles, num_processors=132)
    add_norm(residual, product(HIDDEN), norm, post=norm, scale=0.5)
    return gate(product(2 * INNER), GateActivation(), BF16), out


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("is_plain", [True, False])
def test_a_layer_of_answers_is_six_launches_beside_its_products(
    kv_cache_dtype, is_plain: bool, launches: list[Launch]
) -> None:
    sinks = None if is_plain else torch.zeros(HEADS, dtype=BF16, device="cuda")
    attention = LayerAttention(0.3) if is_plain else LayerAttention(0.3, 40, 2.0, sinks)
    kv = memory(kv_cache_dtype)
    gated, out = layer(step_of(kv, [1, 1, 1], [9, 300, 40]), layer_cache(kv, 0), attention)
    assert (gated.shape, out.shape) == ((3, INNER), (3, HEADS, WIDTH))
    assert {each.device.type for each in (gated, out)} == {"cuda"}
    assert [each.kernel for each in launches] == [
        "plan", "add_norm", "rope_write", "attend", "merge", "add_norm", "gate"
    ]  # fmt: skip
    planned, _, written, attended, merged, normed, _ = launches
    assert planned.grid == (1, 1) and planned.arguments["capacity"] == 3 * MAX_SHARES
    assert written.grid == (3, 2 + 1 + 1)
    assert (written.arguments["NORM_BEFORE"], written.arguments["NORM_AFTER"]) == (True, False)
    assert attended.grid == (3 * MAX_SHARES, KV_HEADS)
    assert (attended.arguments["key_scales"] is None) == (kv_cache_dtype == "auto")
    assert attended.arguments["HAS_SOFTCAP"] != is_plain
    assert (attended.arguments["K_RUN"], attended.arguments["K_RUNS"]) == (64, 2)
    assert merged.grid == (3, HEADS)
    assert normed.arguments["SHARES"] == 1 and normed.arguments["HAS_POST"]


def test_a_mixed_step_attends_in_two_launches_whatever_its_contexts(launches: list[Launch]) -> None:
    kv = memory("auto")
    for contexts in ([9, 300, 40], [9, 60_000, 41]):
        layer(step_of(kv, [1, 1, 33], contexts), layer_cache(kv, 0), LayerAttention(0.3))
    half = len(launches) // 2
    assert [each.kernel for each in launches[:half]].count("attend") == 2
    assert [(each.kernel, each.grid) for each in launches[:half]] == [
        (each.kernel, each.grid) for each in launches[half:]
    ]
    scratch = [each.arguments["partial_out"].shape[0] for each in launches if each.kernel == "attend"]
    assert scratch == [3 * MAX_PLACES] * 4
    rows, tiles = (each for each in launches[:half] if each.kernel == "attend")
    assert (rows.arguments["ROWS"], tiles.arguments["ROWS"]) == (16, 128)
    assert tiles.arguments["items"].data_ptr() > rows.arguments["items"].data_ptr()


def test_tokens_are_looked_up_in_one_launch(launches: list[Launch]) -> None:
    ids = torch.zeros(5, dtype=torch.int32, device="cuda")
    board = torch.zeros(2, dtype=torch.int64, device="cuda")
    out = lookup(ids, board, torch.zeros(7, 1500, dtype=BF16, device="cuda"))
    assert out.shape == (5, 1500)
    assert [(each.kernel, each.grid) for each in launches] == [("lookup", (5, 2))]
