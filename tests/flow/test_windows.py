"""The law of the house for a model that looks 32 tokens back in every layer: decode gives blocks behind the
window back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.config.settings import ClusterArgs
from tests.flow.local_cluster import let_all_in, local_cluster
from tests.flow.test_law import cluster_args
from tests.flow.text_models import BLOCK_SIZE, WINDOW, answers, draw_prompts, generated, save_mistral

NUM_TOKENS = 100
PROMPT_LENGTHS = (1, 5, 24, 37, 90, 33)
WHOLE_BLOCKS = sum(-(-(length + NUM_TOKENS) // BLOCK_SIZE) for length in PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mistral(tmp_path_factory.mktemp("window-model"), WINDOW)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return draw_prompts(PROMPT_LENGTHS)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return generated(folder, prompts, NUM_TOKENS)


def window_args(folder: Path, **decode: Any) -> ClusterArgs:
    args = cluster_args(24).model_copy(update={"model": str(folder), "block_size": BLOCK_SIZE})
    return args.model_copy(update={"decode": type(args.decode).model_validate(decode)})


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_long_answers_behind_a_window_equal_generate(
    folder, prompts, expected, num_choices, speculation
):
    """All at once in a pool that holds half of what they would hold without a window, and nobody has to give
    way."""
    num_blocks = WHOLE_BLOCKS * num_choices // 2
    args = window_args(folder, kv_blocks=num_blocks, speculation={"method": speculation})
    async with local_cluster(args, (0, 1, 1)) as cluster:
        got = await asyncio.gather(
            *(answers(cluster, prompt, NUM_TOKENS, num_choices=num_choices) for prompt in prompts)
        )
        assert cluster.decodes[0].engine.load().totals.num_preempted == 0
    assert got == [[answer] * num_choices for answer in expected]


async def test_answers_that_lost_their_window_and_were_computed_anew_equal_generate(
    folder, prompts, expected
):
    """Short prompts are admitted together and grow out of the pool, which is as small as the longest answer
    allows."""
    crowd = prompts * 3
    async with local_cluster(
        let_all_in(window_args(folder, kv_blocks=24)), (0, 1, 1), overcommits=len(crowd)
    ) as cluster:
        assert all(worker.features.max_rows == BLOCK_SIZE for worker in (*cluster.prefills, *cluster.decodes))
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in crowd))
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
    assert got == [[answer] for answer in expected] * 3
