"""The encoders' part of an estimate: when each item of a request would be ready at each encoder.

An encoder computes its queue in calls by its own fit (`cluster.scheduling.encoder_calls`); meanwhile CPU
threads prepare the item.
Items of one request on one encoder are encoded one after the other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.errors import UnavailableError
from cluster.scheduling.encoder_calls import num_calls, rows_of_a_call
from router.policy.cluster import ClusterView
from router.policy.index import slots_of
from router.policy.pool import UNMEASURED_S, Floats, WorkerPool, rendezvous, running_step
from router.policy.shared import beside_encoding
from router.policy.views import ItemPrediction, ItemView

# Of an item's time. Four doors that are asked for the same new image within 20 ms encode at most 3 % of the
# images twice (simulated, `tests/unit/bench/test_simulate.py`). A larger share makes new items queue at the
# encoder that hashing prefers while others are idle.
AFFINITY_SHARE = 0.1
REENCODE_SHARE = 2.0  # of an item's time; encoding an item twice takes time from other requests


class EncodeEstimate:
    """[items, encoders] arrays, in seconds; an encoder that cannot take an item has infinite times.

    device_s    until the device has computed its queue, with what it does for other phases meanwhile
    prepare_s   on a CPU thread, beside the device
    encode_s    encoder calls; zero at an encoder that has the item or has taken it on
    finish_s    until the embeddings are ready, with no other item of the request ahead
    cost_s      delay of others: the item's device time, for every item, prompt and answer there; with no
                other item of the request ahead
    """

    def __init__(
        self,
        items: Sequence[ItemView],
        cluster: ClusterView,
        now: float,
        excluded: Collection[str] = (),
        avoided: Collection[str] = (),
    ):
        """Encoders are named by replica id: those that are excluded take none of the items, those that are
        avoided only what no other can take. Raises UnavailableError if no encoder can take one of the
        items."""
        pool = cluster.encoders
        self.replica_ids = pool.replica_ids
        self.items = items
        self.is_able = np.array([pool.able(i.modality) for i in items], bool).reshape(len(items), len(pool))
        for replica_id in excluded:
            if replica_id in pool.slots:
                self.is_able[:, pool.slots[replica_id]] = False
        if items and not self.is_able.any(1).all():
            raise UnavailableError("no encode worker is ready", retry_after_s=1.0)
        self.is_able = pool.preferred(self.is_able, avoided)
        self.num_bytes = np.array([float(item.num_bytes) for item in items]).reshape(-1, 1)
        self._links = cluster.feature_links.speeds
        factors = cluster.factors(pool)
        rows = np.array([float(item.num_rows) for item in items]).reshape(-1, 1)
        fixed_s, per_row_s = _curves(pool, "encode", items)
        fixed_s, per_row_s = fixed_s * factors, per_row_s * factors
        prepare_fixed_s, prepare_per_row_s = _curves(pool, "prepare", items, 0.0)
        self.prepare_s = (prepare_fixed_s + prepare_per_row_s * rows) * factors
        self.encode_s = np.ceil(rows / pool.step_units) * fixed_s + rows * per_row_s
        self.device_s, waiting = _queue(pool, rows, fixed_s, per_row_s, cluster.usual_rows, now)
        beside = beside_encoding(cluster)
        if beside is not None:
            self.device_s = self.device_s + np.minimum(beside.queue_s, self.device_s + self.encode_s)
            waiting = waiting + beside.num_waiting
        self.cost_s = self.encode_s * waiting
        self.finish_s = np.maximum(self.device_s, self.prepare_s) + self.encode_s
        self.finish_s[~self.is_able] = np.inf
        self._note_holders(cluster, now)

    def _note_holders(self, cluster: ClusterView, now: float) -> None:
        self.is_held = np.zeros(self.is_able.shape, bool)
        for idx, item in enumerate(self.items):
            holders = slots_of(cluster.media.holders(item.media_hash))
            for slot in holders[self.is_able[idx, holders]]:
                self.is_held[idx, slot] = True
                self.finish_s[idx, slot] = cluster.encoder_media.arriving_s(int(slot), item.media_hash, now)
                self.encode_s[idx, slot] = self.cost_s[idx, slot] = 0.0
        self._prefer_one(cluster.encoders)

    def break_ties(self, pool: WorkerPool, tie_s: float) -> None:
        """Add up to `tie_s`, by rendezvous, to an item's cost."""
        for idx, item in enumerate(self.items):
            self.cost_s[idx] += tie_s * rendezvous(pool.salts, item.media_hash.encode())

    def _prefer_one(self, pool: WorkerPool) -> None:
        """Make an item cost more at encoders that would be the second to encode it:

        * if some encoder has the item or has taken it on, at all others;
        * otherwise at all but the one that rendezvous prefers, so that doors with slightly different
          knowledge that ask at the same moment ask the same encoder.
        """
        for idx, item in enumerate(self.items):
            is_new = self.is_able[idx] & ~self.is_held[idx]
            if not is_new.any():
                continue
            own_s = float((self.prepare_s[idx] + self.encode_s[idx])[is_new].min())
            if self.is_held[idx].any():
                self.cost_s[idx, is_new] += REENCODE_SHARE * own_s
            else:
                preference = np.where(is_new, rendezvous(pool.salts, item.media_hash.encode()), np.inf)
                is_new[preference.argmin()] = False
                self.cost_s[idx, is_new] += AFFINITY_SHARE * own_s

    @property
    def earliest_s(self) -> Floats:
        """[items]: when each may arrive at some prefill worker, at best."""
        links = self._links
        if not self.items:
            return np.zeros(0)
        return (self.finish_s + links.least_latency_s + self.num_bytes * links.least_s_per_byte).min(1)

    def transfers(self, prefill: int) -> Floats:
        """[items, encoders]: seconds of the embeddings' way to that prefill worker."""
        links = self._links
        return links.latency_s[prefill] + self.num_bytes * links.s_per_byte[prefill]

    def finish_after(self, idx: int, encoder: int, device_s: float) -> float:
        """`finish_s` if items of the same request use the encoder's device for `device_s` first."""
        if self.is_held[idx, encoder]:
            return float(self.finish_s[idx, encoder])
        begin_s = max(self.device_s[idx, encoder] + device_s, self.prepare_s[idx, encoder])
        return float(begin_s + self.encode_s[idx, encoder])

    def cost_after(self, idx: int, encoder: int, device_s: float) -> float:
        """`cost_s` if items of the same request use the encoder's device for `device_s` first: this one waits
        for them."""
        return float(self.cost_s[idx, encoder]) + (0.0 if self.is_held[idx, encoder] else device_s)

    def default(self) -> list[int]:
        """The best encoder per item, as if each were alone; for items that prefill does not need."""
        return [int(encoder) for encoder in (self.finish_s + self.cost_s).argmin(1)] if self.items else []

    def predict(
        self, prefill: int, encoders: Sequence[int], is_needed: NDArray[np.bool_]
    ) -> list[ItemPrediction]:
        """The prediction of an assignment, per item. Items that are not needed are not encoded."""
        used_s: dict[int, float] = {}
        transfers = self.transfers(prefill)
        predictions = []
        for idx, encoder in enumerate(encoders):
            if not is_needed[idx]:
                predictions.append(ItemPrediction())
                continue
            finish_s = self.finish_after(idx, encoder, used_s.get(encoder, 0.0))
            own_s = float(self.encode_s[idx, encoder])
            used_s[encoder] = used_s.get(encoder, 0.0) + own_s
            transfer_s = float(transfers[idx, encoder])
            if self.is_held[idx, encoder]:
                predictions.append(ItemPrediction(finish_s, 0.0, transfer_s))
            else:
                prepare_s = float(self.prepare_s[idx, encoder])
                predictions.append(
                    ItemPrediction(finish_s - own_s - prepare_s, prepare_s + own_s, transfer_s, own_s)
                )
        return predictions


def _curves(
    pool: WorkerPool, kind: str, items: Sequence[ItemView], unmeasured_s: float = UNMEASURED_S
) -> tuple[Floats, Floats]:
    """[items, encoders]: seconds per call and per row."""
    curves = [pool.curve(f"{kind} {item.modality}", unmeasured_s) for item in items]
    shape = len(items), len(pool)
    fixed_s = np.array([curve.fixed_s for curve in curves]).reshape(shape)
    return fixed_s, np.array([curve.per_unit_s for curve in curves]).reshape(shape)


def _queue(
    pool: WorkerPool, rows: Floats, fixed_s: Floats, per_row_s: Floats, usual_rows: float, now: float
) -> tuple[Floats, Floats]:
    """[items, encoders]: until the device has computed its queue, all of it assumed to be of the item's kind
    and in items of `usual_rows` (NaN: of its size); and the number of items in it."""
    total, max_rows = pool.reported_units + pool.sent_units, pool.step_units
    item_rows = np.minimum(rows if np.isnan(usual_rows) else usual_rows, max_rows)
    first = np.minimum(pool.first_units, total)
    call_rows = np.clip(rows_of_a_call(first, fixed_s, per_row_s), item_rows, max_rows)
    running, left_s = running_step(pool, first, call_rows, fixed_s, per_row_s, now)
    rest = total - running
    calls = num_calls(rest, item_rows, max_rows, fixed_s, per_row_s)
    queue_s = left_s + calls * fixed_s + rest * per_row_s
    return queue_s, pool.num_waiting(rest)
