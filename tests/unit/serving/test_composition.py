"""Which deployments a model gets, and what their replicas take on which hosts."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError
from cluster.text.tokenizer import TextProcessor
from cluster.types.members import Role
from deploy.app import Hosts, actor_options_of, compose
from tests.fakes.model_folders import DEMO_MODEL, text_folder, whole_omni_folder

NOTHING = Hosts(frozenset(), frozenset())


def pools_of(model: object, **args: Any) -> list[str]:
    door: Any = compose(ClusterArgs(model=str(model), **args), NOTHING)._bound_deployment
    return [handle._bound_deployment.name for handle in door.init_args[3].values()]


def test_a_text_model_has_no_encode_pool_and_any_omni_checkpoint_has_one(tmp_path, caplog):
    assert pools_of(text_folder(tmp_path / "text")) == ["Prefill", "Decode"]
    assert [record.getMessage() for record in caplog.records] == [
        "model type 'llama' takes no media: there is no encode pool"
    ]
    assert pools_of(whole_omni_folder(tmp_path / "omni")) == ["Encode", "Prefill", "Decode"]
    assert pools_of(DEMO_MODEL) == ["Encode", "Prefill", "Decode"]


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        (("encode", "language"), ["Encode", "Language"]),
        (("encode", "prefill", "decode", "language"), ["Encode", "Prefill", "Decode", "Language"]),
        (("encode", "prefill", "language"), ["Encode", "Prefill", "Language"]),
        (("whole",), ["Whole"]),
        (("encode_prefill", "decode", "whole"), ["EncodePrefill", "Decode", "Whole"]),
    ],
)
def test_the_roles_are_the_deployments(roles, names):
    assert pools_of(DEMO_MODEL, roles=roles) == names


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (("encode", "prefill"), "no worker would decode"),
        (("encode", "decode"), "no worker would prefill"),
        (("encode_prefill",), "no worker would decode; add one of decode, language, whole"),
        (("language", "language"), "twice"),
    ],
)
def test_roles_that_cannot_serve_are_refused(roles, why):
    with pytest.raises(ValidationError, match=why):
        ClusterArgs(roles=roles)


def test_a_folder_that_cannot_be_loaded_is_refused_when_the_application_is_composed(tmp_path):
    folder = text_folder(tmp_path / "text")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        compose(ClusterArgs(model=str(folder)), NOTHING)


def test_the_tokenizer_is_left_to_the_door(tmp_path):
    """It takes a while to read, and replicas start only after this."""
    folder = text_folder(tmp_path / "text")
    (folder / "tokenizer.json").write_text("{")
    compose(ClusterArgs(model=str(folder)), NOTHING)
    with pytest.raises(ConfigError, match="cannot read"):
        TextProcessor.load(folder)


@pytest.mark.parametrize(
    ("role", "args", "hosts", "expected"),
    [
        (Role.DECODE, {}, NOTHING, {"num_cpus": 0, "resources": {}}),
        (
            Role.DECODE,
            {},
            Hosts(frozenset({"decode_pool"}), frozenset()),
            {"num_cpus": 0, "resources": {"decode_pool": 1}},
        ),
        (
            Role.PREFILL,
            {"device": "cuda", "tensor_parallel_size": 2},
            Hosts(frozenset(), frozenset({"prefill"})),
            {"num_cpus": 1, "num_gpus": 2, "resources": {}, "label_selector": {"pool": "prefill"}},
        ),
        (
            Role.ENCODE,
            {"device": "cuda", "tensor_parallel_size": 2},
            Hosts(frozenset(), frozenset({"prefill"})),
            {"num_cpus": 1, "num_gpus": 1, "resources": {}},
        ),
    ],
)
def test_a_pool_goes_where_hosts_offer_it_and_takes_a_gpu_per_rank(
    role: Role, args: dict[str, Any], hosts: Hosts, expected: dict[str, Any]
):
    assert actor_options_of(role, ClusterArgs.model_validate(args), hosts) == expected
