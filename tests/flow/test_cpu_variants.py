"""The law of the house for each compiled variant that this processor runs, and for torch without native
code: the setting `cpu_kernels` reaches all workers, and the answers equal `generate`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.model.cpu import library
from cluster.native.variants import AUTO, NONE, runnable_variants, select
from tests.fakes.cases import Answered, Pair
from tests.fakes.slow_params import often
from tests.flow.local_cluster import local_cluster
from tests.flow.test_law import MODEL, check_ids, cluster_args

NUM_CASES, MAX_TOKENS = 3, 24
CHOICES = [*(variant.name for variant in runnable_variants()), NONE]  # best first


@pytest.fixture(scope="module")
def expected() -> list[Pair]:
    return Answered(MODEL, 12, MAX_TOKENS).first(NUM_CASES)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    select(AUTO)


@pytest.mark.parametrize("choice", often(CHOICES, CHOICES[1:]))  # all other tests run the best one
async def test_answers_of_every_variant_equal_generate(expected: list[Pair], choice: str) -> None:
    async with local_cluster(cluster_args(48).model_copy(update={"cpu_kernels": choice})) as cluster:
        kernels = library.load()
        assert kernels is None if choice == NONE else kernels is not None and kernels.variant == choice
        await check_ids(cluster, expected)
