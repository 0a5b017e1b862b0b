"""One cluster for the session: four processes behind HTTP, on a port of its own, ended by process id."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from cluster.serving.launch import LocalCluster, processes_of
from cluster.serving.local_environment import free_port

CLUSTER = Path(__file__).parents[2] / "deploy" / "cluster.yaml"


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    config = yaml.safe_load(CLUSTER.read_text())
    config["http_options"]["port"] = free_port()
    path = tmp_path_factory.mktemp("cluster") / "cluster.yaml"
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

    assert soak.wait_idle(cluster.url, timeout_s=30) == {}
