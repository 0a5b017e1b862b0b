"""Clusters to simulate: which workers, on which devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.simulator.hardware import Accelerator, Model, curves, num_kv_blocks
from cluster.simulator.worker import WorkerSpec
from cluster.types.members import Role

LOCAL_STEP_TOKENS = 1024  # of prompts in a step of a decode worker, as in `cluster.engine.limits`
ROLES = {"e": Role.ENCODE, "p": Role.PREFILL, "d": Role.DECODE, "pd": Role.LANGUAGE}


@dataclass(frozen=True)
class Layout:
    """So many workers of each role. `num_language` prefill and decode; `num_whole` devices have a language
    worker and an encoder each."""

    num_encode: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_language: int = 0
    num_whole: int = 0
    may_prefill_locally: bool = False  # decode workers compute prompts, too

    @property
    def name(self) -> str:
        parts = [
            (self.num_encode, "E"),
            (self.num_prefill, "P"),
            (self.num_decode, "D"),
            (self.num_language, "PD"),
            (self.num_whole, "EPD"),
        ]
        return "+".join(f"{count}{name}" for count, name in parts if count) + (
            "*" if self.may_prefill_locally else ""
        )

    @property
    def num_devices(self) -> int:
        return self.num_encode + self.num_prefill + self.num_decode + self.num_language + self.num_whole


def workers(layout: Layout, model: Model, accelerator: Accelerator, first: int = 0) -> list[WorkerSpec]:
    """Devices count from `first`."""
    found: list[WorkerSpec] = []
    kinds = (
        ["e"] * layout.num_encode
        + ["p"] * layout.num_prefill
        + ["d"] * layout.num_decode
        + ["pd"] * layout.num_language
        + ["epd"] * layout.num_whole
    )
    for number, kind in enumerate(kinds, first):
        together = ("e", "pd") if kind == "epd" else (kind,)
        found += _on_device(together, f"{accelerator.name}-{number}", layout, model, accelerator)
    return found


def throttled(specs: list[WorkerSpec], replica_id: str, since: float, factor: float) -> list[WorkerSpec]:
    return [replace(s, throttled=(since, factor)) if s.replica_id == replica_id else s for s in specs]


def _on_device(
    kinds: tuple[str, ...], device: str, layout: Layout, model: Model, accelerator: Accelerator
) -> list[WorkerSpec]:
    found = []
    for kind in kinds:
        others = tuple(f"{other}:{device}" for other in kinds if other != kind)
        is_local = kind == "d" and layout.may_prefill_locally
        phases, step_tokens = ("dp", LOCAL_STEP_TOKENS) if is_local else (kind, 0)
        found.append(
            WorkerSpec(
                replica_id=f"{kind}:{device}",
                role=ROLES[kind],
                curves=curves(model, accelerator, phases, others, step_tokens),
                num_blocks=0 if kind == "e" else num_kv_blocks(model, accelerator),
                hardware=accelerator.name,
                device=device,
                bytes_per_row=model.bytes_per_row,
            )
        )
    return found
