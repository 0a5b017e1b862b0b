"""Several hosts, as `ray start` makes them: five nodes with addresses and labels of their own on this
machine. Pools keep to the hosts of their label, workers meet over TCP with the cluster's secret, and a host
is lost under load."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.metrics import wait_idle
from bench.ray_access import ray_headers
from bench.workload import make_cases
from deploy.serving.launch import processes_of
from deploy.serving.local_environment import cluster_environment
from deploy.serving.ports import free_port
from tests.flow.test_law import ask
from tests.serve.conftest import CLUSTER

pytestmark = pytest.mark.slow

START_S, ANSWER_S = 300.0, 240.0
MAX_TOKENS, NUM_CASES = 300, 16
LABELS = ("door", "encode", "prefill", "decode", "decode")  # of the nodes; the first is the head
REPLICAS = [  # with the labels of their nodes
    ("Decode", "decode"),
    ("Decode", "decode"),
    ("Door", "door"),
    ("Encode", "encode"),
    ("Prefill", "prefill"),
]
ARGS = {"side_channel": "tcp", "transfer": {"net_devices": ["lo"]}}


@dataclass
class Nodes:
    folder: Path
    labels: dict[str, str] = field(default_factory=dict)  # by address

    def __post_init__(self) -> None:
        environment = cluster_environment(self.folder)
        for name in ("RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"):
            del environment[name]
        secret = {"EPDG_CLUSTER_SECRET": secrets.token_hex(32)}
        self._environment = {**environment, **secret, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1"}
        self._gcs_port, self._dashboard_port, self._port = free_port(), free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self, label: str) -> None:
        address = f"127.0.0.{len(self.labels) + 2}"
        dashboard = ("--dashboard-host=127.0.0.1", f"--dashboard-port={self._dashboard_port}")
        head = ("--head", f"--port={self._gcs_port}", *dashboard)
        place = (f"--address=127.0.0.2:{self._gcs_port}",) if self.labels else head
        size = ("--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000")
        ports = [f"--{name}-port={free_port()}" for name in ("dashboard-agent-listen", "metrics-export")]
        self._run(
            "ray", "start", *place, f"--node-ip-address={address}", f"--labels=pool={label}", *size, *ports
        )
        self.labels[address] = label

    def deploy(self) -> None:
        config = yaml.safe_load(CLUSTER.read_text())
        config["http_options"]["port"] = self._port
        (application,) = config["applications"]
        application["args"] = ARGS
        for deployment in application["deployments"]:
            if deployment["name"] == "Decode":
                deployment |= {"num_replicas": 2, "max_replicas_per_node": 2}
            if deployment["name"] == "Door":
                deployment["ray_actor_options"] = {"num_cpus": 0, "label_selector": {"pool": "door"}}
        file = self.folder / "cluster.yaml"
        file.write_text(yaml.safe_dump(config))
        self._run("serve", "deploy", str(file), f"--address=http://127.0.0.1:{self._dashboard_port}")
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError, KeyError):
                if httpx.get(f"{self.url}/health").status_code == 200 and self.replicas() == REPLICAS:
                    return
            time.sleep(0.2)
        pytest.fail(f"not ready: {self.status()}")

    def status(self) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self._dashboard_port}/api/serve/applications/"
        return httpx.get(url, headers=ray_headers(self.folder), timeout=ANSWER_S).json()["applications"][
            "epdg"
        ]

    def replicas(self) -> list[tuple[str, str]]:
        """Deployment and label of the node of each replica that runs."""
        return sorted(
            (name, self.labels[replica["node_ip"]])
            for name, deployment in self.status()["deployments"].items()
            for replica in deployment["replicas"]
            if replica["state"] == "RUNNING"
        )

    def kill(self, address: str) -> None:
        """All processes of the node, as when its power fails."""
        mark = address.encode()
        lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in processes_of(self.folder)}
        of_node = {pid for pid, line in lines.items() if mark in line}
        assert any(b"raylet" in lines[pid] for pid in of_node)
        of_node |= {pid for pid in lines if parent_of(pid) in of_node}  # replicas, which have other names
        for pid in of_node:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in processes_of(self.folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + 5.0
            while processes_of(self.folder) and time.monotonic() < deadline:
                time.sleep(0.1)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(Path(sys.executable).parent / program), *arguments]
        ended = subprocess.run(
            command, env=self._environment, cwd=self.folder, capture_output=True, text=True, timeout=START_S
        )
        assert ended.returncode == 0, ended.stderr


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(Path(tempfile.mkdtemp(prefix="epdg-", dir="/tmp")))
    try:
        for label in LABELS:
            nodes.start(label)
        nodes.deploy()
        yield nodes
    finally:
        nodes.stop()


async def answers(nodes: Nodes) -> list[str]:
    fields = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "model": "demo_model"}
    async with httpx.AsyncClient(base_url=nodes.url, timeout=ANSWER_S) as client:
        got = await asyncio.gather(*(ask(client, case, **fields) for case in make_cases(41, NUM_CASES)))
    return [answer["choices"][0]["message"]["content"] for answer in got]


def metric(nodes: Nodes, name: str) -> float:
    lines = httpx.get(f"{nodes.url}/metrics", timeout=ANSWER_S).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def until_half_are_in_work(nodes: Nodes) -> None:
    async with asyncio.timeout(ANSWER_S):
        while await asyncio.to_thread(metric, nodes, "epdg_door_flights") < NUM_CASES / 2:
            await asyncio.sleep(0.01)


async def test_pools_keep_to_their_hosts_and_a_lost_host_loses_no_request(nodes: Nodes) -> None:
    assert nodes.replicas() == REPLICAS
    expected = await answers(nodes)
    asked = asyncio.ensure_future(answers(nodes))
    await until_half_are_in_work(nodes)
    nodes.kill(max(nodes.labels))
    assert await asked == expected
    assert metric(nodes, "epdg_door_replays") > 0
    assert await asyncio.to_thread(wait_idle, nodes.url, ANSWER_S) == {}
