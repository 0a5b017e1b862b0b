"""What is found before Ray starts: each wrong set-up, in one line, and nothing but what is needed is imported
for it."""

from __future__ import annotations

import dataclasses
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from cluster.config.settings import REPOSITORY
from cluster.errors import ConfigError
from cluster.native.variants import VARIANTS
from deploy.serving.ports import free_port
from deploy.serving.preflight import Machine, StartPlan, check
from deploy.serving.serve_file import APPLICATION, DEPLOYMENT, HTTP_OPTIONS, SECTIONS
from tests.fakes.model_folders import text_folder, whole_omni_folder, write_tensors

GIB = 1 << 30
MACHINE = Machine(cores=(0, 1), available_memory=lambda: 8 * GIB, has_gpu=lambda: False)
SHIPPED = [REPOSITORY / "deploy" / name for name in ("cluster.yaml", "cluster-gpu.yaml")]


def serve_file(tmp_path: Path, args: dict[str, Any] | None = None, **sections: Any) -> Path:
    content = yaml.safe_load(SHIPPED[0].read_text())
    content["http_options"]["port"] = free_port()
    content["applications"][0]["args"] = args or {}
    if deployments := sections.pop("deployments", None):
        content["applications"][0]["deployments"] = deployments
    path = tmp_path / "file.yaml"
    path.write_text(yaml.safe_dump({**content, **sections}))
    return path


def checked(
    tmp_path: Path, model: Path | str | None = None, args: dict | None = None, **sections: Any
) -> StartPlan:
    variables = {} if model is None else {"EPDG_MODEL": str(model)}
    return check(serve_file(tmp_path, args, **sections), {**variables, "HF_HUB_OFFLINE": "1"}, MACHINE)


def check_refused(tmp_path: Path, pattern: str, **given: Any) -> None:
    with pytest.raises(ConfigError, match=pattern) as error:
        checked(tmp_path, **given)
    assert "\n" not in str(error.value)


def names(plan: StartPlan) -> list[str]:
    return [each["name"] for each in plan.content["applications"][0]["deployments"]]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
@pytest.mark.parametrize("make", [text_folder, whole_omni_folder])
def test_a_shipped_file_names_no_deployment_that_a_model_lacks(tmp_path, file, make, monkeypatch):
    monkeypatch.setattr("deploy.serving.preflight.check_port", lambda host, port: None)
    machine = Machine(cores=(0,), has_gpu=lambda: True)
    variables = {"EPDG_MODEL": str(make(tmp_path / "m")), "EPDG_CLUSTER_SECRET": "s"}
    plan = check(file, variables, machine)
    shipped = yaml.safe_load(file.read_text())["applications"][0]["deployments"]
    assert names(plan) == ["Prefill", "Decode", "Door"] == [each["name"] for each in shipped]


def test_a_file_that_names_encode_starts_a_text_model_without_it_and_says_so(tmp_path):
    deployments = [{"name": "Encode", "num_replicas": 2}, {"name": "Decode"}]
    plan = checked(tmp_path, text_folder(tmp_path / "m"), deployments=deployments)
    assert names(plan) == ["Decode"]
    assert plan.notes == ("model type 'llama' takes no media: there is no encode pool",)
    plan = checked(tmp_path, whole_omni_folder(tmp_path / "o"), deployments=deployments)
    assert names(plan) == ["Encode", "Decode"] and plan.notes == ()


def test_the_plan_names_the_model_by_its_path_and_clients_by_its_folder(tmp_path, monkeypatch):
    text_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    args = checked(tmp_path, "m", {"decode": {"threads": 1}}).content["applications"][0]["args"]
    assert args == {"model": str(tmp_path / "m"), "model_id": "m", "decode": {"threads": 1}}


def test_the_folder_of_adapters_is_found_as_the_model_is_or_refused(tmp_path, monkeypatch):
    model = text_folder(tmp_path / "m")
    (tmp_path / "adapters").mkdir()
    monkeypatch.chdir(tmp_path)
    args = checked(tmp_path, model, {"adapters_folder": "adapters"}).content["applications"][0]["args"]
    assert args["adapters_folder"] == str(tmp_path / "adapters")
    check_refused(tmp_path, "no folder 'none'", model=model, args={"adapters_folder": "none"})


def test_a_model_of_the_hub_is_served_by_its_id(tmp_path, monkeypatch):
    folder = text_folder(tmp_path / "snapshots" / "0123")
    monkeypatch.setattr("cluster.config.hub.download", lambda model_id, *, is_offline: folder)
    args = checked(tmp_path, "org/name").content["applications"][0]["args"]
    assert args == {"model": str(folder), "model_id": "org/name"}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_TENSORS = {
    "q.weight": ("F8_E4M3", (1 << 13, 1 << 13)), "q.weight_scale_inv": ("F32", (64, 64)),
}  # fmt: skip


@pytest.mark.parametrize(
    ("args", "has_gpu", "held"),
    [
        ({}, False, "0.25"),
        ({"weight_dtype": "int8"}, False, "0.06"),
        ({"dtype": "bfloat16"}, False, "0.12"),
        ({}, True, "0.12"),
    ],
)
def test_an_fp8_checkpoint_is_announced_with_what_it_takes_dequantised(tmp_path, args, has_gpu, held):
    folder = text_folder(tmp_path / "m", quantization_config=FP8)
    write_tensors(folder, FP8_TENSORS)
    machine = dataclasses.replace(MACHINE, has_gpu=lambda: has_gpu)
    plan = check(serve_file(tmp_path, args), {"EPDG_MODEL": str(folder)}, machine)
    what = "the checkpoint is quantised (fp8 in blocks of 128 × 128): "
    assert plan.notes[0] == what + (
        "linears and experts of the language half keep their codes where our kernels serve, everything else "
        f"is dequantised; the whole takes 0.06 to {held} GiB"
        if has_gpu
        else f"it is dequantised while it is read, and takes {held} GiB instead of 0.06 GiB"
    )
    little = dataclasses.replace(MACHINE, available_memory=lambda: 1 << 27)
    with pytest.raises(ConfigError, match=r"and 0\.2 GiB of weights; 0\.1 GiB are available"):
        check(serve_file(tmp_path), {"EPDG_MODEL": str(folder)}, little)


def test_a_quantised_model_a_draft_and_an_adapter_are_refused_before_anything_starts(tmp_path):
    quantised = text_folder(tmp_path / "q", quantization_config={"quant_method": "awq", "bits": 4})
    check_refused(tmp_path, r"q has weights quantised as awq 4 bit .* use the unquantised", model=quantised)
    adapter = text_folder(tmp_path / "a")
    (adapter / "adapter_config.json").write_text("{}")
    check_refused(tmp_path, r"a/adapter_config\.json is an adapter", model=adapter)
    args = {"decode": {"speculation": {"method": "draft", "model": str(quantised)}}}
    check_refused(tmp_path, "quantised as awq", model=text_folder(tmp_path / "m"), args=args)


@pytest.mark.parametrize(
    ("args", "pattern"),
    [
        ({"decode": {"kv_block": 3}}, r'args\.decode: unknown setting "kv_block"; did you mean "kv_blocks"'),
        ({"block_size": 0}, r"args\.block_size: .* \(given: 0\)"),
        ({"dtype": "float16", "block_size": 0}, r"args\.dtype: .*'float16'\); and 1 more"),
        ({"decode": {"cores": [1, 2]}}, r"decode\.cores: \[2\] are not among"),
        ({"device": "cuda"}, "asks for CUDA"),
        ({"side_channel": "tcp"}, r"needs transfer\.net_devices"),
        (
            {"side_channel": "tcp", "transfer": {"net_devices": ["eth1"]}},
            "needs EPDG_CLUSTER_SECRET",
        ),
        (
            {"decode": {"kv_blocks": 10**9}},
            r"decode needs 11,\d{3}\.\d GiB of KV .*; 8\.0 GiB are available",
        ),
        ({"decode": {"speculation": {"method": "draft", "model": "nowhere"}}}, "no model folder"),
        ({"decode": {"speculation": {"method": "mtp"}}}, "speculation method mtp: model type"),
        (
            {"decode": {"speculation": {"method": "eagle3", "model": "deploy/demo_model"}}},
            "is no EAGLE-3 head",
        ),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, args, pattern):
    check_refused(tmp_path, pattern, model=text_folder(tmp_path / "m"), args=args)


TWO_RANKS = {"tensor_parallel_size": 2}
QWEN = {"model_type": "qwen3_next", "full_attention_interval": 4}


@pytest.mark.parametrize(
    ("config", "args", "pattern"),
    [
        ({}, TWO_RANKS | {"weight_dtype": "int8"}, "weight_dtype int8 needs tensor_parallel_size 1"),
        ({}, {"cpu_kernels": "none", "weight_dtype": "int8"}, "needs the native CPU kernels"),
        ({}, TWO_RANKS | {"transfer": {"codec": "int4"}}, "int4 has to pass .* tensor_parallel_size 1"),
        ({}, {"block_size": 48, "transfer": {"codec": "int8"}}, "a block_size that divides 64"),
        ({}, {"kv_cache_dtype": "int8", "transfer": {"codec": "int8"}}, "needs kv_cache_dtype auto"),
        (QWEN, {"transfer": {"codec": "int4"}}, "no states; model type 'qwen3_next' keeps some"),
        ({}, {"tensor_parallel_size": 4}, "4 attention heads with 2 KV heads cannot be .* to 4 ranks"),
        ({"model_type": "step3p7"}, TWO_RANKS, "set expert_parallel true"),
        (QWEN | {"linear_num_key_heads": 3}, TWO_RANKS, "3 key heads of its mixers cannot be"),
        ({"model_type": "falcon_h1", "mamba_n_groups": 3}, TWO_RANKS, "3 groups of its mixers cannot be"),
        (
            {"model_type": "kimi_linear", "linear_attn_config": {"num_heads": 3}}, TWO_RANKS,
            "3 heads of its mixers cannot be",
        ),
        ({"model_type": "lara_mini"}, TWO_RANKS, "states beside its KV that ranks cannot share"),
        ({"model_type": "jamba"}, {}, "'jamba' is not supported: transformers' layers ignore the state"),
        ({"n_recurrent_loops": 2}, {}, "run several times for a token"),
        ({"use_bidirectional_attention": True}, {}, "see each other in both directions"),
        (
            QWEN | {"layer_types": ["full_attention", "linear_attention"]},
            {"decode": {"speculation": {"method": "mtp"}}}, "last layer, which has no attention",
        ),
        (QWEN, {"decode": {"speculation": {"method": "mtp"}}}, "last layer, which has no attention"),
    ],
)  # fmt: skip
def test_what_excludes_itself_is_said_before_anything_starts(tmp_path, config, args, pattern):
    check_refused(tmp_path, pattern, model=text_folder(tmp_path / "m", **config), args=args)


@pytest.mark.parametrize(
    ("draft", "pattern"),
    [
        ({"vocab_size": 12}, r"\(12 tokens\) and the target model \(1024 tokens\) must have the same"),
        ({"model_type": "lfm2"}, "'lfm2' keeps states: it cannot be a draft model"),
    ],
)
def test_a_draft_model_that_cannot_draft_is_refused_before_anything_starts(tmp_path, draft, pattern):
    speculation = {"method": "draft", "model": str(text_folder(tmp_path / "d", **draft))}
    args = {"decode": {"speculation": speculation}}
    check_refused(tmp_path, pattern, model=text_folder(tmp_path / "m"), args=args)


def test_settings_that_go_with_states_and_ranks_are_let_through(tmp_path):
    """Two KV heads on four ranks, and one group of a state for all."""
    changes = {"model_type": "falcon_h1", "mamba_n_heads": 8, "mamba_n_groups": 1}
    args = {"tensor_parallel_size": 4, "transfer": {"codec": "int8"}}
    assert names(checked(tmp_path, text_folder(tmp_path / "m", **changes), args))[-1] == "Door"
    dense = text_folder(tmp_path / "d", model_type="granitemoehybrid", layer_types=["attention"] * 3)
    assert names(checked(tmp_path, dense, {"transfer": {"codec": "int4"}}))[-1] == "Door"
    args = {"device": "cuda", "weight_dtype": "int8"}
    with pytest.raises(ConfigError, match="weight_dtype int8 is for CPUs"):
        machine = dataclasses.replace(MACHINE, has_gpu=lambda: True)
        check(serve_file(tmp_path, args), {"EPDG_MODEL": str(dense)}, machine)


@pytest.mark.parametrize(
    ("sections", "pattern"),
    [
        ({"http_option": {}}, "section 'http_option' is unknown; did you mean 'http_options'"),
        ({"http_options": {"port": "x"}}, "http_options.port: 'x' is not a port"),
        ({"http_options": {"prot": 1}}, "http_options: option 'prot' is unknown; did you mean 'port'"),
        ({"http_options": 5}, "http_options: 5 has no options"),
        ({"applications": None}, "no list of applications"),
        ({"applications": []}, "applications: the list is empty"),
        ({"applications": [5]}, "application: 5 has no options"),
        ({"applications": [{"importpath": "a:b"}]}, "'importpath' is unknown; did you mean 'import_path'"),
        ({"deployments": "Door"}, "deployments: 'Door' is not a list"),
        ({"deployments": ["Door"]}, "deployment: 'Door' has no options"),
        ({"deployments": [{"name": "Door", "num_replica": 2}]}, "did you mean 'num_replicas'"),
        ({"deployments": [{"name": "Door", "num_replicas": 0}]}, "deployment 'Door': num_replicas: 0 is"),
        ({"deployments": [{"name": "Door", "autoscaling_config": 5}]}, "autoscaling_config: 5 has no"),
        ({"deployments": [{"name": "Decod"}]}, "deployment 'Decod' is unknown; did you mean 'Decode'"),
        ({"deployments": [{"name": "Decode", "num_replicas": 99}]}, "Decode: 99 replicas; this machine"),
    ],
)
def test_a_wrong_section_of_the_file_is_named(tmp_path, sections, pattern):
    check_refused(tmp_path, pattern, model=text_folder(tmp_path / "m"), **sections)


def test_the_names_of_a_file_are_those_that_serve_knows():
    schemas = ServeDeploySchema, HTTPOptionsSchema, ServeApplicationSchema, DeploymentSchema
    for known, schema in zip((SECTIONS, HTTP_OPTIONS, APPLICATION, DEPLOYMENT), schemas, strict=True):
        assert set(known) == set(schema.model_fields)


def test_a_file_that_is_missing_or_no_yaml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*nothing\.yaml: No such file"):
        check(tmp_path / "nothing.yaml", {}, MACHINE)
    (tmp_path / "file.yaml").write_text("{")
    with pytest.raises(ConfigError, match=r"file\.yaml is not YAML"):
        check(tmp_path / "file.yaml", {}, MACHINE)


def test_models_that_are_not_there_are_named(tmp_path):
    check_refused(tmp_path, re.escape(f"no model folder '{tmp_path}/m'"), model=tmp_path / "m")
    check_refused(tmp_path, "no folder 'no-org/name', .*hub", model="no-org/name")
    check_refused(tmp_path, r"has no config\.json", model=tmp_path)


def test_files_of_the_model_are_looked_at(tmp_path):
    folder = text_folder(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(b"short")
    check_refused(tmp_path, r"m/model\.safetensors \(5 bytes\)", model=folder)


def test_weights_count_where_a_worker_holds_them_all(tmp_path, monkeypatch):
    folder = text_folder(tmp_path / "m")
    tiny = Machine(cores=(0,), available_memory=lambda: 100, has_gpu=lambda: False)
    with pytest.raises(ConfigError, match="prefill needs"):
        check(serve_file(tmp_path), {"EPDG_MODEL": str(folder)}, tiny)


def test_a_port_that_is_taken_or_cannot_be_had_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {"host": "127.0.0.1", "port": port}
        check_refused(tmp_path, f"something listens on 127.0.0.1:{port} already", http_options=options)
    check_refused(
        tmp_path, "cannot listen on 192.0.2.77:8000", http_options={"host": "192.0.2.77", "port": 8000}
    )


def test_nothing_large_is_imported_before_ray_starts():
    code = (
        "import sys; from deploy.serving import command, preflight; from pathlib import Path\n"
        "preflight.check(Path(sys.argv[1]), {})\n"
        "print(sorted({'torch', 'ray', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    config = REPOSITORY / "deploy" / "cluster.yaml"
    port = free_port()
    content = config.read_text().replace("port: 8000", f"port: {port}")
    command = [sys.executable, "-c", code, "/dev/stdin"]
    done = subprocess.run(command, cwd=REPOSITORY, input=content, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_cpu_variant_that_the_processor_cannot_run_is_refused(tmp_path):
    old = dataclasses.replace(MACHINE, cpu_variants=lambda: VARIANTS[-1:])
    variables = {"EPDG_MODEL": str(text_folder(tmp_path / "m")), "HF_HUB_OFFLINE": "1"}
    check(serve_file(tmp_path, {"cpu_kernels": "avx2"}), variables, old)
    with pytest.raises(ConfigError, match="cannot run avx512; it runs avx2"):
        check(serve_file(tmp_path, {"cpu_kernels": "avx512"}), variables, old)


def test_a_limit_of_open_files_that_haproxy_cannot_work_with_is_named(tmp_path):
    """Of a container; HAProxy would end while the cluster starts."""
    few = dataclasses.replace(MACHINE, max_open_files=lambda: 1024)
    variables = {"EPDG_MODEL": str(text_folder(tmp_path / "m")), "HF_HUB_OFFLINE": "1"}
    with pytest.raises(ConfigError, match="may open 1,024 files at once, HAProxy needs 10,300"):
        check(serve_file(tmp_path), variables, few)


def test_a_key_file_is_read_and_named_by_its_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = text_folder(tmp_path / "m")
    args = {"door": {"access": {"key_file": "keys.yaml"}}}
    check_refused(tmp_path, "cannot read the key file .*/keys.yaml", model=model, args=args)
    (tmp_path / "keys.yaml").write_text("- {name: alice}")
    check_refused(tmp_path, "missing required field `hash`", model=model, args=args)
    (tmp_path / "keys.yaml").write_text("")
    plan = checked(tmp_path, model, args)
    args = plan.content["applications"][0]["args"]
    assert args["door"] == {"access": {"key_file": str(tmp_path / "keys.yaml")}}
