"""The law of the house for a model that looks 32 tokens back in every layer: decode gives blocks behind the window back."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from cluster.config.settings import ClusterArgs
from cluster.ids import new_request_id
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.ledger import Ledger
from tests.flow.local_cluster import LocalCluster, local_cluster, overcommit
from tests.flow.test_law import MODEL, cluster_args

WINDOW, NUM_TOKENS, BLOCK_SIZE = 32, 100, 8
PROMPT_LENGTHS = (1, 5, 24, 37, 90, 33)
WHOLE_BLOCKS = sum(-(-(length + NUM_TOKENS) // BLOCK_SIZE) for length in PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Mistral; the demo model's tokenizer is for the door, which wants one."""
    path = tmp_path_factory.mktemp("window-model")
    torch.manual_seed(6)
    config = hf.MistralConfig(
        vocab_size=1024, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, sliding_window=WINDOW, initializer_range=0.3,
        eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    hf.MistralForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, path / name)
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draw = torch.Generator().manual_seed(8)
    return [torch.randint(5, 900, (length,), generator=draw).tolist() for length in PROMPT_LENGTHS]


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    model = hf.MistralForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
            )
        answers.append(output[0, len(prompt) :].tolist())
    return answers


def window_args(folder: Path, **decode: Any) -> ClusterArgs:
    args = cluster_args(24).model_copy(update={"model": str(folder), "block_size": BLOCK_SIZE})
    return args.model_copy(update={"decode": type(args.decode).model_validate(decode)})


async def answers(cluster: LocalCluster, prompt: list[int], num_choices: int = 1) -> list[list[int]]:
    request = GenerateRequest(
        new_request_id(), Prompt(tuple(prompt)), (SamplingParams(),) * num_choices, StopParams(NUM_TOKENS)
    )
    streams = cluster.door._dispatcher.generate(request, (), (), Ledger(0.0))
    return [[token_id async for event in stream for token_id in event.token_ids] for stream in streams]


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_long_answers_behind_a_window_equal_generate(
    folder, prompts, expected, num_choices, speculation
):
    """All at once in a pool that holds half of what they would hold without a window, and nobody has to give way."""
    num_blocks = WHOLE_BLOCKS * num_choices // 2
    args = window_args(folder, kv_blocks=num_blocks, speculation={"method": speculation})
    async with local_cluster(args, (0, 1, 1)) as cluster:
        got = await asyncio.gather(*(answers(cluster, prompt, num_choices) for prompt in prompts))
        assert cluster.decodes[0]._model.sliding_window == WINDOW
        assert cluster.decodes[0]._engine.num_preempted == 0
    assert got == [[answer] * num_choices for answer in expected]


async def test_answers_that_lost_their_window_and_were_computed_anew_equal_generate(
    folder, prompts, expected
):
    """Short prompts are admitted together and grow out of the pool, which is as small as the longest answer allows."""
    crowd = prompts * 3
    async with local_cluster(window_args(folder, kv_blocks=24), (0, 1, 1)) as cluster:
        overcommit(cluster)
        got = await asyncio.gather(*(answers(cluster, prompt) for prompt in crowd))
        assert cluster.decodes[0]._engine.num_preempted > 0
    assert got == [[answer] for answer in expected] * 3
