"""A recorded live run, as values; its format is that of bench/router/trace.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.curves import ServiceCurves
from cluster.types.media import Modality
from cluster.types.members import Role
from deploy.simulator.hardware import Model
from deploy.simulator.spec import WorkerSpec
from deploy.simulator.workload import Item, SimRequest

# Of live workers, which do not tell them.
NUM_PREPARE_THREADS = 2

Fields = dict[str, Any]


@dataclass(frozen=True)
class Recorded:
    """A live request. Instants are seconds from the block's start.

    request    as the simulator sees it; it arrives when the client sent it
    placed_at  when the door placed it, about
    ttft_s     from then to the first token
    prefill    the worker that computed its prompt, which may be the decode worker
    encoders   by item
    stages     of its timeline, in seconds
    items      stages of the items that an encoder computed for it, in seconds, by index
    """

    request: SimRequest
    placed_at: float
    ttft_s: float
    prefill: str
    decode: str
    encoders: Sequence[str]
    stages: Mapping[str, float]
    items: Mapping[int, Mapping[str, float]]

    @property
    def first_token_at(self) -> float:
        return self.placed_at + self.ttft_s


@dataclass(frozen=True)
class Block:
    """`measured`: by the workers themselves, when the block was over. `slowdowns`: of calls of the model.
    Both by replica id."""

    phase: str
    policy: str
    repetition: int
    slowdowns: Mapping[str, float]
    measured: Mapping[str, ServiceCurves]
    requests: Sequence[Recorded]


@dataclass(frozen=True)
class Recording:
    """`workers`: with the curves that they were emulated with."""

    model: Model
    scheduling: SchedulingPolicy
    workers: Sequence[WorkerSpec]
    blocks: Sequence[Block]


def read(path: Path) -> Recording:
    """Raises OSError; KeyError or ValueError for a file that is no recorded run."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or lines[0].get("type") != "cluster":
        raise ValueError(f"{path} does not begin with the cluster of a recorded run")
    by_block: dict[int, list[Recorded]] = {}
    for line in lines:
        if line["type"] == "request":
            by_block.setdefault(line["block"], []).append(_recorded(line))
    cluster = lines[0]
    model = Model(
        "recorded", 0.0, cluster["num_layers"], 0, cluster["kv_bytes_per_token"], 0.0,
        cluster["feature_bytes_per_row"], cluster["block_size"],
    )  # fmt: skip
    return Recording(
        model,
        SchedulingPolicy(**cluster["scheduling"]),
        [_worker(fields, model, cluster["step_target_s"]) for fields in cluster["workers"]],
        [_block(line, by_block.get(line["block"], [])) for line in lines if line["type"] == "block"],
    )


def _recorded(fields: Fields) -> Recorded:
    media = tuple(
        Item(
            each["hash"], Modality(each["modality"]), each["rows"], each["start"], each["end"] - each["start"]
        )
        for each in fields["items"]
    )
    request = SimRequest(
        f"{fields['block']}.{fields['request']}",
        fields["at_s"],
        fields["prompt_tokens"],
        fields["output_tokens"],
        [bytes.fromhex(key) for key in fields["block_hashes"]],
        media,
        kind=fields["kind"],
    )
    timeline = fields["ledger"]
    encoded = [each for each in timeline.get("items_ms", []) if not each["cached"]]
    return Recorded(
        request,
        fields["at_s"] + fields["ttft_s"] - fields["placed_s"],
        fields["placed_s"],
        timeline["placement"]["prefill"],
        timeline["placement"]["decode"],
        timeline["placement"]["encoders"],
        {name: ms / 1e3 for name, ms in timeline["actual_ms"].items()},
        {each["item"]: {name: ms / 1e3 for name, ms in each.items()} for each in encoded},
    )


def _block(fields: Fields, requests: Sequence[Recorded]) -> Block:
    measured = {name: msgspec.convert(curves, ServiceCurves) for name, curves in fields["measured"].items()}
    return Block(
        fields["phase"], fields["policy"], fields["repetition"], fields["slowdowns"], measured, requests
    )


def _worker(fields: Fields, model: Model, step_target_s: float) -> WorkerSpec:
    role = Role(fields["role"])
    limits: Fields = {"step_target_s": step_target_s}
    if role.encodes:
        limits |= {"max_items": fields["max_batch"], "num_prepare_threads": NUM_PREPARE_THREADS}
    elif role.decodes:
        limits |= {"max_batch": fields["max_batch"]}
    return WorkerSpec(
        fields["replica_id"],
        role,
        msgspec.convert(fields["curves"], ServiceCurves),
        fields["num_blocks"],
        hardware="emulated",
        bytes_per_row=model.bytes_per_row,
        cache_bytes=fields["cache_bytes"],
        **limits,
    )
