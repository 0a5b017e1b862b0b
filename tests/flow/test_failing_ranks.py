"""One rank of a worker fails in its start. The worker's start ends with that rank's error, whatever the other
ranks wait for: no deadline passes, for those of collectives are longer than this test may last."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.types.members import Role
from cluster.worker.language import LanguageSizes
from cluster.worker.ranks import Ranks
from cluster.worker.setup import set_up
from tests.fakes import failing_rank
from tests.fakes.failing_rank import BEFORE_IT_MEETS, KILLED, MESSAGE, WITHOUT_NOTICE
from tests.fakes.processes import fork_server
from tests.fakes.slow_params import often
from tests.flow.text_models import SIZES, save_text_model

HANG_S = 120.0
CASES = {  # ranks, the one that fails, what it does, what the operator reads
    BEFORE_IT_MEETS: (2, 1, f"rank 1: OutOfMemoryError: {MESSAGE}"),
    WITHOUT_NOTICE: (3, 2, f"rank 2: OutOfMemoryError: {MESSAGE}"),
    KILLED: (2, 1, "rank 1: its process has ended by SIGKILL"),
}


def lead(args: ClusterArgs, folder: Path, failing: int, place: str, results: Connection) -> None:
    """Rank 0, in a process of its own: a start that has failed leaves its thread in a collective."""
    os.environ.update(EPDG_SOCKET_DIR=str(folder), FAILING_RANK=str(failing), FAILING_PLACE=place)
    setup, role, sizes = set_up(args, "w"), Role.DECODE, LanguageSizes(20, 0.9, 1 << 20, 64, 4)
    ranks = Ranks(args, setup, role, sizes, 60.0, follower=failing_rank.__name__)
    try:
        ranks.load(args, setup, role, sizes)
    except ConfigError as error:
        results.send(error.message)
    os._exit(0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: Any = {**SIZES, "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6}
    config = hf.LlamaConfig(**sizes)
    return save_text_model(tmp_path_factory.mktemp("model"), config, seed=6)


@pytest.mark.parametrize("place", often(CASES, [KILLED]))
def test_a_rank_that_fails_ends_the_start_with_its_error(place: str, model: Path, tmp_path: Path) -> None:
    num_ranks, failing, expected = CASES[place]

    args = ClusterArgs(model=str(model), device="cpu", dtype="float32", tensor_parallel_size=num_ranks)
    ours, theirs = Pipe()
    leader = fork_server().Process(target=lead, args=(args, tmp_path, failing, place, theirs), daemon=True)
    leader.start()
    theirs.close()
    try:
        assert ours.poll(HANG_S), "the start hangs"
        assert ours.recv() == expected
        leader.join(HANG_S)
        assert leader.exitcode == 0
    finally:
        leader.kill()
