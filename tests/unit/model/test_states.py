"""Where a state lies in blocks of KV, and in which order a step computes states."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

import cluster.model  # noqa: F401  (prepares torchvision)
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import KvCacheDtype, kv_segments
from cluster.model.language import LanguageModel
from cluster.model.state_step import StepState
from cluster.model.states import LayerStates, StateLayout, StateSpan, StateTensor
from tests.flow.hybrid_models import save_hybrid
from tests.flow.text_models import draw_prompts, generated
from tests.gpu.cases import HYBRID_PLACES, hybrid_answers

_TENSORS = (
    StateTensor(False, 0, (6, 4), "torch.bfloat16"),
    StateTensor(True, 0, (2, 8, 5), "torch.float32"),
)
LAYERS = (LayerStates("layers.0.mixer", 0, _TENSORS), LayerStates("layers.2.mixer", 2, _TENSORS[:1]))


def layouts(kv_cache_dtype: KvCacheDtype) -> tuple[StateLayout, MemoryLayout]:
    """Over KV whose K is wider than its V."""
    kv = MemoryLayout(kv_segments([(2, 24), (2, 8)] * 3, 4, torch.bfloat16, kv_cache_dtype))
    return StateLayout(LAYERS, kv), kv


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_states_fill_their_own_blocks_and_no_byte_twice(kv_cache_dtype: KvCacheDtype) -> None:
    layout, kv_layout = layouts(kv_cache_dtype)
    assert layout.num_blocks * kv_layout.block_bytes >= sum(layer.num_bytes for layer in LAYERS)
    kv = BlockMemory(kv_layout, 3 * layout.num_blocks)
    kv.buffer.fill_(7)
    tables = [list(range(2 * layout.num_blocks))[::2], list(range(2 * layout.num_blocks))[1::2]]
    pages = layout.page_ids(torch.tensor(tables), kv)
    stored = []
    for number in range(len(LAYERS)):
        rows = torch.randint(0, 255, (2, layout.layer_bytes(number)), dtype=torch.uint8)
        layout.store(number, pages, rows, kv)
        stored.append(rows)
    for number, rows in enumerate(stored):
        assert torch.equal(layout.load(number, pages, kv), rows)
    others = list(range(2 * layout.num_blocks, 3 * layout.num_blocks))
    assert (torch.from_numpy(kv.read_blocks(others)) == 7).all()


def test_a_block_that_moves_takes_its_part_of_the_state_along() -> None:
    layout, kv_layout = layouts("int8")
    kv = BlockMemory(kv_layout, 2 * layout.num_blocks)
    sources = list(range(layout.num_blocks))
    targets = [layout.num_blocks + block for block in reversed(sources)]
    here = layout.page_ids(torch.tensor([sources]), kv)
    rows = torch.randint(0, 255, (1, layout.layer_bytes(0)), dtype=torch.uint8)
    layout.store(0, here, rows, kv)
    kv.copy_blocks(sources, targets)
    assert torch.equal(layout.load(0, layout.page_ids(torch.tensor([targets]), kv), kv), rows)


def test_what_is_tried_on_a_gpu_gives_the_tokens_of_generate_on_the_cpu(tmp_path: Path) -> None:
    prompts, folder = draw_prompts((40, 5, 33)), save_hybrid(tmp_path, "qwen3_5_text")
    model = LanguageModel.load(folder, dtype=torch.float32)
    kv = BlockMemory(model.kv_layout, len(prompts) * (8 + HYBRID_PLACES * model.state_blocks))
    assert hybrid_answers(model, model, kv, prompts, 8, 8) == generated(folder, prompts, 8)


def test_spans_of_one_length_run_together_and_those_of_a_sequence_in_order() -> None:
    layout, kv_layout = layouts("auto")
    kv = BlockMemory(kv_layout, 9 * layout.num_blocks)
    places = [list(range(i * layout.num_blocks, (i + 1) * layout.num_blocks)) for i in range(9)]
    sequences = [
        [StateSpan(1, places[0], places[1])],
        [StateSpan(5, (), places[2]), StateSpan(1, places[2], places[3])],
        [StateSpan(1, places[4], places[5]), StateSpan(1, places[5])],
        [StateSpan(5, (), places[6])],
        [StateSpan(1)],
    ]
    step = StepState(layout, kv, sequences)
    tokens = [batch.tokens for batch in step.batches]
    assert tokens[0] == slice(14, 15) and tokens[3:] == [slice(8, 9), slice(6, 7)]
    assert [each.tolist() for each in tokens[1:3] if isinstance(each, torch.Tensor)] == [
        [0, 7],
        [*range(1, 6), *range(9, 14)],
    ]
    read, written = ([0, 4], [5], [2]), ([1, 5], [2, 6], [3])
    for numbers, kept in ((read, "source"), (written, "target")):
        found = [pages for batch in step.batches if (pages := getattr(batch, kept)) is not None]
        expected = [layout.page_ids(torch.tensor([places[i] for i in own]), kv) for own in numbers]
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    tensors = step.tensors
    assert tensors.starts.tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert tensors.spans.tolist() == [0, *[1] * 5, 2, 3, 4, *[5] * 5, 6]
    assert tensors.firsts.tolist() == [0, 1, 1, 3, 3, 5, 6] and not tensors.is_decode
    assert (step.source_pages[1] == -1).all() and (step.target_pages[4] == -1).all()
