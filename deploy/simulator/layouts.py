"""Clusters to simulate: which workers, on which devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.types.members import Role
from deploy.simulator.hardware import Accelerator, Model, curves, encoder_curves, num_kv_blocks
from deploy.simulator.spec import WorkerSpec

LOCAL_STEP_TOKENS = 1024  # of prompts in a step of a decode worker, as in `cluster.engine.limits`
ROLES = {
    "e": Role.ENCODE,
    "p": Role.PREFILL,
    "d": Role.DECODE,
    "pd": Role.LANGUAGE,
    "ep": Role.ENCODE_PREFILL,
    "epd": Role.WHOLE,
}


@dataclass(frozen=True)
class Layout:
    """A number of workers of each role, a device each."""

    num_encode: int = 0
    num_prefill: int = 0
    num_decode: int = 0
    num_language: int = 0
    num_whole: int = 0
    num_encode_prefill: int = 0
    may_prefill_locally: bool = False  # decode workers compute prompts, too

    @property
    def name(self) -> str:
        parts = [f"{count}{kind.upper()}" for kind, count in self.counts.items() if count]
        return "+".join(parts) + ("*" if self.may_prefill_locally else "")

    @property
    def counts(self) -> dict[str, int]:
        """The number of workers by the letters of `ROLES`."""
        return {
            "e": self.num_encode,
            "p": self.num_prefill,
            "d": self.num_decode,
            "pd": self.num_language,
            "epd": self.num_whole,
            "ep": self.num_encode_prefill,
        }

    @property
    def num_devices(self) -> int:
        return sum(self.counts.values())


def workers(layout: Layout, model: Model, accelerator: Accelerator, first: int = 0) -> list[WorkerSpec]:
    """Devices count from `first`."""
    kinds = [kind for kind, count in layout.counts.items() for _ in range(count)]
    return [
        worker(kind, f"{accelerator.name}-{number}", layout, model, accelerator)
        for number, kind in enumerate(kinds, first)
    ]


def throttled(specs: list[WorkerSpec], replica_id: str, since: float, factor: float) -> list[WorkerSpec]:
    return [replace(s, throttled=(since, factor)) if s.replica_id == replica_id else s for s in specs]


def worker(kind: str, device: str, layout: Layout, model: Model, accelerator: Accelerator) -> WorkerSpec:
    """One, on a device of this name. `kind`: a key of `ROLES`."""
    replica_id, has_encoder_beside = f"{kind}:{device}", kind in ("ep", "epd")
    phases, step_tokens = kind[1:] if has_encoder_beside else kind, 0
    if kind == "d" and layout.may_prefill_locally:
        phases, step_tokens = "dp", LOCAL_STEP_TOKENS
    return WorkerSpec(
        replica_id=replica_id,
        role=ROLES[kind],
        curves=curves(model, accelerator, phases, step_tokens),
        num_blocks=0 if kind == "e" else num_kv_blocks(model, accelerator),
        hardware=accelerator.name,
        bytes_per_row=model.bytes_per_row,
        encoder=encoder_curves(model, accelerator, replica_id) if has_encoder_beside else None,
    )
