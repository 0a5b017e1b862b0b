"""Two clusters for all tests of this folder, each on a port of its own and ended by process id: the shipped
one, of four processes behind HTTP, and a larger one. To start one costs half a minute of two cores: every
test that runs by default takes one of these. They end with the last test of the folder, because an idle
cluster takes a part of a core."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.serving.launch import LocalCluster, processes_of
from cluster.serving.ports import free_port
from tests.flow.local_cluster import PATIENT_DOOR

CLUSTER = Path(__file__).parents[2] / "deploy" / "cluster.yaml"
_clusters = ExitStack()


def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        _clusters.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    return _clusters.enter_context(running(tmp_path_factory.mktemp("cluster")))


@pytest.fixture(scope="session")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    """Two encoders, one prefill worker and two decode workers; prefill and decode workers have two processes
    each, and decode guesses."""
    speculation = {"method": "ngram", "max_draft_tokens": 3}
    args = {"tensor_parallel_size": 2, "decode": {"speculation": speculation}, "door": PATIENT_DOOR}
    return _clusters.enter_context(running(tmp_path_factory.mktemp("parallel"), args, Encode=2, Decode=2))


@contextmanager
def running(folder: Path, args: dict[str, Any] | None = None, **num_replicas: int) -> Iterator[LocalCluster]:
    """The shipped cluster, with other arguments or numbers of replicas if they are given; audited at its
    end."""
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
    with LocalCluster(path) as local:
        local.wait_ready()
        yield local
        audit(local)
    assert processes_of(local.folder) == []


@pytest.fixture(scope="session")
def cluster_url(cluster: LocalCluster) -> str:
    return cluster.url


def audit(cluster: LocalCluster) -> None:
    """What must hold when the last test is over: every request has ended and nothing is held for it."""
    assert not cluster.has_ended(), cluster.log_end()
    from bench import soak

    assert soak.wait_idle(cluster.url, timeout_s=120) == {}
