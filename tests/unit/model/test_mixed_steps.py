"""Steps of running answers, drafts and prompt chunks side by side: what a sequence gets does not depend on
the kind of call that computes it, nor on what is computed beside it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import LayerAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.batches import packed_step
from cluster.model.cpu.library import load
from cluster.model.language import LanguageModel, SequenceChunk
from tests.unit.model.attention_cases import Shape, make_step, run

BLOCK_SIZE = 4
CONTEXTS, DELTAS, LAST = [9, 3, 17], [0, 2, -1], [5, 6, 7]
TABLES = [[3, 1, 2], [4], [5, 9, 6, 7, 8, 12]]  # the last one reserves a block for later
DRAFTS, DRAFT_TABLE = [11, 12, 13], [10, 11]
PROMPT, PROMPT_TABLE = list(range(20, 31)), [13, 14, 15]


@pytest.fixture(scope="module", params=["native", "torch"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Of two layers; the first has a window."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=61, hidden_size=64, intermediate_size=90, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=128, eos_token_id=None,
        bos_token_id=None, use_sliding_window=True, sliding_window=6, max_window_layers=1,
    )  # fmt: skip
    whole = hf.Qwen2ForCausalLM(config).float()
    if request.param == "torch":
        return LanguageModel.from_model(whole, block_size=BLOCK_SIZE)
    if load() is None:
        pytest.skip("no native kernels for this CPU, or no compiler")
    folder: Path = tmp_path_factory.mktemp("model")
    whole.save_pretrained(folder)
    loaded = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE)
    assert loaded.kernels_s is not None, "the model does not run in one native call"
    return loaded


def filled(model: LanguageModel) -> BlockMemory:
    kv = BlockMemory(model.kv_layout, 16)
    generator = torch.Generator().manual_seed(1)
    for segment in kv.segments:
        segment.copy_(torch.randn(segment.shape, generator=generator))
    return kv


def one_token_chunks() -> list[SequenceChunk]:
    rows = zip(LAST, CONTEXTS, DELTAS, TABLES, strict=True)
    return [
        SequenceChunk([token], context + delta, context, array("q", table))
        for token, context, delta, table in rows
    ]


def test_chunks_of_one_token_get_the_bits_of_a_decode_step(model: LanguageModel) -> None:
    decoded, packed = filled(model), filled(model)
    expected = model.decode(LAST, CONTEXTS, DELTAS, TABLES, decoded)
    assert torch.equal(model.forward(one_token_chunks(), packed), expected)
    assert torch.equal(packed.buffer, decoded.buffer)


def test_prompts_and_drafts_in_a_step_change_nothing_for_running_answers(model: LanguageModel) -> None:
    apart, packed = filled(model), filled(model)
    expected = [model.decode(LAST, CONTEXTS, DELTAS, TABLES, apart)]
    drafts = SequenceChunk(DRAFTS, 3, 3, DRAFT_TABLE, num_logits=3)
    for i, token in enumerate(DRAFTS):
        expected.append(model.decode([token], [3 + i], [0], [DRAFT_TABLE], apart))
    prompt = SequenceChunk(PROMPT, torch.arange(11), 0, PROMPT_TABLE, num_logits=2)
    unfinished = SequenceChunk(PROMPT[:3], 0, 0, [0], num_logits=0)
    expected.append(model.forward([prompt], apart))
    model.forward([unfinished], apart)
    first, *others = one_token_chunks()
    logits = model.forward([first, unfinished, *others, drafts, prompt], packed)
    exact = model.kernels_s is not None  # products of torch's libraries depend on the number of rows
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(logits, torch.cat(expected), **tolerance)
    torch.testing.assert_close(
        packed.buffer.view(torch.float32), apart.buffer.view(torch.float32), **tolerance
    )


@pytest.mark.parametrize("window", [None, 6])
def test_torch_attention_of_a_running_answer_does_not_see_the_prompts_beside_it(window: int | None) -> None:
    layer, shape, sizes = LayerAttention(0.3, window), Shape(), [(23, 1), (50, 6), (0, 9), (11, 1)]
    mixed, running = make_step(shape, sizes), torch.tensor([0, 16])
    together = run(TorchAttention(), mixed, layer)[running]
    alone = make_step(shape, sizes)  # the same rows
    batch = alone.batch
    batch.slots, batch.query_lens, batch.context_lens = batch.slots[running], [1, 1], [24, 12]
    batch.block_tables, batch.context_lens_tensor = (
        batch.block_tables[[0, 3], :6],
        batch.context_lens_tensor[[0, 3]],
    )
    backend = TorchAttention()
    rows = (alone.query[running], alone.key[running], alone.value[running])
    backend.write(batch, alone.cache, *rows[1:])
    assert torch.equal(backend.attend(batch, layer, *rows, alone.cache), together)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_positions_of_media_and_of_text_share_a_step(model: LanguageModel, dtype: torch.dtype) -> None:
    media = torch.tensor([[0, 1, 1, 1], [0, 1, 1, 2], [0, 1, 2, 1]], dtype=dtype)

    def packed(*position_ids: Tensor | int) -> Tensor:
        chunks = [SequenceChunk([1] * 4, ids, 0, [0]) for ids in position_ids]
        return packed_step(chunks, filled(model), BLOCK_SIZE, torch.device("cpu")).position_ids

    assert packed(7, 3).tolist() == [7, 8, 9, 10, 3, 4, 5, 6]
    run_of_5 = torch.arange(5, 9).to(dtype)
    mixed = packed(5, media, run_of_5)
    assert mixed.dtype == dtype
    assert torch.equal(mixed, torch.cat([run_of_5.expand(3, -1), media, run_of_5.expand(3, -1)], dim=-1))
