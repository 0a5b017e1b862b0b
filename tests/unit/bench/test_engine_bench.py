"""The engine benchmark's own arithmetic: prompts, streams, failures, tables. No server, no network."""

import asyncio
import dataclasses
import json
import math
import os
import types
from collections.abc import AsyncIterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.client import ChatRequest, Endpoint, TimedAnswer, judge, read_stream
from bench.engine import processes, report, special
from bench.engine.__main__ import make_parser
from bench.engine.avx2 import sitecustomize
from bench.engine.measure import summarise
from bench.engine.models import TEXT_MODEL, VISION_MODEL
from bench.engine.processes import CpuCost, CpuUsage, ProcessMark
from bench.engine.prompts import WORDS, Prompts
from bench.engine.rows import ROWS, mixed, session
from bench.engine.run import rotated
from bench.engine.servers import OURS, PEERS, VLLM, RunningServer, Setup, cluster_config, make_plan
from bench.engine.vocabulary import SPACE, make_merges, write_tokenizer
from bench.tables import paired_ratio
from cluster.config import ClusterArgs
from deploy.simulator.results import percentile

ENDPOINT = Endpoint("http://127.0.0.1:1", "m", {})
RUNNING = RunningServer(OURS, ENDPOINT, ProcessMark("mark", 1), 1.0)
COST = CpuCost(2.0, {"door": 1.0, "decode": 2.0}, client_cpu_s=0.1, other_cores=0.0)


def setup(folder: Path) -> Setup:
    peers = {name: Path("/opt/peer/bin/vllm") for name in ("vllm", "vllm-fp32")}
    peers["llama"] = Path("/opt/peer/llama.cpp")
    return Setup(folder / "models", folder, (0, 1), 8400, peers, (2, 1, 2))


def a_record(num_tokens: int = 3, *, failure: str = "", kind: str = "text") -> TimedAnswer:
    times = [1.0 + 0.1 * idx for idx in range(num_tokens)]
    return TimedAnswer(kind, 0.5, times, 2.0, num_prompt_tokens=10, num_tokens=num_tokens, failure=failure)


def a_row(server: str, repetition: int, tokens_per_s: float, **other: Any) -> dict[str, Any]:
    times = {"ttft_p50_s": 0.1, "itl_p50_s": 0.01, "num_failed": 0, "other_cores": 0.0}
    name = {"type": "row", "server": server, "row": "text-128/64", "concurrency": 4, "repetition": repetition}
    return {**name, "tokens_per_s": tokens_per_s, **times, **other}


def test_every_word_of_a_prompt_is_one_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    num_base_tokens = 256 + 26 + 26**2  # words of up to two letters
    write_tokenizer(tmp_path, num_base_tokens)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    short = [word for word in WORDS if len(word) < 3]
    for word in short:
        assert len(tokenizer.encode(f" {word}").ids) == 1
    text = "".join(f" {word}" for word in short)
    assert len(tokenizer.encode(text).ids) == len(short)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_end|>").ids == [num_base_tokens + 2]


def test_the_vocabulary_has_every_word_that_prompts_use() -> None:
    tokens = {left + right for left, right in make_merges()}
    assert len(tokens) == 151_643 - 256
    assert tokens.issuperset(SPACE + word for word in WORDS)


def test_equal_keys_give_equal_prompts_and_different_keys_differ_from_the_first_words() -> None:
    assert Prompts(1).text(40, "row", 0) == Prompts(1).text(40, "row", 0)
    others = [Prompts(2).text(8, "row", 0), Prompts(1).text(8, "row", 1), Prompts(1).text(8, "other", 0)]
    starts = {text.split()[0] + text.split()[1] for text in (Prompts(1).text(8, "row", 0), *others)}
    assert len(starts) == 4


@given(st.integers(0, 300), st.integers(0, 10))
def test_a_text_has_exactly_as_many_words_as_asked(num_tokens: int, seed: int) -> None:
    assert len(Prompts(seed).text(num_tokens, "key").split()) == num_tokens


def test_repetitions_and_concurrencies_of_a_row_share_no_prompt() -> None:
    for row in ROWS:
        firsts = [
            json.dumps(dialogue.turns[0].message)
            for concurrency in (1, 4)
            for repetition in (-1, 0, 1)
            for dialogue in row.dialogues(Prompts(0), concurrency, repetition, 2)
        ]
        assert len(set(firsts)) == len(firsts), row.name


def test_one_request_in_five_of_the_mixed_row_has_an_image() -> None:
    kinds = [mixed(Prompts(0), ("key",), idx).turns[0].kind for idx in range(50)]
    assert kinds.count("image") == 10


def test_dialogues_of_a_session_share_the_system_prompt_and_every_other_image() -> None:
    first, second, third = (session(Prompts(0), ("key",), idx) for idx in range(3))
    assert first.opening == second.opening
    picture = [dialogue.turns[0].message["content"][0] for dialogue in (first, second, third)]
    assert picture[0] == picture[2] != picture[1]
    assert [turn.kind for turn in first.turns] == ["first turn", *["later turn"] * 3]


def stream_of(*events: Any, end: bytes = b"data: [DONE]\n") -> AsyncIterator[bytes]:
    async def lines() -> AsyncIterator[bytes]:
        for event in events:
            yield b"data: " + json.dumps(event).encode() + b"\r\n"
            yield b"\r\n"
        yield end

    return lines()


def chunk(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"role": "assistant"} if text is None else {"content": text}}]}


def test_only_chunks_with_text_are_timed() -> None:
    ticks = iter(range(100))
    record = TimedAnswer("text")
    usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}
    asyncio.run(
        read_stream(
            stream_of(chunk(None), chunk(" a"), chunk(""), chunk(" b"), usage), record, lambda: next(ticks)
        )
    )
    assert (record.text, record.chunks_at, record.gaps_s) == (" a b", [1, 3], [2])
    assert (record.num_prompt_tokens, record.num_tokens, record.failure) == (7, 2, "")


def test_an_error_event_in_a_stream_is_a_failure() -> None:
    record = TimedAnswer("text")
    asyncio.run(read_stream(stream_of(chunk(" a"), {"error": {"message": "lost"}}), record, lambda: 0.0))
    assert "lost" in record.failure


@pytest.mark.parametrize(
    ("record", "wanted", "failure"),
    [
        (a_record(3), 3, ""),
        (a_record(2), 3, "2 tokens instead of 3"),
        (TimedAnswer("text", num_tokens=3), 3, "no text"),
        (a_record(2, failure="HTTP 500"), 3, "HTTP 500"),
    ],
)
def test_a_short_or_empty_answer_is_a_failure(record: TimedAnswer, wanted: int, failure: str) -> None:
    judge(record, wanted)
    assert record.failure == failure


def test_the_length_of_an_answer_is_forced_in_each_servers_own_words(tmp_path: Path) -> None:
    request = ChatRequest([], 17, "text")
    ours = make_plan(setup(tmp_path), OURS, TEXT_MODEL).endpoint.body(request)
    theirs = make_plan(setup(tmp_path), VLLM, TEXT_MODEL).endpoint.body(request)
    assert (ours["max_tokens"], ours["ignore_eos"], "min_tokens" in ours) == (17, True, False)
    assert (theirs["max_tokens"], theirs["ignore_eos"], theirs["min_tokens"]) == (17, True, 17)


def test_avx2_limits_every_server(tmp_path: Path) -> None:
    limited = dataclasses.replace(setup(tmp_path), isa="avx2")
    plans = {name: make_plan(limited, name, TEXT_MODEL) for name in (OURS, *PEERS)}
    config = cluster_config(limited, TEXT_MODEL, {})["applications"][0]["args"]
    assert ClusterArgs.model_validate(config).cpu_kernels == "avx2"
    for name in (OURS, VLLM, "vllm-fp32"):
        assert plans[name].environment["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert Path(plans[VLLM].environment["PYTHONPATH"], "sitecustomize.py").is_file()
    assert plans["llama"].command[0] == "/opt/peer/llama.cpp/llama-server-avx2"
    native = [make_plan(setup(tmp_path), name, TEXT_MODEL) for name in (OURS, *PEERS)]
    assert native[-1].command[0] == "/opt/peer/llama.cpp/llama-server-native"
    assert not any("AVX2" in value for plan in native for value in plan.environment.values())


def test_a_peer_in_float32_is_the_same_command_with_another_dtype(tmp_path: Path) -> None:
    commands = [make_plan(setup(tmp_path), name, TEXT_MODEL).command for name in (VLLM, "vllm-fp32")]
    differing = [pair for pair in zip(*commands, strict=True) if len(set(pair)) > 1]
    assert differing == [("bfloat16", "float32")]


def test_no_process_that_is_limited_to_avx2_is_told_of_more() -> None:
    told = {"avx2": True, "avx512_f": True, "avx512_bf16": True, "amx_tile": True, "architecture": "x86_64"}
    module = types.SimpleNamespace(get_capabilities=lambda: told)
    sitecustomize.hide(module)
    left = {name: value for name, value in module.get_capabilities().items() if value}
    assert left == {"avx2": True, "architecture": "x86_64"}


def test_the_clusters_configuration_is_one_that_it_accepts(tmp_path: Path) -> None:
    settings = {"scheduling": {"prompt_pause_s": 0.01}, "prefill": {"kv_blocks": 64}}
    with_settings = dataclasses.replace(setup(tmp_path), settings=settings)
    config = cluster_config(with_settings, VISION_MODEL, special.PATIENT | special.BUDGETS["unchunked"])
    args = ClusterArgs.model_validate(config["applications"][0]["args"])
    assert (args.encode.threads, args.prefill.threads, args.decode.threads) == (2, 1, 2)
    assert (args.prefill.max_batch_tokens, args.dtype) == (8192, "bfloat16")
    assert (args.scheduling.prompt_pause_s, args.prefill.kv_blocks) == (0.01, 64)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 1))
def test_a_percentile_lies_between_its_neighbours(values: list[float], fraction: float) -> None:
    ordered = sorted(values)
    place = (len(ordered) - 1) * fraction
    found = percentile(values, fraction)
    assert ordered[math.floor(place)] <= found + 1e-6
    assert found <= ordered[math.ceil(place)] + 1e-6


def test_failed_and_unfinished_requests_bring_no_tokens_and_no_times() -> None:
    records = [a_record(3), a_record(2, failure="2 tokens instead of 3")]
    result = summarise(RUNNING, "row", 4, 0, 5, records, COST)
    assert (result.num_requests, result.num_failed, result.num_tokens) == (5, 4, 3)
    assert result.tokens_per_s == 1.5
    assert (result.ttft_p50_s, round(result.itl_p50_s, 9)) == (0.5, 0.1)
    assert result.failures == ("2 tokens instead of 3",)
    assert (result.server_cpu_s, result.server_cpu_by_role_s) == (3.0, {"door": 1.0, "decode": 2.0})


def test_what_neither_server_nor_client_used_was_used_by_others() -> None:
    before, after = (
        CpuUsage(0.0, {"ray": 10.0}, 1.0, 50.0),
        CpuUsage(4.0, {"ray": 11.0, "door": 2.0}, 1.5, 57.5),
    )
    cost = CpuCost.between(before, after)
    assert cost == CpuCost(4.0, {"door": 2.0, "ray": 1.0}, 0.5, 1.0)
    assert cost.server_cpu_s == 3.0


def test_a_process_is_found_by_the_mark_in_its_environment_or_by_its_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked, other = b"A=1\0BENCH_ENGINE_SERVER=x\0", b"BENCH_ENGINE_SERVER=xy\0"
    for pid, environment, session_id, state in (
        (12, marked, 7, "S"),
        (13, other, 7, "S"),
        (14, b"", 10, "S"),
        (15, marked, 10, "Z"),
    ):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "environ").write_bytes(environment)
        fields = f"{state} 1 1 {session_id} " + "0 " * 7 + "40 60 0 0"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) b) {fields}")
        (tmp_path / str(pid) / "cmdline").write_bytes(b"ray::ServeReplica:epdg:Prefill\0\0")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    assert sorted(processes.pids_of(ProcessMark("x", 10))) == [12, 14]
    assert processes.cpu_by_role([12, 13, 999]) == {"prefill": 200 / os.sysconf("SC_CLK_TCK")}


@pytest.mark.parametrize(
    ("command_line", "role"),
    [
        (b"ray::ServeReplica:epdg:Door", "door"),
        (b"ray::ServeReplica:epdg:Decode.handle_request_with_rejection\0", "decode"),
        (b"ray::ServeReplica:epdg:Something", "ray"),
        (b"ray::ProxyActor\0", "ray"),
        (b"/venv/site-packages/ray/core/src/ray/raylet/raylet\0--x=ray::ServeReplica:a:Door", "ray"),
        (b"python\0-m\0deploy.serving.launch\0ours.yaml\0", "other"),
        (b"VLLM::EngineCore\0", "other"),
        (b"", "other"),
    ],
)
def test_a_process_has_the_role_that_its_command_line_says(command_line: bytes, role: str) -> None:
    assert processes.role_of(command_line) == role


def test_the_table_of_cpu_time_is_per_thousand_tokens_and_takes_records_without_roles() -> None:
    by_role = [{"decode": 2.0, "door": 0.5}, {"decode": 4.0, "door": 0.5}, {"decode": 9.0, "door": 0.5}]
    ours = [
        a_row(OURS, idx, 1.0, num_tokens=500, server_cpu_s=sum(each.values()), client_cpu_s=0.1, server_cpu_by_role_s=each)
        for idx, each in enumerate(by_role)
    ]  # fmt: skip
    old = a_row("vllm", 0, 1.0, num_tokens=1000, server_cpu_s=7.0, client_cpu_s=0.3)
    silent = a_row("llama", 0, 0.0, num_tokens=0, server_cpu_s=1.0, client_cpu_s=0.0)
    lines = report.cpu_table(report.collect([*ours, old, silent])).splitlines()
    assert lines[0] == "| row | at once | server | door | decode | all | client |"
    assert lines[2:4] == [
        "| text-128/64 | 4 | ours | 1.00 | 8.00 | 9.00 | 0.20 |",
        "| text-128/64 | 4 | vllm | – | – | 7.00 | 0.30 |",
    ]
    assert not any("llama" in line for line in lines)


def test_who_begins_changes_with_the_repetition() -> None:
    assert [rotated(["a", "b", "c"], repetition)[0] for repetition in range(4)] == ["a", "b", "c", "a"]


def test_ratios_pair_repetitions_so_that_drift_drops_out() -> None:
    ours = [a_row(OURS, 0, 50.0), a_row(OURS, 1, 100.0), a_row(OURS, 2, 7.0)]
    peer = [a_row("vllm", 0, 100.0), a_row("vllm", 1, 200.0)]
    assert paired_ratio(ours, peer, itemgetter("tokens_per_s")) == 0.5
    assert paired_ratio(ours, [], itemgetter("tokens_per_s")) is None


def test_the_table_shows_medians_ratios_and_marks() -> None:
    rows = [
        a_row(OURS, 0, 30.0),
        a_row("vllm", 0, 60.0, num_failed=1),
        a_row("llama", 0, 20.0, other_cores=1.0),
    ]
    table = report.table(report.collect(reversed(rows)))
    assert table.splitlines()[0].startswith("| row | at once | ours")
    line = next(line for line in table.splitlines() if line.startswith("| text-128/64 | 4 |"))
    cells = [cell.strip() for cell in line.split("|")]
    assert "30.0 · 100 · 10.0" in cells
    assert "60.0 · 100 · 10.0 †" in cells
    assert "20.0 · 100 · 10.0 ‡" in cells
    assert "0.50 · 1.00 · 1.00" in cells


def test_the_last_column_is_the_ratio_to_the_peer_that_does_better_in_each_figure() -> None:
    rows = [
        a_row(OURS, 0, 30.0, start_s=8.0),
        a_row("vllm", 0, 60.0, ttft_p50_s=0.4, start_s=61.0),
        a_row("llama", 0, 20.0, ttft_p50_s=0.05),
    ]
    lines = report.table(report.collect(rows)).splitlines()
    assert lines[0].endswith("| ours ÷ better peer |")
    assert lines[2].endswith("| 0.50 · 2.00 · 1.00 |")
    assert "ours 8.0, vllm 61.0, llama 0.0" in lines[-1]


def test_rows_of_another_instruction_set_are_rows_of_their_own() -> None:
    rows = [a_row(OURS, 0, 30.0), a_row(OURS, 0, 20.0, isa="native"), a_row(OURS, 0, 10.0, isa="avx2")]
    names = [line.split(" | ")[:3] for line in report.table(report.collect(rows)).splitlines()[2:4]]
    assert names == [
        ["| text-128/64", "4", "25.0 · 100 · 10.0 |"],
        ["| text-128/64 avx2", "4", "10.0 · 100 · 10.0 |"],
    ]


def test_the_table_takes_findings_and_servers_that_did_not_start() -> None:
    finding = {
        "type": "finding",
        "measure": "image-tax",
        "values": {"loss_ratio": 0.25},
        "failures": ["HTTP 500"],
    }
    failure = {"type": "failure", "server": "vllm", "model": TEXT_MODEL, "message": "log"}
    table = report.table(report.collect([finding, failure]))
    for line in ("| loss_ratio | 0.25 |", "failed: HTTP 500", f"did not run: vllm {TEXT_MODEL}"):
        assert line in table


def test_images_that_cost_no_more_than_their_tokens_are_no_tax() -> None:
    alone = [a_record(30) for _ in range(9)]  # 40 tokens each with the prompt
    both = [*alone, a_record(30, kind="image")]
    values = special.tax_values(alone, 9.0, both, 10.0)
    assert values["loss_ratio"] == pytest.approx(0.1)
    assert values["loss_beyond_share"] == pytest.approx(0.0)
    assert special.tax_values(alone, 9.0, both, 12.0)["loss_beyond_share"] == pytest.approx(0.15)


def test_one_request_in_ten_of_the_taxed_load_is_an_image() -> None:
    kinds = [dialogue.turns[0].kind for dialogue in special.with_images(Prompts(0), ("key",))]
    assert (kinds.count("text"), kinds.count("image")) == (special.TAX_REQUESTS, special.TAX_REQUESTS // 9)


def test_a_gap_belongs_to_every_time_that_it_reaches_into() -> None:
    """A stream that stands still all the time must not look undisturbed."""
    streams = [TimedAnswer("text", chunks_at=[0.0, 1.0, 4.0]), TimedAnswer("text", chunks_at=[2.0, 2.5])]
    assert special.gaps_between(streams, 1.0, 4.0) == [3.0, 0.5]
    assert special.gaps_between(streams, 3.0, 3.5) == [3.0]
    assert special.gaps_between(streams, 4.0, 9.0) == []


def test_the_command_line_names_peers_by_their_commands() -> None:
    arguments = [
        "run",
        "--dir",
        "models",
        "--out",
        "o",
        "--peers",
        "vllm=/v,llama=/l",
        "--concurrency",
        "1,4",
    ]
    args = make_parser().parse_args(arguments)
    assert (args.peers, args.concurrency) == ({"vllm": Path("/v"), "llama": Path("/l")}, [1, 4])
    assert args.isa == "native"
    assert make_parser().parse_args([*arguments, "--isa", "avx2"]).isa == "avx2"
    with pytest.raises(SystemExit):
        make_parser().parse_args(["run", "--dir", "models", "--out", "o", "--peers", "other=/v"])
