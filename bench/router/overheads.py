"""What takes a live cluster time besides the calls that are emulated, measured on a part of a recorded run: a
few constants of the whole run, so that no phase and no policy has figures of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from bench.router.recording import Block, Recorded, Recording
from cluster.types.curves import Link, ServiceCurves
from deploy.simulator.simulation import slowed

NO_LINK = Link(0.0, float("inf"))  # of a worker that has not sent anything yet


@dataclass(frozen=True)
class Overheads:
    """Seconds: for a message between a door and a worker; for an encoder call and for an item's way there and
    from there, besides what workers measure of preparing and of links; for a step of prefill and of
    decode."""

    message_s: float = 0.0
    encode_s: float = 0.0
    item_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


def measure(recording: Recording, blocks: Sequence[Block]) -> Overheads:
    """Medians over these blocks: of half of the time that no worker accounts for; of what requests that found
    a worker idle took longer than the curves say; of what a decode step is measured to last longer than
    emulated. Raises ValueError without requests."""
    requests = [(block, each) for block in blocks for each in block.requests]
    if not requests:
        raise ValueError("there is no request to measure overheads on")
    items = [parts for block, each in requests for parts in _item_parts(recording, block, each)]
    return Overheads(
        median(each.stages["delivery"] for _, each in requests) / 2,
        _median(call_s for call_s, _ in items),
        _median(rest_s for _, rest_s in items),
        _median(step_s for block, each in requests for step_s in _prefill_part(recording, block, each)),
        _median(step_s for block in blocks for step_s in _decode_parts(recording, block)),
    )


def links_of(curves: ServiceCurves, more_s: float = 0.0) -> dict[str, Link]:
    """The links of a worker, with the one to any other worker; so much later each."""
    links = {"": NO_LINK} | curves.links
    return {name: Link(link.latency_s + more_s, link.bytes_per_s) for name, link in links.items()}


def _prefill_part(recording: Recording, block: Block, each: Recorded) -> Iterator[float]:
    """The part of a text whose prefill worker had nothing else to do."""
    curve = _emulated(recording, each.prefill).prefill
    others = [other for other in block.requests if other is not each and other.prefill == each.prefill]
    is_alone = not any(
        other.placed_at < each.first_token_at and each.placed_at < other.first_token_at for other in others
    )
    is_decode = _emulated(recording, each.prefill).decode is not None
    if curve is None or each.request.media or is_decode or not is_alone:
        return
    curve = slowed(curve, block.slowdowns.get(each.prefill, 1.0))
    took_s = sum(each.stages[name] for name in ("prefill_blocks", "prefill_queue", "prefill"))
    yield took_s - curve.seconds(each.request.num_prompt_tokens)


def _item_parts(recording: Recording, block: Block, each: Recorded) -> Iterator[tuple[float, float]]:
    """(of the call, of the rest) of the first item, when no media were in work anywhere."""
    is_first = not any(
        other.request.media and other.placed_at <= each.placed_at < other.first_token_at
        for other in block.requests
        if other is not each
    )
    if 0 not in each.items or not is_first:
        return
    stages, item, encoder = each.items[0], each.request.media[0], each.encoders[0]
    told = block.measured[encoder]
    call = slowed(_emulated(recording, encoder).encode[item.modality], block.slowdowns.get(encoder, 1.0))
    links = links_of(told)
    link = links.get(each.prefill, links[""])
    rest_s = told.prepare[item.modality].seconds(item.num_rows)
    rest_s += link.seconds(item.num_tokens * recording.model.bytes_per_row)
    yield (
        stages["queue"] + stages["encode"] - call.seconds(item.num_rows),
        stages["prepare"] + stages["target"] + stages["transfer"] - rest_s,
    )


def _decode_parts(recording: Recording, block: Block) -> Iterator[float]:
    for replica_id, told in block.measured.items():
        emulated = _emulated(recording, replica_id).decode
        if told.decode is not None and emulated is not None:
            yield told.decode.seconds(1) - slowed(emulated, block.slowdowns.get(replica_id, 1.0)).seconds(1)


def _emulated(recording: Recording, replica_id: str) -> ServiceCurves:
    return next(worker.curves for worker in recording.workers if worker.replica_id == replica_id)


def _median(values: Iterable[float]) -> float:
    """Zero of nothing."""
    found = list(values)
    return median(found) if found else 0.0
