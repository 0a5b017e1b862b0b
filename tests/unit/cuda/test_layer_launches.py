"""How the kernels of a layer are launched: with arguments that they have, on tensors of the GPU, over grids
that follow from the step's sizes alone, without a read of the device. What they compute:
test_cuda_layer_kernels.py and test_cuda_paged_attention.py, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, PagedBatch, StepTensors
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda.layer_calls import GateActivation, Norm, Rope, add_norm, gate, rope_write
from cluster.model.cuda.paged_attention import (
    MAX_PLACES,
    MAX_SHARES,
    attend,
    partial_bytes,
    place_capacity,
    plan,
    step_tensors,
    tiles_for,
)
from cluster.model.kv_format import LayerCache, kv_segments, layer_cache
from tests.fakes.strict_triton import Launch

HEADS, KV_HEADS, WIDTH, BLOCK_SIZE, HIDDEN, INNER = 6, 2, 80, 16, 48, 100
BF16, CAUSAL = torch.bfloat16, LayerAttention(0.3)


def memory(kv_cache_dtype, width: int = WIDTH) -> BlockMemory:
    segments = kv_segments([(KV_HEADS, width)] * 2, BLOCK_SIZE, BF16, kv_cache_dtype)
    return BlockMemory(MemoryLayout(segments), 8, "cuda")


def batch_of(kv: BlockMemory, counts: list[int], contexts: list[int]) -> PagedBatch:
    return PagedBatch(
        kv, BLOCK_SIZE, torch.zeros(sum(counts), dtype=torch.int64, device="cuda"), counts, contexts,
        torch.zeros(len(counts), 4, dtype=torch.int64, device="cuda"),
        torch.ones(len(counts), dtype=torch.int64, device="cuda"), [()] * len(counts),
    )  # fmt: skip


def step_of(kv: BlockMemory, counts: list[int], contexts: list[int]) -> StepTensors:
    return step_tensors(batch_of(kv, counts, contexts))


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
    assert merged.grid == (3, HEADS) and merged.arguments["MERGED"] == 1
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
    assert scratch == [place_capacity(35, 3)] * 4
    rows, tiles = (each for each in launches[:half] if each.kernel == "attend")
    assert (rows.arguments["ROWS"], tiles.arguments["ROWS"]) == (16, 128)
    assert tiles.arguments["items"].data_ptr() > rows.arguments["items"].data_ptr()


ANSWERS, MIXED, LONG = ([1, 1], [9, 300]), ([1, 1, 33], [9, 300, 40]), ([300, 300], [300, 900])


def attended(
    subject: CudaAttention, batch: PagedBatch, attention: LayerAttention = CAUSAL, *, num_layers: int = 1
) -> Tensor:
    """A step of `num_layers` equal layers, as modules call it."""
    cache = layer_cache(batch.kv, 0)
    (_, width), num_tokens = cache.key.row_shape, len(batch.slots)
    query = torch.zeros(HEADS, num_tokens, width, dtype=BF16, device="cuda").transpose(0, 1)
    key, value = torch.zeros(2, KV_HEADS, num_tokens, width, dtype=BF16, device="cuda").transpose(1, 2)
    out = query
    for _ in range(num_layers):
        subject.write(batch, cache, key, value)
        out = subject.attend(batch, attention, query, key, value, cache)
    return out


def names(launches: list[Launch]) -> list[str]:
    return [launch.kernel for launch in launches]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_backend_plans_once_a_step_and_window(kv_cache_dtype, launches: list[Launch]) -> None:
    subject, kv = CudaAttention(TorchAttention(), 132), memory(kv_cache_dtype)
    batch = batch_of(kv, *ANSWERS)
    out = attended(subject, batch, num_layers=2)
    assert (out.shape, out.device.type) == ((2, HEADS, WIDTH), "cuda")
    layer_of_answers = ["write_rows", "attend", "merge"]
    assert names(launches) == ["write_rows", "plan", *layer_of_answers[1:], *layer_of_answers]
    launches.clear()
    attended(subject, batch, LayerAttention(0.3, sliding_window=40), num_layers=2)
    attended(subject, batch)
    assert names(launches).count("plan") == 1
    launches.clear()
    attended(subject, batch_of(kv, *MIXED))
    assert names(launches) == ["write_rows", "plan", "attend", "attend", "merge"]
    write, merge = launches[0], launches[-1]
    assert write.grid == (35, 2) and write.arguments["key_head_stride"] == 35 * WIDTH
    assert merge.grid == (35, 2)  # few tokens have shares: most programs return at once


def test_an_unrecorded_step_has_scratch_for_its_own_shares_only(launches: list[Launch]) -> None:
    subject, kv = CudaAttention(TorchAttention(), 132), memory("auto")
    for counts, contexts, expected in (
        ([1, 1], [9, 300], 2), ([1, 33], [256, 33], 1), ([600, 1], [9000, 9000], 32), ([100], [9000], 500),
    ):  # fmt: skip
        launches.clear()
        attended(subject, batch_of(kv, counts, contexts))
        assert {each.arguments["partial_out"].shape[0] for each in launches if each.kernel == "attend"} == {
            expected
        }
    assert subject.score_bytes(HEADS, WIDTH, 100, 9000) == partial_bytes(HEADS, WIDTH, 100)
    wide = TorchAttention().score_bytes(HEADS, 300, 100, 9000)
    assert subject.score_bytes(HEADS, 300, 100, 9000) == wide > 0


class Library:
    """Counts its calls."""

    page_multiple = 16

    def __init__(self):
        self.num_calls = 0

    def paged(self, query, key, value, lengths, attention) -> Tensor:
        self.num_calls += 1
        return query

    def rows(self, query, key, value, lengths, attention) -> Tensor:
        raise AssertionError("pages can be read")


SINKS = torch.zeros(HEADS)


@pytest.mark.parametrize(
    ("step", "attention", "kv_cache_dtype", "is_served"),
    [
        (LONG, CAUSAL, "auto", True),
        (LONG, LayerAttention(0.3, sliding_window=40), "auto", True),
        (LONG, LayerAttention(0.3, softcap=2.0), "auto", False),
        (LONG, LayerAttention(0.3, sinks=SINKS), "auto", False),
        (LONG, CAUSAL, "int8", False),
        (([512], [512]), CAUSAL, "auto", False),
        (([1, 600], [9, 600]), CAUSAL, "auto", False),
        (([5, 600], [900, 600]), CAUSAL, "auto", False),
        (([1] * 600, [9] * 600), CAUSAL, "auto", False),
    ],
    ids=[
        "long chunks", "windows", "caps", "sinks", "INT8", "short", "beside an answer", "beside drafts",
        "answers",
    ],
)  # fmt: skip
def test_a_library_serves_long_chunks_of_prompts_only(
    step, attention, kv_cache_dtype, is_served: bool, launches: list[Launch]
) -> None:
    library: Any = Library()
    subject = CudaAttention(TorchAttention(), 132, library)
    if attention.sinks is not None:
        attention = LayerAttention(0.3, sinks=SINKS.to("cuda"))
    attended(subject, batch_of(memory(kv_cache_dtype), *step), attention)
    assert library.num_calls == is_served
    assert ("attend" in names(launches)) != is_served


def test_a_library_serves_neither_spans_nor_recorded_steps(launches: list[Launch]) -> None:
    library: Any = Library()
    kv = memory("auto")
    subject = CudaAttention(TorchAttention(), 132, library)
    seeing = replace(batch_of(kv, *LONG), bidirectional_spans=[[(3, 9)], []])
    recorded = replace(batch_of(kv, *LONG), device=step_of(kv, *LONG))
    recorded.query_lens = recorded.context_lens = None  # type: ignore[assignment]  # nothing may read them
    for batch in (seeing, recorded):
        attended(subject, batch)
    assert library.num_calls == 0
    places = [each.arguments["partial_out"].shape[0] for each in launches if each.kernel == "attend"]
    assert places == [1, 1, 2 * MAX_PLACES, 2 * MAX_PLACES]


def test_heads_that_are_too_wide_are_served_by_plain_torch(launches: list[Launch]) -> None:
    kv = memory("auto", width=320)
    subject = CudaAttention(TorchAttention(), 132)
    assert not subject.can_capture(layer_cache(kv, 0))
    batch = replace(batch_of(kv, [1, 1], [9, 40]), context_lens_tensor=torch.tensor([9, 40]).to("cuda"))
    assert attended(subject, batch).shape == (2, HEADS, 320)
    assert names(launches) == ["write_rows"]
    for kv_cache_dtype in ("auto", "int8"):
        assert subject.can_capture(layer_cache(memory(kv_cache_dtype), 0))
