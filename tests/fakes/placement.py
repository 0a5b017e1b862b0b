"""Clusters and requests for the policy's tests."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.curves import CodecSpeed, Curve, Link, ServiceCurves
from cluster.types.media import Modality
from cluster.types.members import Role
from cluster.types.messages import LoadReport
from router.policy import ClusterView, ItemView, Placement, RequestView, Worker
from router.policy.estimate import Estimate

EPD = (Role.ENCODE, Role.PREFILL, Role.DECODE)
SCHEDULING = SchedulingPolicy(aging_s=10.0, tokens_per_s=10_000.0, text_share=0.5)
KV_BYTES, NUM_LAYERS, BLOCK = 100_000.0, 10, 16
LINK = Link(0.001, 1e9)
CODECS = {"int8": CodecSpeed(0.52, 0.5e-9)}
ENCODE, PREFILL, DECODE = Curve(0.01, 1e-4), Curve(0.01, 1e-4), Curve(0.02, 1e-4)
MAX_TOKENS, MAX_ROWS = 1000, 4000
ROUND_ROBIN, LEAST_LOADED, PER_STAGE, LINEAR = (
    f"router.policy.baselines:{name}Policy" for name in ("RoundRobin", "LeastLoaded", "PerStage", "Linear")
)
POLICIES = ("joint", ROUND_ROBIN, LEAST_LOADED, PER_STAGE, LINEAR)  # values of `door.policy`


def curves_of(
    role: Role, speed: float = 1.0, link: Link = LINK, *, may_prefill: bool = False
) -> ServiceCurves:
    """`speed`: of a worker that is so many times faster than the others."""

    def faster(curve: Curve) -> Curve:
        return Curve(curve.fixed_s / speed, curve.per_unit_s / speed, curve.per_pair_s / speed)

    if role is Role.ENCODE:
        encode = {modality: faster(ENCODE) for modality in Modality}
        return ServiceCurves(encode=encode, max_step_units=MAX_ROWS, links={"": link})
    codecs = {name: CodecSpeed(each.ratio, each.s_per_byte / speed) for name, each in CODECS.items()}
    if role is Role.PREFILL:
        return ServiceCurves(
            prefill=faster(PREFILL), max_step_units=MAX_TOKENS, links={"": link}, codecs=codecs
        )
    if role is Role.LANGUAGE:
        return ServiceCurves(
            prefill=faster(PREFILL),
            decode=faster(DECODE),
            max_step_units=MAX_TOKENS,
            links={"": link},
            codecs=codecs,
        )
    prefill = faster(PREFILL) if may_prefill else None
    return ServiceCurves(decode=faster(DECODE), prefill=prefill, codecs=codecs)


def cluster_of(
    num_encoders: int = 2, num_prefills: int = 2, num_decodes: int = 2, num_languages: int = 0, **kwargs
) -> ClusterView:
    """Idle workers e0, …, p0, …, d0, …, l0, … of equal speed."""
    cluster = ClusterView(SCHEDULING, KV_BYTES, NUM_LAYERS, **kwargs)
    counts = num_encoders, num_prefills, num_decodes, num_languages
    for role, count in zip(list(Role)[:4], counts, strict=True):
        for idx in range(count):
            add(cluster, f"{role[0]}{idx}", role)
    return cluster


def add(cluster: ClusterView, replica_id: str, role: Role, speed: float = 1.0, **fields) -> None:
    cluster.add(Worker(replica_id, role, num_blocks=fields.pop("num_blocks", 10_000), **fields))
    cluster.measured(replica_id, curves_of(role, speed))


def load(num_units: int = 0, num_requests: int = 0, **fields) -> LoadReport:
    return LoadReport(num_waiting=num_requests, num_queued_units=num_units, **fields)


def hashes(name: str, num_blocks: int) -> list[bytes]:
    return [f"{name}/{idx}".encode() for idx in range(num_blocks)]


def text(num_tokens: int = 160, name: str = "text", **fields) -> RequestView:
    return RequestView(name, num_tokens, BLOCK, hashes(name, num_tokens // BLOCK), **fields)


def media(*num_rows: int, name: str = "media", num_before: int = 40, **fields) -> RequestView:
    """Images of so many rows, a prompt token for four of them; `num_before` text tokens before each, and as
    many at the end."""
    items: list[ItemView] = []
    start = num_before
    for idx, rows in enumerate(num_rows):
        end = start + rows // 4
        items.append(ItemView(f"{name}-{idx}", Modality.IMAGE, rows, rows * 1024, start, end))
        start = end + num_before
    return RequestView(name, start, BLOCK, hashes(name, start // BLOCK), items, **fields)


def cost_of(estimate: Estimate, placement: Placement) -> float:
    """The cost of a placement, by its definition: infinite for an impossible one."""
    cluster, encodes, prefills = estimate.cluster, estimate.encoders, estimate.prefills
    prefill, decode = cluster.prefills.slots[placement.prefill], cluster.decodes.slots[placement.decode]
    encoders = [cluster.encoders.slots[encoder] for encoder in placement.encoders]
    kv_transfer = estimate.kv_transfer(placement, prefill)
    if kv_transfer is None or not prefills.is_able[prefill]:
        return float("inf")
    if not all(encodes.is_able[idx, encoder] for idx, encoder in enumerate(encoders)):
        return float("inf")
    used_s = [0.0] * len(cluster.encoders)
    cost_s = float(kv_transfer.end_s(estimate.ttft_s(prefill, encoders))[decode])
    cost_s += float(estimate.decodes.cost_s[decode] + prefills.cost_s[prefill])
    for idx, encoder in enumerate(encoders):
        if prefills.is_needed[idx, prefill]:
            cost_s += encodes.cost_after(idx, encoder, used_s[encoder])
            used_s[encoder] += float(encodes.encode_s[idx, encoder])
    return cost_s


def is_expected(cluster: ClusterView, request: RequestView) -> bool:
    """Whether any worker counts as about to have a block or a media item of the request."""
    num_prefills, num_encoders = len(cluster.prefills), len(cluster.encoders)
    blocks = (cluster.prefixes.expecting(key, num_prefills) for key in request.block_hashes)
    items = (cluster.media.expecting(item.media_hash, num_encoders) for item in request.media)
    return any(flags.any() for flags in (*blocks, *items))


def random_cluster(rng: random.Random, sizes: Sequence[int], **kwargs) -> ClusterView:
    """Workers of any speed, link and load. `sizes`: by role, in the order of `Role`."""
    cluster = ClusterView(SCHEDULING, KV_BYTES, NUM_LAYERS, **kwargs)
    for role, count in zip(Role, sizes, strict=False):
        for idx in range(count):
            replica_id = f"{role[0]}{idx}"
            cluster.add(Worker(replica_id, role, 400, hardware=rng.choice(["a", "b"])))
            link = Link(rng.choice([1e-4, 1e-2]), rng.choice([1e8, 1e9, 1e10]))
            if rng.random() < 0.8:
                curves = curves_of(role, rng.choice([0.2, 0.5, 1, 3]), link, may_prefill=rng.random() < 0.5)
                cluster.measured(replica_id, curves)
            if rng.random() < 0.7:
                num_units = rng.choice([0, 3, 40] if role.decodes else [0, 0, 300, 4000])
                num_prompts = rng.choice([0, 0, 2, 5]) if role.decodes else 0
                num_used = rng.choice([0, 390])
                at = 1.0 - rng.choice([0.0, 0.02, 0.5])
                report = load(
                    num_units,
                    num_units and rng.randrange(1, 9),
                    num_used_blocks=num_used,
                    num_prompts=num_prompts,
                    num_prompt_tokens=num_prompts * 300,
                )
                cluster.reported(replica_id, report, at)
    return cluster


def is_plain(request: RequestView) -> bool:
    """Text without a negative prompt."""
    return not request.media and not request.num_negative_tokens


def is_legal(placement: Placement, request: RequestView, cluster: ClusterView) -> bool:
    """Whether workers of these roles, which are named by their first letters, can serve the request so."""
    prefill, decode = placement.prefill[0], placement.decode[0]
    num_cached = cluster.num_cached_tokens(request, placement.prefill)
    others = [name for name in cluster.prefills.slots if name[0] in "pl"]
    is_text_left = not request.num_negative_tokens and all(item.end <= num_cached for item in request.media)
    has_most = all(cluster.num_cached_tokens(request, name) < num_cached for name in others)
    computes = prefill in "pl" or (prefill == "d" and placement.is_local and (is_text_left or has_most))
    return computes and decode in "dl" and {encoder[0] for encoder in placement.encoders} <= {"e"}


def all_placements(request: RequestView, cluster: ClusterView) -> Iterator[Placement]:
    """Every one that can be written down, whether or not its workers can do that."""
    encoders = itertools.product(cluster.encoders.slots, repeat=len(request.media))
    pools = list(encoders), cluster.prefills.slots, cluster.decodes.slots, cluster.codecs
    for chosen, prefill, decode, codec in itertools.product(*pools):
        yield Placement(chosen, prefill, decode, codec)
