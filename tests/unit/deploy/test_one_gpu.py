"""deploy/cluster-one-gpu.yaml fits the cluster's settings, and what its comment offers fits one GPU."""

from __future__ import annotations

import re

import pytest
import yaml

from cluster.config.settings import REPOSITORY, ClusterArgs
from cluster.engine.limits import limits_of, sizes_of
from cluster.errors import ConfigError
from cluster.types.members import Role
from deploy.app import Hosts, actor_options_of
from deploy.serving.preflight import Machine, check
from tests.fakes.model_folders import whole_omni_folder

FILE = REPOSITORY / "deploy" / "cluster-one-gpu.yaml"
CONTENT = yaml.safe_load(FILE.read_text())["applications"][0]
NOTHING = Hosts(frozenset(), frozenset())


def args_of(**changes: object) -> ClusterArgs:
    return ClusterArgs.model_validate({**CONTENT["args"], **changes})


@pytest.mark.parametrize("has_gpu", [True, False])
def test_it_starts_where_there_is_a_gpu(has_gpu: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("deploy.serving.preflight.check_port", lambda host, port: None)
    machine = Machine(cores=(0,), has_gpu=lambda: has_gpu)
    variables = {"EPDG_MODEL": str(whole_omni_folder(tmp_path / "m"))}
    if not has_gpu:
        with pytest.raises(ConfigError, match="no GPU"):
            check(FILE, variables, machine)
        return
    plan = check(FILE, variables, machine)
    assert [each["name"] for each in plan.content["applications"][0]["deployments"]] == ["Whole", "Door"]


def test_its_one_worker_takes_one_gpu_and_the_memory_that_its_comment_says() -> None:
    args = args_of()
    assert actor_options_of(Role.WHOLE, args, NOTHING)["num_gpus"] == 1
    sizes = sizes_of(Role.WHOLE, args, limits_of(Role.WHOLE, args), "cuda")
    assert sizes.num_kv_blocks is None
    assert f"`whole: {{memory_share: {sizes.memory_share:g}}}`" in FILE.read_text()


def test_the_workers_that_its_comment_offers_share_one_gpu() -> None:
    text = re.sub(r"\s*\n# ", " ", FILE.read_text())
    (roles,) = re.findall(r"`roles: (\[.*?\])`", text)
    workers = [yaml.safe_load(each) for each in re.findall(r"`(\{name: .*?\}\})`", text)]
    (share,) = re.findall(r"`(language: \{.*?\})`", text)
    args = args_of(roles=yaml.safe_load(roles), **yaml.safe_load(share))
    assert args.language.memory_share < 0.9
    assert [worker["name"] for worker in workers] == [role.deployment for role in args.roles]
    assert sum(worker["ray_actor_options"]["num_gpus"] for worker in workers) == 1
