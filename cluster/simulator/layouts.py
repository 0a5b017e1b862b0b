"""Clusters to simulate: which workers, on which devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.simulator.hardware import Accelerator, Model, curves, num_kv_blocks
from cluster.simulator.worker import WorkerSpec
from cluster.types.members import Role

LOCAL_STEP_TOKENS = 512  # of a prompt that a decode worker computes: a short pause for its sequences
# Of the memory, where prefill and decode share a device: prompts and prefix cache; the rest holds answers.
PREFILL_SHARE = 0.5


@dataclass(frozen=True)
class Layout:
    """So many workers of each phase; `num_colocated` devices run prefill and decode together, `num_whole` all
    three."""

    num_encode: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_colocated: int = 0
    num_whole: int = 0
    may_prefill_locally: bool = False  # decode workers compute prompts, too

    @property
    def name(self) -> str:
        parts = [
            (self.num_encode, "E"),
            (self.num_prefill, "P"),
            (self.num_decode, "D"),
            (self.num_colocated, "PD"),
            (self.num_whole, "EPD"),
        ]
        return "+".join(f"{count}{name}" for count, name in parts if count) + (
            "*" if self.may_prefill_locally else ""
        )

    @property
    def num_devices(self) -> int:
        return self.num_encode + self.num_prefill + self.num_decode + self.num_colocated + self.num_whole


def workers(layout: Layout, model: Model, accelerator: Accelerator, first: int = 0) -> list[WorkerSpec]:
    """Devices count from `first`."""
    found: list[WorkerSpec] = []
    kinds = (
        ["e"] * layout.num_encode
        + ["p"] * layout.num_prefill
        + ["d"] * layout.num_decode
        + ["pd"] * layout.num_colocated
        + ["epd"] * layout.num_whole
    )
    for number, kind in enumerate(kinds, first):
        found += _on_device(kind, f"{accelerator.name}-{number}", layout, model, accelerator)
    return found


def mixed(*parts: list[WorkerSpec]) -> list[WorkerSpec]:
    return [spec for part in parts for spec in part]


def throttled(specs: list[WorkerSpec], replica_id: str, since: float, factor: float) -> list[WorkerSpec]:
    return [replace(s, throttled=(since, factor)) if s.replica_id == replica_id else s for s in specs]


def _on_device(
    kinds: str, device: str, layout: Layout, model: Model, accelerator: Accelerator
) -> list[WorkerSpec]:
    ids = {kind: f"{kind}:{device}" for kind in kinds}
    found = []
    for kind, role in (("e", Role.ENCODE), ("p", Role.PREFILL), ("d", Role.DECODE)):
        if kind not in kinds:
            continue
        others = tuple(each for other, each in ids.items() if other != kind)
        is_local = kind == "d" and layout.may_prefill_locally and kinds == "d"
        phases = "dp" if is_local else kind
        share = 1.0 if len(kinds) == 1 else {"e": 0.0, "p": PREFILL_SHARE, "d": 1 - PREFILL_SHARE}[kind]
        num_blocks = 0 if kind == "e" else num_kv_blocks(model, accelerator, share)
        found.append(
            WorkerSpec(
                replica_id=ids[kind],
                role=role,
                curves=curves(model, accelerator, phases, others, LOCAL_STEP_TOKENS if is_local else 0),
                num_blocks=num_blocks,
                hardware=accelerator.name,
                device=device,
                bytes_per_row=model.bytes_per_row,
            )
        )
    return found
