"""The placement of least cost, over encoders, prefill, decode and codec together.

The search finds the optimum without trying every combination:

* **Workers that compute prompts** are visited in order of a lower bound of the cost of any placement there
  (each item at its earliest, the best link, the best decode worker). The bounds are computed for all workers
  at once. The search ends when the bound reaches the best cost found.
* **Decode workers** are scored all at once, for a worker that computes the prompt and a time to first token.
  That worker itself is one of them if it decodes, the only one if it computes prompts just for its own
  answers.
* **Encoders**: first each item, in order of need, goes to the encoder where it adds least. This assignment is
  final if it meets the lower bound, or if there are more than `search.MAX_EXACT_ITEMS` items. Otherwise the
  assignments are searched depth first, with the bound on the rest.
* One decision has a limited effort (`search.MAX_PREFILLS`, `MAX_STEPS`). Beyond it the best placement found
  is chosen.

With n items that need encoding, an item's encoder is searched only if fewer than n others equal or beat it in
both finish time and cost. This keeps an optimum. Let item i be at an encoder e that is left out. The n - 1
other items occupy at most n - 1 encoders, so one of the n that beat e carries no other item of the request.
Move i there:

* i is alone there and finishes no later than on e, where it may even have waited;
* it costs no more;
* the other items on e finish no later without it.

The time to first token never falls when an item arrives later, so the cost has not grown. Repeating the move
ends, because every move goes to an encoder that is searched.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from router.policy.at_encoders import EncodeEstimate
from router.policy.cluster import ClusterView
from router.policy.estimate import TIE_RATIO, Estimate
from router.policy.search import Found, Search
from router.policy.views import Decision, ItemView, Placement, RequestView

NUM_ALTERNATIVES = 2


class JointPolicy:
    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        estimate = Estimate(request, cluster, now)
        search = Search(estimate)
        best = search.best()
        placement = _placement(best, cluster)
        return Decision(placement, estimate.prediction(placement), _alternatives(search, best, estimate))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        return place_item(item, cluster, now, excluded)


def place_item(item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
    """The encoder where an item would be ready first. Raises UnavailableError if all are excluded."""
    encoders = EncodeEstimate([item], cluster, now, excluded)
    encoders.break_ties(cluster.encoders, TIE_RATIO * float(encoders.finish_s.min()))
    return encoders.replica_ids[encoders.default()[0]]


def _placement(found: Found, cluster: ClusterView) -> Placement:
    encoders = cluster.encoders.replica_ids
    return Placement(
        tuple(encoders[encoder] for encoder in found.encoders),
        cluster.prefills.replica_ids[found.prefill],
        cluster.decodes.replica_ids[found.decode],
        found.codec,
    )


def _alternatives(search: Search, best: Found, estimate: Estimate) -> tuple[tuple[Placement, float], ...]:
    """The next workers for the prompt by their bound, with the same encoders, and with the same decode worker
    if they send KV."""
    others = search.least_s.copy()
    alternatives = []
    others[best.prefill] = np.inf
    for _ in range(NUM_ALTERNATIVES):
        prefill = int(others.argmin())
        if others[prefill] == np.inf:
            break
        others[prefill] = np.inf
        sends = estimate.prefills.takes_any[prefill]
        decode = best.decode if sends else int(estimate.cluster.shared.decode_slots[prefill])
        found = Found(np.inf, best.encoders, prefill, decode, best.codec)
        ttft_s = estimate.ttft_s(prefill, best.encoders)
        alternatives.append((_placement(found, estimate.cluster), ttft_s))
    return tuple(alternatives)
