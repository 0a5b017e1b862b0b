"""Set-ups with one thing wrong: `epdg serve` must end with one line that says it."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.first_steps import folders
from bench.first_steps.launcher import FailedStart, run_until_end, write_config

LIMIT_S = 10.0
LIMIT_BEFORE_RAY_S = 2.0


@dataclass(frozen=True)
class WrongSetUp:
    name: str
    expected: str  # pattern of the error's line
    args: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    sections: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None


def set_ups(folder: Path, taken_port: int) -> list[WrongSetUp]:
    """Their model folders are made under `folder`."""
    good = folders.make_text(folder / "good")
    config = json.loads((good / "config.json").read_text())
    empty = folder / "empty"
    empty.mkdir()
    t5 = json.dumps({**config, "model_type": "t5", "is_encoder_decoder": True})
    return [
        WrongSetUp("unknown setting", r'args\.decode: unknown setting "kv_block"; did you mean "kv_blocks"', {"decode": {"kv_block": 9}}),
        WrongSetUp("wrong value", r"args\.block_size: .*greater than or equal to 1 \(given: 0\)", {"block_size": 0}),
        WrongSetUp("unknown section of the file", r"section 'http_option' is unknown; did you mean", sections={"http_option": {}}),
        WrongSetUp("no such model folder", r"no model folder './nothing'", model="./nothing"),
        WrongSetUp("hub id, HF_HUB_OFFLINE=1", r"no folder 'org/name'.*hub.*HF_HUB_OFFLINE", model="org/name", environment={"HF_HUB_OFFLINE": "1"}),
        WrongSetUp("hub id, no hub in reach", r"no folder 'org/name'.*the hub cannot be reached", model="org/name", environment={"HF_ENDPOINT": "http://127.0.0.1:9"}),
        WrongSetUp("folder without config.json", r"empty is no model folder: it has no config\.json", model=str(empty)),
        WrongSetUp("config.json is no JSON", r"cannot read .*broken/config\.json", model=str(folders.with_text(good, folder / "broken", "config.json", "{"))),
        WrongSetUp("unsupported family", r"model type 't5' is not supported", model=str(folders.with_text(good, folder / "t5", "config.json", t5))),
        WrongSetUp("no tokenizer", r"has no tokenizer", model=str(folders.without(good, folder / "mute", "tokenizer.json"))),
        WrongSetUp("safetensors file cut short", r"short/model\.safetensors .* is no whole safetensors file", model=str(folders.cut_short(good, folder / "short"))),
        WrongSetUp("a shard is missing", r"model-00002-of-00002\.safetensors is missing", model=str(folders.without_a_shard(good, folder / "shards"))),
        WrongSetUp("more KV blocks than memory", r"decode needs .* GiB of KV .*; .* GiB are available", {"decode": {"kv_blocks": 1 << 40}}, model=str(good)),
        WrongSetUp("port in use", rf"something listens on 127\.0\.0\.1:{taken_port} already", port=taken_port),
        WrongSetUp("a weight is not a number", r"has weights that are not finite", model=str(folders.with_no_number(good, folder / "nan"))),
        WrongSetUp("class that is refused when it is loaded", r"model type 'bloom' is not supported", model=str(_bloom(good, folder / "bloom"))),
    ]  # fmt: skip


def run_all(folder: Path) -> Iterator[tuple[WrongSetUp, FailedStart, str]]:
    """Runs all set-ups, with what is wrong about each answer; empty if nothing is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for case in set_ups(folder, taken.getsockname()[1]):
            config = write_config(folder, case.args, case.port, **case.sections)
            ended = run_until_end(config, case.model, case.environment, folder)
            yield case, ended, fault_of(case, ended)


def fault_of(case: WrongSetUp, ended: FailedStart) -> str:
    if ended.code != 1:
        return f"exit code {ended.code}"
    if len(ended.errors) != 1:
        return f"{len(ended.errors)} lines"
    if re.search(case.expected, ended.errors[0]) is None:
        return f"unexpected: {ended.errors[0]}"
    if ended.has_started_ray and not _take_logs(ended.errors[0]):
        return "no logs were kept"
    limit = LIMIT_S if ended.has_started_ray else LIMIT_BEFORE_RAY_S
    return f"more than {limit:g} s" if ended.seconds > limit else ""


def _take_logs(line: str) -> bool:
    """Whether the path that the line names holds logs, which this removes."""
    match = re.search(r"\(logs: (\S+)\)$", line)
    if match is None:
        return False
    folder = Path(match[1])
    has_logs = (folder / "serve.log").is_file() and any((folder / "logs").glob("serve/*.log"))
    shutil.rmtree(folder)
    return has_logs


def _bloom(good: Path, folder: Path) -> Path:
    import transformers as hf

    folders.copied(good, folder)
    config = hf.BloomConfig(vocab_size=1024, hidden_size=64, n_layer=2, n_head=4)
    config.max_position_embeddings = 512
    hf.BloomForCausalLM(config).save_pretrained(folder)
    return folder
