"""Workers that stand in several pools, and workers that share a device: what they do for one phase delays the
others.

A step of a worker that computes prompts and decodes has tokens of prompts and a token of every running answer
in it:

* With prompts, it takes longer by one token of every answer that runs there. It has so few tokens of prompts
  that the answers wait no longer than `SchedulingPolicy.prompt_pause_s` for them, but at least those that
  cost as much as the step's fixed part (`cluster.scheduling.budget`).
* With answers, it takes longer by the queued tokens of prompts, as far as they fit.

A worker that encodes and computes prompts has an encoder and a language engine that take turns on its device.
So each of the two queues lasts longer by the other, but by no more than its own length.

Workers that share a device (`Member.device`: CPU workers on the same cores) take turns step by step. So a
prompt at one of them waits before each of its steps for a step of every other one that computes prompts. A
second worker on the same cores adds no speed, and its steps beside answers are small and cost more for each
token. All are equally fast: what one has measured of prompts holds for the others, which may have had none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.scheduling.budget import tokens_of_fixed_part, tokens_that_fit
from router.policy.encoder_media import row_s
from router.policy.pool import Floats, WorkerPool

if TYPE_CHECKING:
    from router.policy.cluster import ClusterView

# What the delay of a running answer counts at a language worker, as a ratio to that of a request that waits:
# a queue delays all requests that come while it lasts, an answer is delayed once. Simulated in three mixtures
# of roles near their capacity, two seeds, with 1, 0.5, 0.25 and 0.1: the mean time of whole answers with 0.25
# is at most 3 % above that of the best of these, with 1 up to 57 %. A worker that does not prefill computes
# prompts between its steps, and all its answers wait meanwhile: there it is 1.
ANSWER_WEIGHT = 0.25
# A step of so many tokens says which worker of a device has measured the faster one.
COMPARED_TOKENS = 512


class SharedWorkers:
    """Which slots of two pools belong to the same worker. Every worker that decodes is among those that
    compute prompts; -1: the worker is not in the other pool."""

    def __init__(self, encoders: WorkerPool, prefills: WorkerPool, decodes: WorkerPool):
        self._encoders, self._prefills, self._decodes = encoders, prefills, decodes
        self.changed()

    def changed(self) -> None:
        """A worker of any pool has joined or left."""
        self.decode_slots = _slots(self._prefills, self._decodes)  # [prefills]
        self._prefill_slots = _slots(self._decodes, self._prefills)  # [decodes]
        self._encoder_slots = _slots(self._prefills, self._encoders)  # [prefills]
        self._prompt_slots = _slots(self._encoders, self._prefills)  # [encoders]
        self.has_encoding = bool((self._encoder_slots >= 0).any())  # whether a worker encodes and prefills
        devices = self._prefills.devices
        ids = {device: i for i, device in enumerate(devices)}
        self._devices = np.array([ids[device] for device in devices], np.intp)  # [prefills]
        self.has_mates = len(ids) < len(devices)  # whether workers that compute prompts share a device

    def at_prefills(self, values: Floats | NDArray[np.bool_], otherwise: float = 0.0) -> Floats:
        """[prefills], of [decodes]. `otherwise`: for workers that do not decode."""
        return _spread(values, self.decode_slots, otherwise)

    def at_decodes(self, values: Floats) -> Floats:
        """[decodes], of [prefills]."""
        return _spread(values, self._prefill_slots, 0.0)

    def of_encoders(self, values: Floats) -> Floats:
        """[prefills], of [encoders]."""
        return _spread(values, self._encoder_slots, 0.0)

    def of_mates(self, values: Floats) -> Floats:
        """[prefills], of [prefills]: the sum over the other workers of the same device."""
        return np.maximum(0.0, np.bincount(self._devices, values)[self._devices] - values)

    def least_mates(self, values: Floats) -> NDArray[np.intp]:
        """[prefills]: the slot of least value among the workers of the same device."""
        order = np.lexsort((values, self._devices))
        return order[np.searchsorted(self._devices[order], self._devices)]

    def of_prompts(self, values: Floats, otherwise: float = 0.0) -> Floats:
        """[encoders], of [prefills]. `otherwise`: for workers that do not prefill."""
        return _spread(values, self._prompt_slots, otherwise)


def free_shares(cluster: ClusterView) -> Floats:
    """[prefills]: the part of a worker's time that running answers leave to prompts, and to its encoder."""
    pause_s = cluster.scheduling.prompt_pause_s
    return pause_s / (pause_s + cluster.shared.at_prefills(answers_step_s(cluster.decodes)))


def answers_step_s(decodes: WorkerPool) -> Floats:
    """[decodes]: how much longer a step with prompts is for the tokens of the answers that run there."""
    curve = decodes.curve("decode")
    context = decodes.context_tokens / np.maximum(1.0, decodes.reported_units)
    return decodes.running_units * (curve.per_unit_s + curve.per_pair_s * context)


class Beside(NamedTuple):
    """What the other engine of the same worker has to do. Zero where there is none."""

    queue_s: Floats
    num_waiting: Floats


def beside_encoding(cluster: ClusterView) -> Beside | None:
    """[encoders]: the language engine's queue, which is infinite while answers run there, and its prompts and
    a part of its answers. None: no worker encodes and computes prompts."""
    pool, decodes, shared = cluster.prefills, cluster.decodes, cluster.shared
    if not shared.has_encoding:
        return None
    curve = pool.curve("prefill")
    token_s = (curve.per_unit_s + curve.per_pair_s * cluster.context_tokens) * cluster.factors(pool)
    queue_s = (pool.reported_units + pool.sent_units) * token_s
    has_answers = shared.at_prefills(decodes.running_units) > 0
    answers = shared.at_prefills(decodes.reported_units + decodes.sent_units)
    num_prompts = pool.reported_requests + pool.sent_requests
    return Beside(
        shared.of_prompts(np.where(has_answers, np.inf, queue_s)),
        shared.of_prompts(num_prompts + ANSWER_WEIGHT * answers),
    )


def encoding_beside(cluster: ClusterView) -> Beside | None:
    """[prefills]: the encoder's queue, and its media items. None: no worker encodes and computes prompts."""
    pool, shared = cluster.encoders, cluster.shared
    if not shared.has_encoding:
        return None
    queue_s = (pool.reported_units + pool.sent_units) * row_s(pool) * cluster.factors(pool)
    return Beside(
        shared.of_encoders(queue_s), shared.of_encoders(pool.reported_requests + pool.sent_requests)
    )


class PromptsBeside(NamedTuple):
    """[prefills] each: prompts at the other workers of the same device."""

    queue_s: Floats
    step_s: Floats  # one step of each that has prompts


def prompts_beside(cluster: ClusterView, steps: PromptSteps) -> PromptsBeside:
    pool, shared = cluster.prefills, cluster.shared
    queued = pool.reported_units + pool.sent_units
    return PromptsBeside(
        shared.of_mates(queued * steps.queued_token_s),
        shared.of_mates(np.where(queued > 0, steps.fixed_s + steps.queued_s, 0.0)),
    )


class PromptSteps:
    """[prefills] arrays, in seconds unless they say otherwise: steps with tokens of prompts.

    num_sequences   that are, or will be, generated at the worker
    has_answers     whether answers run there when the prompt's turn comes
    fixed_s, per_token_s, per_pair_s    of prompts alone; the parts of `Curve`
    answers_s       longer for the tokens of answers
    decode_step_s   a step of the answers without prompts; zero without answers
    max_tokens      of prompts in a step
    """

    def __init__(self, cluster: ClusterView, block_size: int):
        pool, decodes, shared = cluster.prefills, cluster.decodes, cluster.shared
        curve, factors = pool.curve("prefill"), cluster.factors(pool)
        parts = curve.fixed_s * factors, curve.per_unit_s * factors, curve.per_pair_s * factors
        if shared.has_mates:
            fastest = shared.least_mates(parts[0] + COMPARED_TOKENS * parts[1])
            parts = tuple(part[fastest] for part in parts)
        self.fixed_s, self.per_token_s, self.per_pair_s = parts
        self.queued_token_s = self.per_token_s + self.per_pair_s * cluster.context_tokens
        self._queued = pool.reported_units + pool.sent_units
        decode = decodes.curve("decode")
        num_running, answers_s = decodes.running_units, answers_step_s(decodes)
        self.num_sequences = shared.at_prefills(decodes.reported_units + decodes.sent_units)
        # Where answers alone are generated, those before the prompt run by its turn.
        is_own = (self.num_sequences > 0) & ~pool.takes_any
        self.has_answers = (shared.at_prefills(num_running) > 0) | is_own
        self.answers_s = shared.at_prefills(answers_s)
        self.decode_step_s = shared.at_prefills((num_running > 0) * (decode.fixed_s + answers_s))
        # A step of answers alone has its own fixed part: prompts add what theirs takes longer.
        own_s = shared.at_prefills(np.nan_to_num(decode.fixed_s))
        limit_s = cluster.scheduling.prompt_pause_s + own_s
        least = np.maximum(block_size, tokens_of_fixed_part(self.fixed_s, self.per_token_s))
        fitting = tokens_that_fit(limit_s, self.fixed_s, self.queued_token_s, least)
        self.max_tokens = np.where(
            self.has_answers, np.minimum(np.floor(fitting), pool.step_units), pool.step_units
        )

    @property
    def queued_s(self) -> Floats:
        """How much longer a step is for the queued prompts."""
        return np.minimum(self._queued, self.max_tokens) * self.queued_token_s


def _slots(pool: WorkerPool, other: WorkerPool) -> NDArray[np.intp]:
    """[pool]: the slot of the same worker in the other pool; -1 where it is not there."""
    return np.array([other.slots.get(replica_id, -1) for replica_id in pool.replica_ids], np.intp)


def _spread(values: Floats | NDArray[np.bool_], slots: NDArray[np.intp], otherwise: float) -> Floats:
    """[slots]: `values` at these indices; `otherwise` at -1, which is the last one."""
    return np.concatenate((values, (otherwise,)))[slots]
