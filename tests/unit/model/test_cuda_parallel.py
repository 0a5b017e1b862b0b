"""Tensor parallelism over Gloo: two processes, spawned, run a tiny model by
transformers' own plan and answer like one process."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers as hf

from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.parallel import (
    LeadingModel,
    TensorParallelGroup,
    check_heads,
    follow,
    join_group,
    shard,
)
from cluster.model.cuda.step_model import StepModel
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk

BLOCK_SIZE = 4
TABLES = ([3, 1, 2, 7, 9], [4, 5, 6, 8, 10])
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": None, "max_position_embeddings": 128,
}  # fmt: skip
Answers = tuple[list[list[int]], torch.Tensor]


def llama() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, tie_word_embeddings=False)).eval()


def qwen2() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    return hf.Qwen2ForCausalLM(hf.Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()


def answers(model: StepModel, kv: BlockMemory) -> Answers:
    """Greedy tokens of two prompts, of which one comes in two chunks and has rows in place of tokens; then the logits of
    `verify`."""
    rows = torch.randn(3, SIZES["hidden_size"], generator=torch.Generator().manual_seed(5))
    features = (FeatureSlice(1, rows),)
    first = [
        SequenceChunk(list(range(5, 11)), torch.arange(6), 0, TABLES[0], features),
        SequenceChunk(list(range(30, 35)), torch.arange(5), 0, TABLES[1]),
    ]
    last = [SequenceChunk([40, 41, 42], torch.arange(6, 9), 6, TABLES[0])]
    second_token = model.forward(first, kv)[1].argmax()
    tokens = [[int(model.forward(last, kv)[0].argmax()), int(second_token)]]
    for step in range(8):
        logits = model.decode(tokens[-1], [9 + step, 5 + step], [0, 0], TABLES, kv)
        tokens.append(logits.argmax(-1).tolist())
    return tokens, model.verify([SequenceChunk([7, 8], torch.arange(17, 19), 17, TABLES[0])], kv)


def run_rank(rank: int, address: str, make: Callable[[], hf.PreTrainedModel], results: Connection) -> None:
    torch.set_num_threads(1)
    group = join_group(rank, 2, address, "cpu")
    model = LanguageModel.from_model(shard(make(), group), block_size=BLOCK_SIZE)
    kv = BlockMemory(model.kv_layout, 11)
    if rank == 0:
        leading = LeadingModel(model, group, torch.float32)
        results.send((answers(leading, kv), model.kv_layout.segments[0].row_shape))
        leading.stop()
    else:
        follow(model, kv, group, torch.float32, model.feature_width)
        results.send(kv.buffer.any().item())
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [llama, qwen2])
def test_two_processes_answer_like_one(make: Callable[[], hf.PreTrainedModel], tmp_path: Path) -> None:
    context = multiprocessing.get_context(
        "spawn"
    )  # a forked child would inherit an OpenMP pool without its threads
    pipes = [context.Pipe(duplex=False) for _ in range(2)]
    address = f"file://{tmp_path / 'meeting'}"
    ranks = [
        context.Process(target=run_rank, args=(rank, address, make, pipes[rank][1]), daemon=True)
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        assert all(pipe.poll(60) for pipe, _ in pipes)
        (tokens, verified), row_shape = pipes[0][0].recv()
        assert pipes[1][0].recv()
        for rank in ranks:
            rank.join(30)
        assert [rank.exitcode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    assert row_shape == (1, 16)  # half of the KV heads
    alone = LanguageModel.from_model(make(), block_size=BLOCK_SIZE)
    expected_tokens, expected_verified = answers(alone, BlockMemory(alone.kv_layout, 11))
    assert tokens == expected_tokens
    torch.testing.assert_close(verified, expected_verified, rtol=1e-4, atol=1e-4)


def test_heads_that_cannot_be_dealt_out_evenly_are_refused() -> None:
    config = hf.LlamaConfig(**SIZES)
    check_heads(config, 2)
    with pytest.raises(ConfigError, match="2 KV heads cannot be shared evenly by 4"):
        check_heads(config, 4)


def test_a_model_without_a_plan_is_refused() -> None:
    group = TensorParallelGroup(0, 2, torch.device("cpu"), None, None)  # type: ignore[arg-type]
    model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32))
    with pytest.raises(ConfigError, match="'gpt2' has no tensor-parallel plan"):
        shard(model, group)
