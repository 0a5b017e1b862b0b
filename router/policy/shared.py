"""Workers that stand in two pools, because they compute prompts and decode: what they do for one phase delays
the other.

A step of such a worker has tokens of prompts and a token of every running answer in it:

* With prompts, it takes longer by one token of every answer that runs there. It has so few tokens of prompts
  that the answers wait no longer than `PROMPT_PAUSE_S` for them.
* With answers, it takes longer by the queued tokens of prompts, as far as they fit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.budget import PROMPT_PAUSE_S
from router.policy.pool import Floats, WorkerPool

if TYPE_CHECKING:
    from router.policy.cluster import ClusterView


class SharedWorkers:
    """Which slots of two pools belong to the same worker. Every worker that decodes is in both."""

    def __init__(self, prefills: WorkerPool, decodes: WorkerPool):
        self._prefills, self._decodes = prefills, decodes
        self._slots: tuple[NDArray[np.intp], NDArray[np.intp]] | None = None

    def changed(self) -> None:
        """A worker of either pool has joined or left."""
        self._slots = None

    @property
    def decode_slots(self) -> NDArray[np.intp]:
        """[prefills]: the slot of the same worker among those that decode; -1 where it does not decode."""
        return self._both()[0]

    def at_prefills(self, values: Floats, otherwise: float = 0.0) -> Floats:
        """[prefills], of [decodes]. `otherwise`: for workers that do not decode."""
        return _spread(values, self._both()[0], otherwise)

    def at_decodes(self, values: Floats) -> Floats:
        """[decodes], of [prefills]."""
        return _spread(values, self._both()[1], 0.0)

    def _both(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        if self._slots is None:
            prefills, decodes = self._prefills, self._decodes
            self._slots = (
                np.array([decodes.slots.get(replica_id, -1) for replica_id in prefills.replica_ids], np.intp),
                np.array([prefills.slots.get(replica_id, -1) for replica_id in decodes.replica_ids], np.intp),
            )
        return self._slots


class PromptSteps:
    """[prefills] arrays, in seconds unless they say otherwise: steps with tokens of prompts.

    num_sequences   that are, or will be, generated at the worker
    has_answers     whether answers run there
    fixed_s, per_token_s, per_pair_s    of prompts alone; the parts of `Curve`
    answers_s       longer for the tokens of answers
    decode_step_s   a step of the answers without prompts; zero without answers
    max_tokens      of prompts in a step
    """

    def __init__(self, cluster: ClusterView, block_size: int):
        pool, decodes, shared = cluster.prefills, cluster.decodes, cluster.shared
        curve, factors = pool.curve("prefill"), cluster.factors(pool)
        self.fixed_s = curve.fixed_s * factors
        self.per_token_s, self.per_pair_s = curve.per_unit_s * factors, curve.per_pair_s * factors
        self.queued_token_s = self.per_token_s + self.per_pair_s * cluster.context_tokens
        self._queued = pool.reported_units + pool.sent_units
        decode = decodes.curve("decode")
        num_running = decodes.running_units
        context = decodes.context_tokens / np.maximum(1.0, decodes.reported_units)
        answers_s = num_running * (decode.per_unit_s + decode.per_pair_s * context)
        self.num_sequences = shared.at_prefills(decodes.reported_units + decodes.sent_units)
        self.has_answers = shared.at_prefills(num_running) > 0
        self.answers_s = shared.at_prefills(answers_s)
        self.decode_step_s = shared.at_prefills((num_running > 0) * (decode.fixed_s + answers_s))
        room_s = np.maximum(0.0, PROMPT_PAUSE_S - self.fixed_s)
        fitting = np.maximum(block_size, room_s / np.maximum(1e-12, self.queued_token_s))
        self.max_tokens = np.where(
            self.has_answers, np.minimum(np.floor(fitting), pool.step_units), pool.step_units
        )

    @property
    def queued_s(self) -> Floats:
        """How much longer a step is for the queued prompts."""
        return np.minimum(self._queued, self.max_tokens) * self.queued_token_s


def _spread(values: Floats, slots: NDArray[np.intp], otherwise: float) -> Floats:
    """[slots]: `values` at these indices; `otherwise` at -1, which is the last one."""
    return np.concatenate((values, (otherwise,)))[slots]
