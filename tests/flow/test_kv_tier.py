"""KV that came back from host memory, or from the disk of an earlier run, gives the answers of `generate`."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config.settings import ClusterArgs
from cluster.kvcache.tier import KvTier
from tests.fakes.cases import Answered, Pair
from tests.flow.local_cluster import PATIENT_DOOR, LocalCluster, local_cluster

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_TOKENS = 12
MIB = 1 << 20


@pytest.fixture(scope="module")
def expected() -> list[Pair]:
    return Answered(MODEL, 5, MAX_TOKENS).first(4)


def cluster_args(folder: str) -> ClusterArgs:
    return ClusterArgs.model_validate(
        {
            "model": str(MODEL),
            "model_id": "demo",
            "dtype": "float32",
            "prefill": {"max_batch_tokens": 64, "kv_blocks": 8},
            "decode": {"kv_blocks": 8},
            "door": PATIENT_DOOR,
            "kv_cache": {"host_bytes": MIB // 4, "disk_bytes": 64 * MIB, "disk_folder": folder},
        }
    )


async def check(cluster: LocalCluster, expected: list[Pair]) -> int:
    """How many blocks came back from the tiers."""
    for case, answer in expected:
        text, num_tokens = await cluster.answer(case, MAX_TOKENS)
        assert (text, num_tokens) == (answer.text, len(answer.token_ids)), case.kind
    workers = [*cluster.prefills, *cluster.decodes]
    return sum(worker.engine.load().tier.num_loaded for worker in workers)


async def test_answers_from_the_second_tier_equal_generate(
    expected: list[Pair], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool holds some prompts, host memory some more, and the disk, which a second cluster finds, all."""
    monkeypatch.setattr(KvTier, "is_worth", lambda self, num_blocks, compute_s: True)
    args = cluster_args(str(tmp_path / "kv"))
    async with local_cluster(args, (1, 0, 0, 1)) as cluster:
        await check(cluster, expected)
        assert await check(cluster, expected) > 0
        assert cluster.decodes[0].engine.load().tier.held_bytes > 16 * 65_536  # more than the pool
    async with local_cluster(args, (1, 0, 0, 1)) as cluster:
        assert await check(cluster, expected) > 0
