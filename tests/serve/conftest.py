"""Two clusters for all tests of this folder, each on a port of its own and ended by process id: the shipped
one, of four processes behind HTTP, and a larger one. To start one takes half a minute: every test that runs
by default takes one of these, and the larger one starts while the tests of the other run. They end with the
last test of the folder, both at once, because an idle cluster takes a part of a core."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.serving.launch import LocalCluster, processes_of
from deploy.serving.ports import free_port
from tests.flow.local_cluster import PATIENT_DOOR

CLUSTER = Path(__file__).parents[2] / "deploy" / "cluster.yaml"
_clusters: list[AbstractContextManager[LocalCluster]] = []


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        ending, _clusters[:] = list(_clusters), []
        with ThreadPoolExecutor(2) as threads:  # each waits for processes
            list(threads.map(lambda each: each.__exit__(None, None, None), ending))


def entered(cluster: AbstractContextManager[LocalCluster]) -> LocalCluster:
    """Until the last test of the folder."""
    local = cluster.__enter__()
    _clusters.append(cluster)
    return local


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    local = entered(running(tmp_path_factory.mktemp("cluster")))
    if any("parallel" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("_parallel")
    return local


@pytest.fixture(scope="session")
def adapters_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the larger cluster."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="session")
def _parallel(tmp_path_factory: pytest.TempPathFactory, adapters_folder: Path) -> LocalCluster:
    speculation = {"method": "ngram", "num_speculative_tokens": 3}
    args = {
        "tensor_parallel_size": 2, "decode": {"speculation": speculation}, "door": PATIENT_DOOR,
        "adapters_folder": str(adapters_folder), "max_loras": 1, "max_lora_rank": 4,
    }  # fmt: skip
    return entered(starting(tmp_path_factory.mktemp("parallel"), args, Encode=2, Decode=2))


@pytest.fixture(scope="session")
def parallel(_parallel: LocalCluster) -> LocalCluster:
    """Two encoders, one prefill worker and two decode workers; prefill and decode workers have two processes
    each, and decode guesses."""
    _parallel.wait_ready()
    return _parallel


@contextmanager
def running(folder: Path, args: dict[str, Any] | None = None, **num_replicas: int) -> Iterator[LocalCluster]:
    """`starting`, and ready."""
    with starting(folder, args, **num_replicas) as local:
        local.wait_ready()
        yield local


@contextmanager
def starting(folder: Path, args: dict[str, Any] | None = None, **num_replicas: int) -> Iterator[LocalCluster]:
    """The shipped cluster, audited at its end; `configuration` says what is given."""
    with LocalCluster(configuration(folder, args, **num_replicas)) as local:
        yield local
        local.wait_ready()
        audit(local)
    assert processes_of(local.folder) == []


def configuration(folder: Path, args: dict[str, Any] | None = None, **num_replicas: int) -> Path:
    """The file of the shipped cluster, on a free port, with other arguments or numbers of replicas if they
    are given."""
    config = yaml.safe_load(CLUSTER.read_text())
    config["http_options"]["port"] = free_port()
    (application,) = config["applications"]
    if args is not None:
        application["args"] = args
    kept = [each for each in application["deployments"] if each["name"] not in num_replicas]
    changed = [{"name": name, "num_replicas": number} for name, number in num_replicas.items()]
    application["deployments"] = [*kept, *changed]
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="session")
def cluster_url(cluster: LocalCluster) -> str:
    return cluster.url


def audit(cluster: LocalCluster) -> None:
    """What must hold when the last test is over: every request has ended and nothing is held for it."""
    assert not cluster.has_ended(), cluster.log_end()
    from bench.metrics import wait_idle

    assert wait_idle(cluster.url, timeout_s=120) == {}
