"""What surrounds the RayService: secrets, network, rights, budgets, monitors; rendered by Helm."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml

from cluster.config.environment import read_environment
from cluster.config.settings import ClusterArgs
from deploy.serving.local_environment import FRONT
from tests.unit.deploy.charts import CHART, Objects, example, needs_helm, one, pod_templates, render, walk

pytestmark = needs_helm

INSTANCE = {"app.kubernetes.io/instance": "epdg", "app.kubernetes.io/part-of": "epdg"}
METADATA_SERVICE = "169.254.0.0/16"
LOCAL_DNS = "169.254.20.10/32"
EVERYTHING: dict[str, Any] = {
    "apiKeys": {"existingSecret": "keys", "testKeySecret": {"name": "test-key"}},
    "ingress": {"enabled": True, "host": "models.example.com", "tlsSecret": "tls"},
    "metrics": {
        "podMonitor": {"enabled": True, "keySecret": {"name": "admin-key"}},
        "prometheusRule": {"enabled": True},
        "dashboards": {"enabled": True},
    },
    "network": {
        "devices": ["mlx5_0:1"],
        "rdma": {"resources": {"rdma/ib": 1}, "env": {"UCX_LOG_LEVEL": "warn"}},
    },
    "gcsFaultTolerance": {"enabled": True, "redis": {"address": "rediss://redis.internal:6380"}},
}


@pytest.fixture(scope="module")
def objects() -> Objects:
    return render(EVERYTHING)


@pytest.fixture(scope="module")
def large() -> Objects:
    return render(example("pools-20-h100"))


def templates(objects: Objects) -> dict[str, dict[str, Any]]:
    return pod_templates(one(objects, "RayService"))


def container(template: dict[str, Any]) -> dict[str, Any]:
    (found,) = template["spec"]["containers"]
    return found


def environment(template: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in container(template)["env"]}


def selects(policy: dict[str, Any], labels: dict[str, str]) -> bool:
    selector = policy["spec"]["podSelector"]
    excluded = any(labels.get(rule["key"]) in rule["values"] for rule in selector.get("matchExpressions", []))
    return not excluded and selector["matchLabels"].items() <= labels.items()


def test_every_pod_is_confined(objects: Objects):
    """Added capabilities count for root alone, so pods that lock memory for RDMA run as root."""
    for name, template in templates(objects).items():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["automountServiceAccountToken"] is False
        context = container(template)["securityContext"]
        assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
        assert context["capabilities"]["drop"] == ["ALL"]
        added = context["capabilities"].get("add", [])
        is_root = name not in ("head", "door")
        assert added == (["IPC_LOCK"] if is_root else [])
        assert (context.get("runAsUser"), context.get("runAsNonRoot")) == (
            (0, False) if is_root else (None, None)
        )
        mounts = {mount["mountPath"] for mount in container(template)["volumeMounts"]}
        assert not is_root or environment(template)["HOME"] in mounts


def test_pods_lock_memory_as_another_user_where_the_nodes_allow_it():
    values = copy.deepcopy(EVERYTHING)
    values["network"]["rdma"]["asRoot"] = False
    for name, template in templates(render(values)).items():
        context = container(template)["securityContext"]
        assert "runAsUser" not in context and context["capabilities"] == {"drop": ["ALL"]}
        assert "HOME" not in environment(template)
        assert ("rdma/ib" in container(template)["resources"]["limits"]) == (name not in ("head", "door"))


def test_rdma_devices_go_to_the_pools(objects: Objects):
    for name, template in templates(objects).items():
        limits = container(template)["resources"]["limits"]
        is_pool = name not in ("head", "door")
        assert ("rdma/ib" in limits) == ("UCX_LOG_LEVEL" in environment(template)) == is_pool


def test_folders_that_are_written_to_are_volumes(objects: Objects):
    for template in templates(objects).values():
        mounts = {mount["mountPath"]: mount["name"] for mount in container(template)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        assert {"/tmp", "/home/epdg", "/dev/shm"} <= mounts.keys()
        assert set(mounts.values()) == volumes.keys()
        assert volumes["shm"]["emptyDir"]["medium"] == "Memory"


def test_rays_store_fits_the_shared_memory_of_every_pod(objects: Objects, large: Objects):
    """Otherwise Ray puts it on the disk."""
    units = {"Mi": 1 << 20, "Gi": 1 << 30}
    for each in (objects, large, render(example("cpu-trial"))):
        for template in templates(each).values():
            volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
            limit = volumes["shm"]["emptyDir"]["sizeLimit"]
            store_bytes = int(environment(template)["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"])
            assert store_bytes < int(limit[:-2]) * units[limit[-2:]]


def test_pods_get_the_cluster_secret_as_the_code_reads_it(objects: Objects, large: Objects):
    secret = one(objects, "Secret")
    reference = {"name": secret["metadata"]["name"], "key": "secret"}
    for template in templates(objects).values():
        variables = environment(template)
        assert variables["EPDG_CLUSTER_SECRET"] == {"secretKeyRef": reference}
        assert FRONT.items() <= variables.items()
    assert read_environment({"EPDG_CLUSTER_SECRET": "x"}).cluster_secret == "x"
    assert len(secret["data"]["secret"]) >= 48
    assert not [each for each in large if each["kind"] == "Secret"], "the example names its Secret"


def test_only_doors_see_the_file_of_keys_where_the_setting_says(objects: Objects):
    def folder(template: dict[str, Any]) -> str | None:
        volumes = {
            each["name"]: each.get("secret", {}).get("secretName") for each in template["spec"]["volumes"]
        }
        mounts = container(template)["volumeMounts"]
        return next((each["mountPath"] for each in mounts if volumes[each["name"]] == "keys"), None)

    found = {name: folder(template) for name, template in templates(objects).items()}
    assert [name for name, path in found.items() if path] == ["door"]
    (application,) = yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])["applications"]
    assert application["args"]["door"]["access"] == {"key_file": f"{found['door']}/keys"}


def test_the_application_takes_the_file_of_keys(objects: Objects):
    (application,) = yaml.safe_load(one(objects, "RayService")["spec"]["serveConfigV2"])["applications"]
    assert ClusterArgs.model_validate(application["args"]).door.access.key_file


def test_the_test_and_prometheus_send_their_keys(objects: Objects):
    variables = environment({"spec": one(objects, "Pod")["spec"]})
    assert variables["EPDG_API_KEY"] == {"secretKeyRef": {"name": "test-key", "key": "key"}}
    (endpoint,) = one(objects, "PodMonitor", "epdg-doors")["spec"]["podMetricsEndpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "admin-key", "key": "key"}


def test_only_the_download_sees_the_token_of_the_hub(large: Objects):
    for template in templates(large).values():
        (download,) = template["spec"]["initContainers"]
        assert download["command"][:3] == ["hf", "download", "Qwen/Qwen2.5-VL-7B-Instruct"]
        assert "--exclude=*.bin" in download["command"]
        assert [each["name"] for each in download["env"]] == ["HF_TOKEN"]
        assert "HF_TOKEN" not in environment(template)


def test_the_service_account_has_no_rights(objects: Objects):
    assert not [each for each in objects if "Role" in each["kind"]]
    account = one(objects, "ServiceAccount")
    assert account["automountServiceAccountToken"] is False
    names = {template["spec"]["serviceAccountName"] for template in templates(objects).values()}
    assert names == {account["metadata"]["name"]}


def test_every_pod_of_the_cluster_is_denied_everything_else(objects: Objects):
    policy = one(objects, "NetworkPolicy", "epdg-cluster")
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    for template in templates(objects).values():
        assert selects(policy, template["metadata"]["labels"])
        assert INSTANCE.items() <= template["metadata"]["labels"].items()
    inside = [{"podSelector": {"matchLabels": INSTANCE}}]
    whole = [rule for rule in policy["spec"]["ingress"] if "ports" not in rule]
    assert whole == [{"from": inside}]
    out = {port["port"] for rule in policy["spec"]["egress"] for port in rule.get("ports", [])}
    assert out == {53, 5353, 6380}


def test_pods_reach_dns_in_the_cluster_and_on_their_node(objects: Objects):
    """NodeLocal DNSCache is on the node's network, where no label matches it; OpenShift's pods have a port of
    their own."""
    egress = one(objects, "NetworkPolicy", "epdg-cluster")["spec"]["egress"]
    (rule,) = [rule for rule in egress if {"protocol": "UDP", "port": 53} in rule.get("ports", [])]
    assert {(port["protocol"], port["port"]) for port in rule["ports"]} == {
        (protocol, port) for protocol in ("UDP", "TCP") for port in (53, 5353)
    }
    names = [
        peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
        for peer in rule["to"]
        if "namespaceSelector" in peer
    ]
    assert names == ["kube-system", "openshift-dns"]
    assert {"ipBlock": {"cidr": LOCAL_DNS}} in rule["to"]


def test_clients_reach_the_proxies_and_the_operator_the_head(objects: Objects):
    def ports(name: str) -> set[Any]:
        spec = one(objects, "NetworkPolicy", name)["spec"]
        return {port["port"] for rule in spec["ingress"] for port in rule["ports"]}

    assert ports("epdg-clients") == {"serve"}
    assert ports("epdg-head") == {"dashboard", "serve", "as-metrics", "dash-metrics"}
    assert ports("epdg-doors") == {"door-http"}
    for name, template in templates(objects).items():
        assert selects(one(objects, "NetworkPolicy", "epdg-clients"), template["metadata"]["labels"]) == (
            name != "head"
        )


def test_named_ports_of_policies_and_monitors_exist(objects: Objects):
    ports = {port["name"] for each in templates(objects).values() for port in container(each)["ports"]}
    used = {
        endpoint["port"]
        for each in objects
        if each["kind"] == "PodMonitor"
        for endpoint in each["spec"]["podMetricsEndpoints"]
    }
    policies = [each for each in objects if each["kind"] == "NetworkPolicy"]
    named = walk(policies, lambda node: [node["port"]] if isinstance(node, dict) and "port" in node else [])
    assert used | {each for each in named if isinstance(each, str)} <= ports
    assert all(len(name) <= 15 for name in ports)


def test_only_doors_reach_public_addresses_and_never_the_metadata_service(objects: Objects):
    def blocks(policy: dict[str, Any]) -> list[Any]:
        rules = policy["spec"].get("egress", [])
        return walk(
            rules, lambda node: [node["ipBlock"]] if isinstance(node, dict) and "ipBlock" in node else []
        )

    policies = {each["metadata"]["name"]: each for each in objects if each["kind"] == "NetworkPolicy"}
    assert blocks(policies["epdg-cluster"]) == [{"cidr": LOCAL_DNS}]
    others = [name for name, policy in policies.items() if blocks(policy) and name != "epdg-cluster"]
    assert others == ["epdg-doors"]
    assert METADATA_SERVICE in blocks(policies["epdg-doors"])[0]["except"]


def test_each_door_is_read_on_its_own_port(objects: Objects):
    """That of Serve's first direct replica; behind port 8000 any door might answer."""
    first = int(environment(templates(objects)["door"])["RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"])
    ports = {port["name"]: port["containerPort"] for port in container(templates(objects)["door"])["ports"]}
    (endpoint,) = one(objects, "PodMonitor", "epdg-doors")["spec"]["podMetricsEndpoints"]
    assert ports[endpoint["port"]] == first
    selector = one(objects, "PodMonitor", "epdg-doors")["spec"]["selector"]["matchLabels"]
    chosen = [
        name
        for name, each in templates(objects).items()
        if selector.items() <= each["metadata"]["labels"].items()
    ]
    assert chosen == ["door"]


def test_a_budget_leaves_all_pods_of_a_pool_but_one(large: Objects):
    """In numbers: a RayCluster has no scale subresource."""
    budgets = {
        each["metadata"]["name"]: each["spec"] for each in large if each["kind"] == "PodDisruptionBudget"
    }
    expected = {"epdg-door": 2, "epdg-encode": 3, "epdg-prefill": 7, "epdg-decode": 7}
    assert {name: spec["minAvailable"] for name, spec in budgets.items()} == expected
    for name, spec in budgets.items():
        chosen = [
            group
            for group, template in templates(large).items()
            if spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
        ]
        assert chosen == [name.removeprefix("epdg-")]


def test_a_budget_leaves_a_pool_that_is_scaled_its_last_pod():
    pools = {"encode": {"maxPods": 3}, "prefill": {"pods": 3, "maxPods": 5}}
    objects = render({"pools": pools, "networkPolicy": {"enabled": False}})
    budgets = [each for each in objects if each["kind"] == "PodDisruptionBudget"]
    least = {each["metadata"]["name"]: each["spec"]["minAvailable"] for each in budgets}
    assert least == {"epdg-door": 1, "epdg-encode": 1, "epdg-prefill": 2}


def test_routes_lead_to_the_service_that_kuberay_makes(objects: Objects, large: Objects):
    (rule,) = one(objects, "Ingress")["spec"]["rules"]
    service = rule["http"]["paths"][0]["backend"]["service"]
    assert (service["name"], service["port"]["number"]) == ("epdg-serve-svc", 8000)
    (route,) = one(large, "HTTPRoute")["spec"]["rules"]
    assert route["backendRefs"] == [{"name": "epdg-serve-svc", "port": 8000}]


def test_alerts_and_boards_are_the_files(objects: Objects):
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert one(objects, "PrometheusRule")["spec"] == alerts
    boards = {name for each in objects if each["kind"] == "ConfigMap" for name in each["data"]}
    assert boards == {f"epdg-{path.name}" for path in (CHART / "dashboards").iterdir()}


def test_the_test_asks_the_service_about_an_image(objects: Objects):
    pod = one(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    script, url, kind = container({"spec": pod["spec"]})["args"]
    compile(script, "ask.py", "exec")
    assert (url, kind) == ("http://epdg-serve-svc:8000", "image")
    text_only = render({"pools": {"encode": {"enabled": False}}})
    assert container({"spec": one(text_only, "Pod")["spec"]})["args"][2] == "text"
    clients = one(objects, "NetworkPolicy", "epdg-clients")["spec"]["ingress"][0]["from"]
    wanted = clients[0]["podSelector"]["matchLabels"]
    assert wanted.items() <= pod["metadata"]["labels"].items()


def test_gcs_tables_are_kept_in_redis(large: Objects):
    options = one(large, "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
    assert options["redisAddress"] == "redis.redis.svc:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}


def test_redis_is_called_where_the_values_say_it_is(objects: Objects, large: Objects):
    def rules(found: Objects, port: int) -> list[dict[str, Any]]:
        egress = one(found, "NetworkPolicy", "epdg-cluster")["spec"]["egress"]
        return [rule for rule in egress if {"protocol": "TCP", "port": port} in rule.get("ports", ())]

    anywhere, named = rules(objects, 6380), rules(large, 6379)
    assert len(anywhere) == len(named) == 1 and "to" not in anywhere[0]
    (peer,) = named[0]["to"]
    assert peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "redis"}
