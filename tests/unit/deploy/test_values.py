"""Values of the chart, judged by its schema and by the code, without Helm."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from cluster.config.environment import read_environment
from cluster.config.hub import NOT_WANTED
from cluster.config.resolution import resolve
from cluster.config.settings import REPOSITORY, ClusterArgs
from cluster.types.members import Role
from deploy.generate import DECIDED, files
from deploy.serving.local_environment import FRONT, ONE_LOOP
from tests.unit.deploy.charts import CHART, EXAMPLES, SCHEMA, VALUES, example

JUDGE = jsonschema.Draft7Validator(SCHEMA)


def _complaints(values: dict[str, Any]) -> list[str]:
    return [error.message for error in JUDGE.iter_errors(values)]


def test_derived_files_are_what_the_generator_writes():
    stale = [path.name for path, text in files().items() if not path.exists() or path.read_text() != text]
    assert not stale, "run `python -m deploy.generate`"
    boards = {path for path in files() if path.parent.name == "dashboards"}
    assert boards == set((CHART / "dashboards").iterdir())


def test_the_schema_is_a_schema_and_takes_the_defaults_and_the_examples():
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    assert _complaints(VALUES) == []
    assert {path.name: _complaints(yaml.safe_load(path.read_text())) for path in EXAMPLES} == {
        path.name: [] for path in EXAMPLES
    }


def test_values_and_schema_name_the_same():
    """Every value has a default, so that values.yaml shows it; only Helm's `global` and limits have none."""

    def compare(node: dict[str, Any], values: Any, path: str) -> list[str]:
        if "$ref" in node:
            node = SCHEMA["definitions"][node["$ref"].rpartition("/")[2]]
        properties = node.get("properties", {})
        if path == ".settings" or path.startswith(".pools.") or not properties:
            return []
        missing = [f"{path}.{name}" for name in properties if name not in values]
        return missing + [
            each
            for name, inner in properties.items()
            if name in values
            for each in compare(inner, values[name], f"{path}.{name}")
        ]

    assert compare(SCHEMA, VALUES, "") == [".global", ".head.shmSize", ".doors.shmSize"]


@pytest.mark.parametrize(
    "values",
    [
        {"pools": {"prefil": {"enabled": True}}},
        {"pools": {"prefill": {"pods": 0}}},
        {"pools": {"prefill": {"replicas": 2}}},
        {"pools": {"prefill": {"shareWith": "door"}}},
        {"fullnameOverride": "a" * 48},
        {"fullnameOverride": "9lives"},
        {"head": {"env": {"NUMBER": 1}}},
        {"checkpoint": {"source": "s3"}},
        {"checkpoint": {"hub": {"id": "no-organisation"}}},
        {"settings": {"decode": {"kv_blocs": 4}}},
        {"settings": {"decode": {"kv_blocks": 1}}},
        {"settings": {"door": {"media": {"fetch": {"total_timeout_s": 0}}}}},
        {"settings": {"dtype": "float8"}},
    ],
)
def test_wrong_values_are_refused(values):
    assert _complaints(values)


def test_the_schema_of_settings_takes_what_the_application_takes():
    defaults = ClusterArgs().model_dump(mode="json")
    for path in DECIDED:
        *parents, name = path.split(".")
        place = defaults
        for parent in parents:
            place = place[parent]
        assert _complaints({"settings": _nested(path, place.pop(name))}), f"{path} is decided by other values"
    assert _complaints({"settings": defaults}) == []


def _nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def test_settings_of_the_examples_are_settings():
    for path in EXAMPLES:
        ClusterArgs.model_validate(yaml.safe_load(path.read_text()).get("settings", {}))
    with pytest.raises(ValidationError):
        ClusterArgs.model_validate({"no_such": 1})


def test_every_role_is_a_pool():
    assert list(VALUES["pools"]) == [role.value for role in Role]
    assert SCHEMA["definitions"]["poolDefaults"]["properties"]["shareWith"]["enum"] == ["", *Role]


def test_the_trial_serves_the_model_that_ships(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    path = example("cpu-trial")["checkpoint"]["path"]
    assert path == VALUES["checkpoint"]["path"] == ClusterArgs().model
    resolved = resolve(ClusterArgs(model=path), read_environment({}), num_cores=1)
    assert resolved.model == str(REPOSITORY / path)


def test_the_front_of_the_pods_is_that_of_epdg_serve():
    environment = yaml.safe_load((CHART / "files" / "environment.yaml").read_text())
    expected = {**FRONT, **ONE_LOOP}
    assert {name: environment.get(name) for name in expected} == expected
    assert all(isinstance(value, str) for value in environment.values())


def test_the_download_leaves_out_what_no_worker_reads():
    assert yaml.safe_load((CHART / "files" / "not-wanted.yaml").read_text()) == list(NOT_WANTED)
