"""Replays a recorded live run, block by block, and compares the times to first token.

One simulated cluster serves all blocks in the order in which they were recorded, each from an idle cluster
on. It has a door for each policy, as the live one had: the block's policy decides again, and its door goes on
learning. The cluster is made of

    device calls          the curves that the run was emulated with, times the block's slowdowns
    preparing, links      what the workers had measured when the block was over
    what doors know       what workers had measured of all that: when the block before was over, if they were
                          as fast there, and from the middle of the block on when it was over itself
    admission             the real controller at each door, with the cluster's defaults
    overheads             constants for each message, call and item (see overheads.py)

The overheads are measured on the first repetition of the blocks; compared are the others. A live block is one
of many that might have been, for a request that just misses a step changes what the policy does with all
after it; so several simulated ones, with noise on each call, stand against it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from bench.router.one_device import unpredicted
from bench.router.overheads import Overheads, links_of
from bench.router.policies import maker
from bench.router.recording import Block, Recorded, Recording
from cluster.config.settings import AdmissionArgs
from cluster.errors import UnavailableError
from cluster.types.curves import ServiceCurves
from deploy.simulator.client import name_of
from deploy.simulator.results import percentile
from deploy.simulator.simulation import NOISE, Simulation, slowed
from deploy.simulator.spec import WorkerSpec
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView

IDLE_S = 1.0  # between two blocks
NUM_RUNS = 5  # simulated, against one live run
AIM = 0.15  # how far a simulated percentile may be from the live one, as a ratio
SHARES = (0.5, 0.9)


@dataclass(frozen=True)
class Replayed:
    """`ttft_s`: simulated, placement to first token; `predicted_s`: by the simulated door, zero if it
    predicts nothing. `seed`: of the run."""

    block: Block
    recorded: Recorded
    ttft_s: float
    predicted_s: float = 0.0
    seed: int | None = None

    @property
    def is_compared(self) -> bool:
        """Whether no overhead was measured on it."""
        return self.block.repetition > 0

    def fields(self) -> dict[str, Any]:
        """The fields as a line of JSON."""
        return {
            "type": "replayed",
            "phase": self.block.phase,
            "policy": self.block.policy,
            "repetition": self.block.repetition,
            "request": self.recorded.request.request_id,
            "kind": self.recorded.request.kind,
            "seed": self.seed,
            "live_s": round(self.recorded.ttft_s, 6),
            "simulated_s": round(self.ttft_s, 6),
            "predicted_s": round(self.predicted_s, 6),
        }


class AsRecorded:
    """A policy that places every request where the live door has placed it."""

    def __init__(self, blocks: Sequence[Block]):
        self._recorded = {each.request.request_id: each for block in blocks for each in block.requests}

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        recorded = self._recorded[name_of(request.request_id)]
        placement = Placement(tuple(recorded.encoders), recorded.prefill, recorded.decode)
        return Decision(placement, unpredicted(len(request.media)))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise UnavailableError("a recorded encoder is gone")


def as_placed(recording: Recording) -> Recording:
    """The same recording, but each request arrives at the instant at which the live door has placed it."""

    def when_placed(each: Recorded) -> Recorded:
        return replace(each, request=replace(each.request, arrived_at=each.placed_at))

    def of(block: Block) -> Block:
        requests = sorted(block.requests, key=lambda each: each.placed_at)
        return replace(block, requests=[when_placed(each) for each in requests])

    return replace(recording, blocks=[of(block) for block in recording.blocks])


def replay(
    recording: Recording,
    overheads: Overheads,
    seed: int | None = None,
    has_recorded_placements: bool = False,
) -> Iterator[Replayed]:
    """Every request, in the order of the recording. `seed`: of the noise on calls; None: there is none. With
    recorded placements each request starts when and where the live door has placed it: a difference that is
    left comes from the workers. Raises ConfigError for a policy that does not exist."""
    policies = list(dict.fromkeys(block.policy for block in recording.blocks))
    recording = as_placed(recording) if has_recorded_placements else recording
    simulation = _make_simulation(recording, overheads, seed, policies, has_recorded_placements)
    before: Block | None = None
    for block in recording.blocks:
        _set_curves(simulation, recording, block, overheads, known_from(block, before))
        before, begins_at = block, simulation.loop.now + IDLE_S
        requests = [
            replace(each.request, arrived_at=begins_at + each.request.arrived_at) for each in block.requests
        ]
        middle_at = begins_at + max((each.request.arrived_at for each in block.requests), default=0.0) / 2
        simulation.loop.at(middle_at, _set_curves, simulation, recording, block, overheads, block)
        simulation.outcomes.clear()
        outcomes = simulation.run(requests, doors=[simulation.doors[policies.index(block.policy)]])
        by_request = {outcome.request.request_id: outcome for outcome in outcomes}
        for each in block.requests:
            outcome = by_request[each.request.request_id]
            predicted_s = outcome.prediction.ttft_s if outcome.prediction is not None else 0.0
            yield Replayed(block, each, outcome.decided_ttft_s, predicted_s, seed)


def replayed_curves(
    emulated: ServiceCurves, measured: ServiceCurves, slowdown: float, overheads: Overheads
) -> ServiceCurves:
    """How fast a worker is in a block."""
    prefill, decode = emulated.prefill, emulated.decode
    is_encoder = bool(emulated.encode)
    return ServiceCurves(
        encode={m: slowed(curve, slowdown, overheads.encode_s) for m, curve in emulated.encode.items()},
        prepare=measured.prepare,
        prefill=prefill and slowed(prefill, slowdown, overheads.prefill_s),
        decode=decode and slowed(decode, slowdown, overheads.decode_s),
        max_step_units=measured.max_step_units,
        links=links_of(measured, overheads.item_s if is_encoder else 0.0),
    )


def table(replayed: Sequence[Replayed]) -> list[str]:
    """Markdown: percentiles of the time from placement to the first token in ms, by phase and policy and over
    all phases, and how far the simulated door's predictions are off on average. Of several runs the simulated
    requests are taken together."""
    policies = list(dict.fromkeys(each.block.policy for each in replayed))
    phases = list(dict.fromkeys(each.block.phase for each in replayed))
    lines = [
        "| phase | policy | requests | p50 live | simulated | ratio | p90 live | simulated | ratio "
        "| off by more than 15 % | MAPE simulated |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for phase in [*phases, "all"]:
        for policy in policies:
            mine = [e for e in replayed if e.block.policy == policy and phase in (e.block.phase, "all")]
            lines += [_row(phase, policy, mine)] if mine else []
    return lines


def known_from(block: Block, before: Block | None) -> Block:
    """The block whose measurements doors know when `block` begins: the one before, if workers are as fast as
    there. Else `block` itself: the load between blocks, which is not recorded, has reported them."""
    return before if before is not None and before.slowdowns == block.slowdowns else block


def _make_simulation(
    recording: Recording, overheads: Overheads, seed: int | None, policies: Sequence[str], follows: bool
) -> Simulation:
    """Makes a simulation with a door for each policy."""
    followed = AsRecorded(recording.blocks)
    makers = [maker(policy) for policy in policies]
    return Simulation(
        [_with_limit(spec, recording.blocks[0].measured[spec.replica_id]) for spec in recording.workers],
        [lambda _: followed] * len(policies) if follows else makers,
        recording.model,
        seed or 0,
        noise=0.0 if seed is None else NOISE,
        admission=None if follows else AdmissionArgs(),
        scheduling=recording.scheduling,
        network_s=overheads.message_s,
    )


def _with_limit(spec: WorkerSpec, measured: ServiceCurves) -> WorkerSpec:
    """The worker with the largest step that it has told, which does not change while it runs."""
    curves = msgspec.structs.replace(spec.curves, max_step_units=measured.max_step_units)
    return replace(spec, curves=curves)


def _set_curves(
    simulation: Simulation, recording: Recording, block: Block, overheads: Overheads, told: Block
) -> None:
    """Workers are as fast as in the block; doors hear what they had measured when the other one was over."""
    for worker in recording.workers:
        name = worker.replica_id
        slowdown = block.slowdowns.get(name, 1.0)
        curves = replayed_curves(worker.curves, block.measured[name], slowdown, overheads)
        heard = msgspec.structs.replace(told.measured[name], links=links_of(told.measured[name]))
        simulation.set_curves(name, curves, heard)


def _row(phase: str, policy: str, replayed: Sequence[Replayed]) -> str:
    live = {each.recorded.request.request_id: each.recorded.ttft_s for each in replayed}
    cells, off = [phase, policy, str(len(live))], []
    for share in SHARES:
        live_s = percentile(list(live.values()), share)
        simulated_s = percentile([each.ttft_s for each in replayed], share)
        ratio = simulated_s / live_s
        cells += [f"{1e3 * live_s:.0f}", f"{1e3 * simulated_s:.0f}", f"{ratio:.2f}"]
        off += [f"p{100 * share:.0f}"] if abs(ratio - 1) > AIM else []
    errors = [abs(each.predicted_s / each.ttft_s - 1) for each in replayed if each.predicted_s > 0]
    return f"| {' | '.join([*cells, ', '.join(off), f'{fmean(errors):.1%}' if errors else ''])} |"
