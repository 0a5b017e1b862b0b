"""The RayService and its Serve file, rendered by Helm, judged by the application, Serve, KubeRay and
Kubernetes."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.serve.schema import ServeDeploySchema

from cluster.config.settings import ClusterArgs
from cluster.types.members import Role
from deploy.app import DOOR_STOP_S, DRAIN_TIMEOUT_S, Hosts, actor_options_of
from deploy.serving.local_environment import FRONT
from deploy.serving.scaling import ScalingPolicy
from router.scaling import ScalingSettings
from tests.unit.deploy.charts import (
    CHART,
    VALUES,
    Objects,
    RenderError,
    example,
    needs_helm,
    needs_package,
    needs_schemas,
    notes,
    one,
    pod_templates,
    render,
    walk,
)
from tests.unit.deploy.kuberay import RAY_SERVICE, complaints_of_the_operator

pytestmark = needs_helm

ALL_ROLES = {
    "settings": {"decode": {"speculation": {"method": "ngram"}}, "door": {"admission": {"max_queued": 7}}},
    "pools": {role.value: {"enabled": True} for role in Role},
}
SHARED = {
    "tensorParallelSize": 2,
    "pools": {"prefill": {"shareWith": "decode", "workersPerPod": 2}, "decode": {"pods": 3}},
}
SCALED = {
    "pools": {
        "encode": {"maxPods": 3},
        "prefill": {"pods": 2, "maxPods": 5, "workersPerPod": 2},
        "language": {"enabled": True, "shareWith": "prefill"},
    },
    "scaling": {"targetTtftSeconds": 0.5, "maxWorkers": 12},
    "networkPolicy": {"apiServer": [{"ipBlock": {"cidr": "10.0.0.1/32"}}]},
}
DRA = {"gpu": {"allocation": "dra"}, "rayToken": {"existingSecret": "ray-token"}}
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "cpu-trial": example("cpu-trial"),
    "one-node": example("one-node-8-gpus"),
    "20-h100": example("pools-20-h100"),
    "all-roles": ALL_ROLES,
    "shared": SHARED,
    "scaled": SCALED,
    "dra": DRA,
}


@pytest.fixture(scope="module")
def rendered() -> dict[str, Objects]:
    return {name: render(values) for name, values in CASES.items()}


@pytest.fixture(params=CASES)
def objects(request: pytest.FixtureRequest, rendered: dict[str, Objects]) -> Objects:
    return rendered[request.param]


def serve_file(objects: Objects) -> dict[str, Any]:
    return yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])


def application(objects: Objects) -> dict[str, Any]:
    (found,) = serve_file(objects)["applications"]
    return found


def deployments(objects: Objects) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in application(objects)["deployments"]}


def groups(objects: Objects) -> dict[str, dict[str, Any]]:
    """Worker groups by name."""
    found = one(objects, "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return {group["groupName"]: group for group in found}


def bounds(deployment: dict[str, Any]) -> tuple[int, int]:
    """The fewest and the most replicas."""
    scaling = deployment.get("autoscaling_config")
    return (
        (scaling["min_replicas"], scaling["max_replicas"]) if scaling else (deployment["num_replicas"],) * 2
    )


def test_serve_takes_the_file(objects: Objects):
    assert ServeDeploySchema.model_validate(serve_file(objects)).http_options.port == 8000


def test_the_application_takes_its_args(objects: Objects):
    args = ClusterArgs.model_validate(application(objects)["args"])
    assert args.side_channel == "tcp" and args.net_devices
    assert (args.door.admission.num_doors,) * 2 == bounds(deployments(objects)["Door"])


def test_the_args_are_the_settings_and_what_the_values_decide(rendered: dict[str, Objects]):
    assert ClusterArgs.model_validate(
        application(rendered["all-roles"])["args"]
    ) == ClusterArgs.model_validate(
        {
            "model": "deploy/demo_model",
            "device": "cuda",
            "side_channel": "tcp",
            "transfer": {"net_devices": ["eth0"]},
            "roles": list(Role),
            "decode": {"speculation": {"method": "ngram"}},
            "door": {"admission": {"max_queued": 7, "num_doors": 2}},
        }
    )
    large = ClusterArgs.model_validate(application(rendered["20-h100"])["args"])
    assert (large.model, large.model_id) == ("/models/hub", "Qwen/Qwen2.5-VL-7B-Instruct")
    assert large.prefill.max_batch_tokens == 8192
    trial = ClusterArgs.model_validate(application(rendered["cpu-trial"])["args"])
    assert [pool.threads for pool in (trial.encode, trial.prefill, trial.decode)] == [2, 2, 2]


def test_replicas_take_what_the_application_would_give_them(objects: Objects):
    """On hosts with the labels of the groups. The file's options replace those of the code, so they must be
    whole."""
    args = ClusterArgs.model_validate(application(objects)["args"])
    found = deployments(objects)
    assert found.keys() == {"Door", *(role.deployment for role in args.roles)}
    hosts = Hosts(frozenset(), frozenset(role.value for role in args.roles))
    for role in args.roles:
        options = dict(found[role.deployment]["ray_actor_options"])
        own = actor_options_of(role, args, hosts)
        assert own.pop("resources") == {}
        own.pop("label_selector"), options.pop("label_selector")
        assert options == own


def test_every_selector_finds_pods_with_room_for_its_replicas(objects: Objects):
    by_label = {group["labels"]["pool"]: group for group in groups(objects).values()}
    used = dict.fromkeys(by_label, 0)
    for deployment in deployments(objects).values():
        options = deployment["ray_actor_options"]
        group = by_label[options["label_selector"]["pool"]]
        assert group["replicas"] == group["minReplicas"]
        assert bounds(deployment) == tuple(
            group[bound] * deployment["max_replicas_per_node"] for bound in ("minReplicas", "maxReplicas")
        )
        used[options["label_selector"]["pool"]] += (
            options.get("num_gpus", 0) * deployment["max_replicas_per_node"]
        )
    assert {name: int(group["rayStartParams"]["num-gpus"]) for name, group in by_label.items()} == used


def test_pods_ask_for_the_gpus_that_ray_is_told(objects: Objects):
    claims = {each["metadata"]["name"]: each for each in objects if each["kind"] == "ResourceClaimTemplate"}
    for name, group in groups(objects).items():
        spec = group["template"]["spec"]
        (container,) = spec["containers"]
        gpus = int(group["rayStartParams"]["num-gpus"])
        limit = int(container["resources"].get("limits", {}).get("nvidia.com/gpu", 0))
        if names := [claim["resourceClaimTemplateName"] for claim in spec.get("resourceClaims", [])]:
            (request,) = claims[names[0]]["spec"]["spec"]["devices"]["requests"]
            assert (limit, request["exactly"]["count"]) == (0, gpus)
            assert container["resources"]["claims"] == [{"name": spec["resourceClaims"][0]["name"]}]
        else:
            assert limit == gpus, name
        tolerated = {each.get("key") for each in spec.get("tolerations", [])}
        assert ("nvidia.com/gpu" in tolerated) == (gpus > 0)
    assert bool(claims) == any("resourceClaims" in walk_keys(template) for template in templates(objects))


def test_pods_with_gpus_get_the_runtime_class(rendered: dict[str, Objects]):
    assert "runtimeClassName" not in walk_keys(rendered["defaults"])
    objects = render({"gpu": {"runtimeClassName": "nvidia"}})
    found = {
        name: template["spec"].get("runtimeClassName")
        for name, template in pod_templates(one(objects, "RayService")).items()
    }
    assert found == {"head": None, "door": None, "encode": "nvidia", "prefill": "nvidia", "decode": "nvidia"}


def test_another_claim_has_another_name_because_a_template_cannot_be_changed(rendered: dict[str, Objects]):
    def claims(values: dict[str, Any]) -> dict[str, dict[str, Any]]:
        objects = render({**DRA, **values})
        return {each["metadata"]["name"]: each for each in objects if each["kind"] == "ResourceClaimTemplate"}

    before, after = claims({}), claims({"tensorParallelSize": 2})
    assert len(before) == len(after) == 3
    (same,) = before.keys() & after.keys()
    assert same.startswith("epdg-encode-"), "encoders have one GPU each"
    assert before[same]["spec"] == after[same]["spec"]


def templates(objects: Objects) -> list[dict[str, Any]]:
    return list(pod_templates(one(objects, "RayService")).values())


def walk_keys(node: Any) -> set[str]:
    return set(walk(node, lambda each: each if isinstance(each, dict) else ()))


def test_the_examples_have_the_workers_that_they_promise(rendered: dict[str, Objects]):
    def replicas(name: str) -> dict[str, int]:
        return {each: deployment["num_replicas"] for each, deployment in deployments(rendered[name]).items()}

    assert replicas("one-node") == {"Encode": 1, "Prefill": 3, "Decode": 4, "Door": 1}
    assert groups(rendered["one-node"]).keys() == {"door", "decode"}
    assert replicas("20-h100") == {"Encode": 4, "Prefill": 8, "Decode": 8, "Door": 3}
    assert replicas("cpu-trial") == {"Encode": 1, "Prefill": 1, "Decode": 1, "Door": 1}


def test_pools_with_bounds_are_scaled_by_our_policy_and_their_pods_by_ray(rendered: dict[str, Objects]):
    objects = rendered["scaled"]
    found = {name: bounds(each) for name, each in deployments(objects).items()}
    assert found == {
        "Encode": (1, 3),
        "Prefill": (4, 10),
        "Language": (2, 5),  # one in each pod of the prefill pool
        "Decode": (1, 1),
        "Door": (2, 2),
    }
    policy = application(objects)["autoscaling_policy"]
    module, _, name = policy["policy_function"].partition(":")
    assert getattr(importlib.import_module(module), name) is ScalingPolicy
    settings = ScalingSettings(**policy["policy_kwargs"])
    assert (settings.target_ttft_s, settings.max_workers, settings.start_s) == (0.5, 12, 180)
    cluster = one(objects, "RayService")["spec"]["rayClusterConfig"]
    assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
    confined = pod_templates(one(objects, "RayService"))["head"]["spec"]["containers"][0]["securityContext"]
    assert cluster["autoscalerOptions"]["securityContext"] == confined
    # Without `autoscaling_config` of Door nobody would tell the policy what arrives.
    assert "autoscaling_config" in deployments(objects)["Door"]
    fixed = rendered["defaults"]
    assert "autoscaling_policy" not in application(fixed)
    assert "enableInTreeAutoscaling" not in one(fixed, "RayService")["spec"]["rayClusterConfig"]


@needs_package
@pytest.mark.parametrize("case", ["defaults", "shared", "scaled"])
def test_the_notes_have_a_patch_that_gives_a_running_cluster_its_pods(
    rendered: dict[str, Objects], case: str
):
    """KubeRay does not apply changed numbers. A patched cluster has those of the values, except for what the
    autoscaler decides."""
    text = notes(CASES[case])
    patch = json.loads(text.partition("--patch '")[2].partition("'")[0])
    wanted = one(rendered[case], "RayService")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    changed = {}
    for operation in patch:
        *path, place, field = operation["path"].split("/")
        assert path == ["", "spec", "workerGroupSpecs"]
        if operation["op"] == "test":
            assert (field, operation["value"]) == ("groupName", wanted[int(place)]["groupName"])
        else:
            changed[int(place), field] = operation["value"]
    expected = {
        (place, field): group[field]
        for place, group in enumerate(wanted)
        for field in ("replicas", "minReplicas", "maxReplicas")
        if field != "replicas" or group["minReplicas"] == group["maxReplicas"]
    }
    assert changed == expected


def test_only_the_head_calls_the_api_server_and_only_where_pools_are_scaled(rendered: dict[str, Objects]):
    for case, objects in rendered.items():
        with_token = {
            name
            for name, template in pod_templates(one(objects, "RayService")).items()
            if template["spec"]["automountServiceAccountToken"]
        }
        assert with_token == ({"head"} if case == "scaled" else set())
    policies = {
        each["metadata"]["name"]: each["spec"]
        for each in rendered["scaled"]
        if each["kind"] == "NetworkPolicy"
    }
    to_api = [name for name, spec in policies.items() if "10.0.0.1/32" in str(spec.get("egress"))]
    assert to_api == ["epdg-head"]


def test_a_replaced_door_and_an_old_cluster_outlast_every_answer(rendered: dict[str, Objects]):
    """A single door does not: nothing would answer while it goes on."""
    doors = {name: deployments(objects)["Door"] for name, objects in rendered.items()}
    limited = {name for name, door in doors.items() if "graceful_shutdown_timeout_s" in door}
    assert (
        limited
        == {name for name, door in doors.items() if bounds(door) == (1, 1)}
        == {"cpu-trial", "one-node"}
    )
    assert {doors[name]["graceful_shutdown_timeout_s"] for name in limited} == {DRAIN_TIMEOUT_S}
    longest = ClusterArgs().door.request_timeout_s + DOOR_STOP_S
    service = one(rendered["defaults"], "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > longest
    assert int(FRONT["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"]) > longest


def test_kuberay_takes_the_service(objects: Objects):
    service = one(objects, "RayService")
    jsonschema.Draft202012Validator(RAY_SERVICE).validate(service)
    assert complaints_of_the_operator(service) == []


@needs_schemas
@pytest.mark.parametrize(
    ("case", "version"),
    [("20-h100", "1.30"), ("20-h100", "1.34"), ("dra", "1.34"), ("scaled", "1.34"), ("cpu-trial", "1.32")],
)
def test_kubernetes_takes_every_object(rendered: dict[str, Objects], case: str, version: str):
    from kubernetes_validate import SchemaNotFoundError, validate

    objects = rendered[case]
    boards = [each for each in objects if each["kind"] == "ConfigMap"]
    pods = [
        {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
        for template in templates(objects)
    ]
    foreign = set()
    for each in [*(each for each in objects if each not in boards[1:]), *pods]:
        try:
            validate(each, version, strict=True)
        except SchemaNotFoundError:
            foreign.add(each["kind"])
    assert foreign <= {"RayService", "PodMonitor", "PrometheusRule", "HTTPRoute"}


def test_a_new_version_of_the_chart_changes_no_pod_template(tmp_path):
    """KubeRay starts a second cluster for a changed template."""
    newer = shutil.copytree(CHART, tmp_path / "chart")
    text = (newer / "Chart.yaml").read_text()
    (newer / "Chart.yaml").write_text(text.replace("version: 0.1.0", "version: 0.2.0", 1))
    before, after = (one(render(CASES["20-h100"], chart), "RayService") for chart in (CHART, newer))
    assert before["metadata"]["labels"] != after["metadata"]["labels"]
    assert before["spec"] == after["spec"]


def test_the_ray_version_is_the_installed_one():
    assert VALUES["rayVersion"] == ray.__version__


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"pools": {"prefill": {"shareWith": "whole"}}}, "must be an enabled pool"),
        (
            {"pools": {"prefill": {"shareWith": "decode"}, "decode": {"shareWith": "encode"}}},
            "pods of its own",
        ),
        ({"checkpoint": {"source": "claim"}}, "checkpoint.claim.name"),
        ({"checkpoint": {"source": "hub"}}, "checkpoint.hub.id"),
        ({"ingress": {"enabled": True}}, "ingress.host"),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs"),
        ({"gcsFaultTolerance": {"enabled": True}}, "gcsFaultTolerance.redis.address"),
        ({"settings": {"decode": {"kv_blocs": 4}}}, "kv_blocs"),
        ({"pools": {"decode": {"pods": 3, "maxPods": 2}}}, "fewer than its pods"),
        ({"pools": {"decode": {"maxPods": 2}}}, "networkPolicy.apiServer"),
    ],
)
def test_values_that_cannot_work_are_refused(values, why):
    with pytest.raises(RenderError, match=why):
        render(copy.deepcopy(values))
