"""How each server is started on the same model and cores, and a context in which one runs.

A plan is data: command, environment, address. `running` starts it in a process group of its own, waits for
/health, and ends it also after an exception.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from bench import REPOSITORY, clusters
from bench.client import Endpoint
from bench.engine import isa
from bench.engine.models import VISION_MODEL
from bench.engine.processes import VARIABLE, ProcessMark, end_all

MODEL_ID = "m"
OURS, VLLM, VLLM_FP32, LLAMA = "ours", "vllm", "vllm-fp32", "llama"
PEERS = (VLLM, VLLM_FP32, LLAMA)
READY_TIMEOUT_S = 600.0  # vllm compiles for minutes on a busy machine
STOP_TIMEOUT_S = 60.0
CONTEXT_TOKENS = 8192
ROLES = ("encode", "prefill", "decode")  # deploy/cluster.yaml
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


class ServerError(Exception):
    """A server did not start; the message has the end of its log."""


@dataclass(frozen=True)
class Setup:
    """What all servers of a run share."""

    models: Path  # folder of the models, and of llama.cpp's files made from them
    work: Path  # logs and configuration files go here
    cores: tuple[int, ...]  # CPU numbers that every server is bound to
    port: int
    peers: Mapping[str, Path]  # of PEERS; vllm: the `vllm` command; llama: llama.cpp's folder
    threads: tuple[int, int, int]  # our encode, prefill and decode replicas
    dtype: str = "bfloat16"  # or float32; llama.cpp computes with what its file has
    isa: str = isa.NATIVE  # of ISAS
    roles: tuple[str, ...] = ROLES  # one worker of each, in our cluster
    settings: Mapping[str, Any] = field(default_factory=dict)  # other arguments of our cluster


@dataclass(frozen=True)
class ServerPlan:
    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    endpoint: Endpoint
    cores: tuple[int, ...]
    log: Path


@dataclass(frozen=True)
class RunningServer:
    name: str
    endpoint: Endpoint
    mark: ProcessMark
    start_s: float  # until /health answered


def make_plan(setup: Setup, name: str, model: str, overrides: Mapping[str, Any] | None = None) -> ServerPlan:
    """`overrides`: arguments of our cluster besides the usual ones; not for peers."""
    setup.work.mkdir(parents=True, exist_ok=True)
    log = setup.work / f"{name}-{model}.log"
    extra: dict[str, Any] = {}  # see Endpoint: None stands for the number of tokens
    if name == OURS:
        config = setup.work / f"ours-{model}.yaml"
        config.write_text(yaml.safe_dump(cluster_config(setup, model, overrides or {}), sort_keys=False))
        command = [sys.executable, "-m", "deploy.serving.command", "serve", str(config)]
        environment = isa.torch_environment(setup.isa)
    elif name in (VLLM, VLLM_FP32):
        command, environment = vllm_command(setup, name, model), vllm_environment(setup, name)
        extra = {"min_tokens": None}
    elif name == LLAMA:
        command, environment, extra = llama_command(setup, model), {}, {"cache_prompt": True}
    else:
        raise ServerError(f"no such server: {name}; known are {', '.join((OURS, *PEERS))}")
    endpoint = Endpoint(f"http://127.0.0.1:{setup.port}", MODEL_ID, extra)
    return ServerPlan(name, command, {**OFFLINE, **environment}, endpoint, setup.cores, log)


def cluster_config(setup: Setup, model: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A Serve configuration: deploy/cluster.yaml with another model and dtype, and the threads and roles of
    this run.
    """
    encode, prefill, decode = setup.threads
    args: dict[str, Any] = {
        "model": str(setup.models / model),
        "model_id": MODEL_ID,
        "dtype": setup.dtype,
        "encode": {"threads": encode},
        "prefill": {"threads": prefill},
        "decode": {"threads": decode},
        "roles": list(setup.roles),
        **isa.cluster_args(setup.isa),
    }
    for name, value in (*setup.settings.items(), *overrides.items()):
        args[name] = {**args[name], **value} if isinstance(value, dict) and name in args else value
    pools = [
        role.title().replace("_", "")
        for role in (*setup.roles, "door")
        if role != "encode" or model == VISION_MODEL
    ]
    config = clusters.configuration(args, port=setup.port)
    config["applications"][0]["deployments"] = [{"name": pool, "num_replicas": 1} for pool in pools]
    return config


def vllm_command(setup: Setup, name: str, model: str) -> list[str]:
    command = [str(setup.peers[name]), "serve", str(setup.models / model), "--served-model-name", MODEL_ID]
    command += ["--dtype", "float32" if name == VLLM_FP32 else setup.dtype]
    command += ["--host", "127.0.0.1", "--port", str(setup.port)]
    command += ["--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "32"]
    if model == VISION_MODEL:
        command += ["--limit-mm-per-prompt", '{"image":2,"video":0}']
    return command


def vllm_environment(setup: Setup, name: str) -> dict[str, str]:
    """The environment of vllm. Without the binding it leaves a core unused; without the preloaded libraries
    it is slower."""
    scripts = setup.peers[name].parent
    libraries = [scripts.parent / "lib" / file for file in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    return {
        **isa.vllm_environment(setup.isa, scripts.parent / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in setup.cores),
        "LD_PRELOAD": ":".join(map(str, libraries)),
        "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }


def llama_command(setup: Setup, model: str) -> list[str]:
    threads = str(len(setup.cores))
    server = isa.llama_server(setup.peers[LLAMA], setup.isa)
    command = [str(server), "-m", str(setup.models / f"{model}.gguf"), "--alias", MODEL_ID]
    command += ["--host", "127.0.0.1", "--port", str(setup.port), "-t", threads, "-tb", threads]
    command += ["-np", "16", "-c", "24576", "--no-webui"]
    if model == VISION_MODEL:
        command += ["--mmproj", str(setup.models / f"{model}-mmproj.gguf")]
    return command


@contextlib.contextmanager
def running(plan: ServerPlan) -> Iterator[RunningServer]:
    """Yields the server when it is ready and ends it with the block. Raises ServerError if it is not ready in
    time.
    """
    if is_healthy(plan.endpoint.url):
        raise ServerError(f"something answers at {plan.endpoint.url} already")
    token = uuid.uuid4().hex
    environment = {**os.environ, **plan.environment, VARIABLE: token}
    started_at = time.monotonic()
    with plan.log.open("wb") as log:
        process = subprocess.Popen(
            plan.command,
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the terminal's Ctrl-C comes to us alone
            preexec_fn=lambda: os.sched_setaffinity(0, plan.cores),
        )
    mark = ProcessMark(token, process.pid)
    try:
        wait_ready(process, plan)
        yield RunningServer(plan.name, plan.endpoint, mark, time.monotonic() - started_at)
    finally:
        stop(process, mark)


def wait_ready(process: subprocess.Popen[bytes], plan: ServerPlan) -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not is_healthy(plan.endpoint.url):
        if process.poll() is not None or time.monotonic() > deadline:
            end = "\n".join(plan.log.read_text(errors="replace").splitlines()[-30:])
            raise ServerError(f"{plan.name} is not ready after {READY_TIMEOUT_S:.0f} s or has ended:\n{end}")
        time.sleep(0.25)


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
            return answer.status == 200
    except (urllib.error.URLError, OSError):
        return False


def stop(process: subprocess.Popen[bytes], mark: ProcessMark) -> None:
    """SIGTERM to the command, time to clean up, then the end of every process with the mark. Blocks."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    end_all(mark)
    process.wait()
