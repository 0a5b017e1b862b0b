"""Settings: wrong names are helped, the machine fills in the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from cluster.config import ClusterArgs, read_environment, resolve
from cluster.config.settings import DoorArgs
from cluster.errors import ConfigError


def model_folder(tmp_path: Path, name: str) -> str:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_an_unknown_setting_names_the_nearest_known_one():
    with pytest.raises(ValidationError, match='unknown setting "kv_block"; did you mean "kv_blocks"'):
        ClusterArgs.model_validate({"decode": {"kv_block": 3}})


def test_settings_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        ClusterArgs().block_size = 8  # type: ignore[misc]


def test_an_argument_wins_over_the_environment_and_that_over_the_default(tmp_path):
    first, second = model_folder(tmp_path, "first"), model_folder(tmp_path, "second")
    environment = read_environment({"EPDG_MODEL": second})
    assert resolve(ClusterArgs(model=first), environment, num_cores=2).model == first
    resolved = resolve(ClusterArgs(), environment, num_cores=2)
    assert (resolved.model, resolved.model_id) == (second, "second")


def test_threads_are_all_cores_unless_given(tmp_path):
    args = ClusterArgs.model_validate({"model": model_folder(tmp_path, "m"), "decode": {"threads": 3}})
    resolved = resolve(args, read_environment({}), num_cores=8)
    assert (resolved.encode.threads, resolved.prefill.threads, resolved.decode.threads) == (8, 8, 3)


def test_preprocessing_has_a_process_for_four_threads_unless_a_number_is_given(tmp_path):
    folder = model_folder(tmp_path, "m")
    for given, num_cores, expected in (({}, 3, 0), ({}, 16, 4), ({"prepare_processes": 0}, 16, 0)):
        args = ClusterArgs.model_validate({"model": folder, "encode": given})
        resolved = resolve(args, read_environment({}), num_cores=num_cores)
        assert resolved.encode.num_prepare_processes == expected


def test_a_pool_bound_to_cores_has_a_thread_on_each(tmp_path):
    pools = {"prefill": {"cores": [2, 3]}, "decode": {"cores": [0, 1], "threads": 1}}
    args = ClusterArgs.model_validate({"model": model_folder(tmp_path, "m"), **pools})
    resolved = resolve(args, read_environment({}), num_cores=8)
    assert (resolved.prefill.threads, resolved.decode.threads) == (2, 1)
    assert resolved.prefill.cores == (2, 3)


def test_a_folder_without_a_model_is_a_configuration_error(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        resolve(ClusterArgs(model=str(tmp_path)), read_environment({}), num_cores=1)


def test_whole_experts_need_several_ranks():
    with pytest.raises(
        ValidationError, match=r"expert_parallel divides experts .* tensor_parallel_size: it is 1"
    ):
        ClusterArgs(expert_parallel=True)
    assert ClusterArgs(expert_parallel=True, tensor_parallel_size=2).expert_parallel


def test_a_policy_is_joint_or_an_import_path():
    assert DoorArgs(policy="package.module:Class").policy == "package.module:Class"
    with pytest.raises(ValidationError, match="policy"):
        DoorArgs(policy="least_loaded")


def test_several_doors_keep_no_responses():
    assert DoorArgs().response_lifetime_s == 600
    several = DoorArgs.model_validate({"keep_responses_s": 60, "admission": {"num_doors": 2}})
    assert several.response_lifetime_s == 0
