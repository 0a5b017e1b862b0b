"""The fields of a RayService that the chart uses, as KubeRay 1.6 and 1.7 name them, with the rules that its
operator checks. Pod templates are left to Kubernetes' own schema.

The custom resource definition itself comes in no Python package; this is the part of it that the chart uses,
written from the documentation. It was compared with the operator's Go types (ray-operator/apis/ray/v1) on
2026-11-25: every field here is there, under the same parent and of the same type.
"""

from __future__ import annotations

import re
from typing import Any

STRING = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": STRING}
SECRET_KEY = {
    "type": "object",
    "required": ["secretKeyRef"],
    "additionalProperties": False,
    "properties": {
        "secretKeyRef": {
            "type": "object",
            "required": ["name", "key"],
            "additionalProperties": False,
            "properties": {"name": STRING, "key": STRING},
        }
    },
}
HEAD_GROUP = {
    "type": "object",
    "required": ["rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        "rayStartParams": STRINGS,
        "template": {"type": "object"},
        "labels": STRINGS,
        "resources": STRINGS,
        "serviceType": STRING,
    },
}
WORKER_GROUP = {
    "type": "object",
    "required": ["groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"],
    "additionalProperties": False,
    "properties": {
        **HEAD_GROUP["properties"],
        "groupName": {"type": "string", "pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$"},
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "numOfHosts": COUNT,
    },
}
CLUSTER = {
    "type": "object",
    "required": ["rayVersion", "headGroupSpec", "workerGroupSpecs"],
    "additionalProperties": False,
    "properties": {
        "rayVersion": STRING,
        "headGroupSpec": HEAD_GROUP,
        "workerGroupSpecs": {"type": "array", "minItems": 1, "items": WORKER_GROUP},
        "enableInTreeAutoscaling": {"type": "boolean"},
        "autoscalerOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "version": {"enum": ["v1", "v2"]},
                "securityContext": {"type": "object"},
                "volumeMounts": {"type": "array"},
            },
        },
        "authOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {"mode": {"enum": ["token", "disabled"]}, "secretName": STRING},
        },
        "gcsFaultToleranceOptions": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "redisAddress": STRING,
                "redisPassword": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"value": STRING, "valueFrom": SECRET_KEY},
                },
            },
        },
    },
}
RAY_SERVICE = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "additionalProperties": False,
    "properties": {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["serveConfigV2", "rayClusterConfig"],
            "additionalProperties": False,
            "properties": {
                "serveConfigV2": STRING,
                "rayClusterConfig": CLUSTER,
                "excludeHeadPodFromServeSvc": {"type": "boolean"},
                "rayClusterDeletionDelaySeconds": COUNT,
                "upgradeStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {"type": {"enum": ["NewCluster", "None"]}},
                },
            },
        },
    },
}
NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


def complaints_of_the_operator(ray_service: dict[str, Any]) -> list[str]:
    """What KubeRay's operator refuses although the definition takes it."""
    found = []
    name = ray_service["metadata"]["name"]
    if len(name) > 47 or not NAME.fullmatch(name):
        found.append(f"name {name}")
    cluster = ray_service["spec"]["rayClusterConfig"]
    groups = cluster["workerGroupSpecs"]
    if len({group["groupName"] for group in groups}) < len(groups):
        found.append("two groups of one name")
    for group in groups:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append(f"replicas of {group['groupName']}")
        is_scaled = group["minReplicas"] < group["maxReplicas"]
        if is_scaled and not cluster.get("enableInTreeAutoscaling"):
            found.append(f"nobody scales {group['groupName']}")
        if "labels" in group["rayStartParams"]:
            found.append("labels belong into `labels`")
    for group in (cluster["headGroupSpec"], *groups):
        if not group["template"]["spec"].get("containers"):
            found.append("no container")
        is_v2 = cluster.get("autoscalerOptions", {}).get("version") == "v2"
        if is_v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            found.append("version 2 of the autoscaler restarts no container")
        if "resources" in group and {"num-cpus", "num-gpus"} & group["rayStartParams"].keys():
            found.append("resources twice")
    version = tuple(map(int, cluster["rayVersion"].split(".")))
    if cluster.get("authOptions", {}).get("mode") == "token" and version < (2, 52, 0):
        found.append("a token needs Ray 2.52")
    return found
