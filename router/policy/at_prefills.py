"""The part of an estimate of the workers that compute prompts: when the first token would leave each of them.

A worker computes its queue in packed steps of at most `max_tokens` tokens, by virtual deadline. If it
decodes, too, the answers that run there take part in each step (`router.policy.shared`). A new prompt waits
for the running step, then for prompts with earlier deadlines. Its first token comes at the end of the step
that holds its last token, so other tokens packed into that step count, too. In a prompt with media the tokens
before an item are computed while the item is encoded. So the first token comes at

    max(text_s, max over items (arrival of the item + seconds of the tokens from its first one on))

This is never earlier if an item arrives later. Requests that will arrive later are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cluster.errors import RequestError, UnavailableError
from cluster.scheduling.budget import is_left_for_item
from router.policy.calibration import Kind
from router.policy.cluster import ClusterView
from router.policy.pending import block_key
from router.policy.pool import Floats, WorkerPool, running_step
from router.policy.shared import ANSWER_WEIGHT, PromptSteps, encoding_beside, prompts_beside
from router.policy.views import RequestView


class _Queue(NamedTuple):
    """[prefills] each; in tokens unless it says seconds."""

    left_s: Floats  # seconds until the running step ends
    before: Floats  # ahead of the prompt
    text_before: Floats  # ahead of the prompt, of prompts without media
    behind: Floats  # behind the prompt, but may share its steps
    num_prompts: Floats  # that wait, each by the part of it that is left


class PrefillEstimate:
    """[prefills] arrays, in seconds unless they say otherwise.

    num_cached, num_uncached   tokens
    num_kv_cached   tokens whose KV is there, also where no state is
    max_tokens  tokens in a step
    queue_s     until the first of the prompt's own tokens can run, with the messages to the worker and back
    text_s      until the first token, if all embeddings had arrived
    work_s      device time of the prompt alone
    tail_s      [items, prefills]: to compute what is computed once an item is there: the tokens from its
                first one on, and a little text in front of it
    is_needed   [items, prefills]: whether the worker lacks some of the item's tokens
    cost_s      delay of others: the prompt's work, for every prompt that waits there or at a worker of the
                same device, by the part of it that is left; for a part of the answers that run there; and for
                a later request with the same prompt if nothing is cached
    """

    def __init__(
        self,
        request: RequestView,
        cluster: ClusterView,
        now: float,
        earliest_s: Floats,
        can_decode: NDArray[np.bool_],
        steps: PromptSteps,
        blocks_s: Floats,
    ):
        """`earliest_s`: [items], earliest arrival. `can_decode`: [prefills], the answer. `blocks_s`:
        [prefills], until there are blocks for the prompt. Raises what `able_to_hold` raises."""
        pool = cluster.prefills
        self.takes_any = pool.takes_any
        self.max_tokens = steps.max_tokens
        self._steps = steps
        self._fixed_s = steps.fixed_s + steps.answers_s
        self._decode_wait_s = 0.5 * steps.decode_step_s  # a step of the answers runs, on average
        self._blocks_s = blocks_s
        depths = cluster.prefixes.depths(request.block_hashes, len(pool), ends=request.snapshots)
        self.is_able = able_to_compute(request, pool, _num_cached(request, depths), can_decode)
        self.num_cached = _num_cached(request, self._expected(request, depths, cluster))
        self.num_kv_cached = self.num_cached
        if request.snapshots:
            kv_depths = cluster.prefixes.depths(request.block_hashes, len(pool))
            self.num_kv_cached = np.maximum(self.num_cached, _num_cached(request, kv_depths))
        self.num_uncached = request.num_prompt_tokens - self.num_cached + request.num_negative_tokens
        self._add_media(request)
        media_s = np.where(self.is_needed, earliest_s[:, None], 0.0).max(0, initial=0.0)
        queue = self._queue(request, cluster, now, media_s)
        self._compute(request, queue, cluster.scheduling.text_share)
        others = queue.before + queue.behind
        busy_s = queue.left_s + self._steps_s(np.ceil(others / self.max_tokens), others)
        self._busy_s = np.where(steps.has_answers, np.inf, busy_s)
        half_step_s = 0.5 * self._steps_s(1.0, np.minimum(others, self.max_tokens))
        self._half_step_s = np.where(others > 0, half_step_s, self._decode_wait_s)
        waiting = queue.num_prompts + np.where(pool.takes_any, ANSWER_WEIGHT, 1.0) * steps.num_sequences
        encoding = encoding_beside(cluster)
        if encoding is not None:
            delay_s = np.minimum(encoding.queue_s, self.text_s)
            self.queue_s, self.text_s = self.queue_s + delay_s, self.text_s + delay_s
            waiting = waiting + encoding.num_waiting
        if cluster.shared.has_mates:
            beside = prompts_beside(cluster, steps)
            self.queue_s = self.queue_s + np.minimum(beside.queue_s, beside.step_s)
            self.text_s = self.text_s + np.minimum(beside.queue_s, self._num_steps * beside.step_s)
            waiting = waiting + cluster.shared.of_mates(waiting)
        self.cost_s = self.work_s * (waiting + ~pool.keeps_blocks)
        self._correct(request, cluster)

    def awaiting_s(self, arrivals: Floats, tails_s: Floats, prefill: int) -> Floats:
        """Seconds until the first token at that worker if only these embeddings delay it; any shape. If the
        worker is busy with other prompts when they arrive, a step is running."""
        at_boundary_s = np.minimum(arrivals + self._half_step_s[prefill], self._busy_s[prefill])
        return self._awaited * (np.maximum(arrivals, at_boundary_s) + tails_s)

    def ttft_s(self, arrivals: Floats, prefill: int) -> float:
        """Seconds until the first token at that worker. `arrivals`: [items]."""
        awaiting_s = self.awaiting_s(arrivals, self.tail_s[:, prefill], prefill)
        needed_s = awaiting_s[self.is_needed[:, prefill]]
        return max(float(self.text_s[prefill]), float(needed_s.max(initial=0.0)))

    def least_ttft_s(self, earliest_s: Floats) -> Floats:
        """[prefills]: `ttft_s` with every item at its earliest arrival. `earliest_s`: [items]."""
        if not len(earliest_s):
            return self.text_s
        arrivals = earliest_s[:, None]
        ready_s = np.maximum(arrivals, np.minimum(arrivals + self._half_step_s, self._busy_s))
        awaiting_s = np.where(self.is_needed, self._awaited * (ready_s + self.tail_s), 0.0)
        return np.maximum(self.text_s, awaiting_s.max(0))

    def _correct(self, request: RequestView, cluster: ClusterView) -> None:
        """Applies the learnt corrections of this kind of prediction."""
        alone = cluster.calibration.residual(Kind.COMPUTED if request.media else Kind.TEXT)
        decodes = cluster.shared.decode_slots >= 0
        computed = np.where(decodes, cluster.calibration.residual(Kind.BESIDE_ANSWERS), alone)
        self._awaited = cluster.calibration.residual(Kind.AWAITED)
        self.queue_s = computed * (self.queue_s + cluster.calibration.overhead_s)
        self.text_s = computed * (self.text_s + cluster.calibration.overhead_s)
        self.tail_s += cluster.calibration.overhead_s

    def _expected(self, request: RequestView, depths: Floats, cluster: ClusterView) -> Floats:
        """`depths`, and blocks that a running step computes: it ends before the prompt's turn."""
        hashes = request.block_hashes
        trusted = self._computing(hashes, depths, cluster)
        if not trusted:
            return depths
        expected = cluster.prefixes.depths(hashes, len(depths), trusted, request.snapshots)
        return np.minimum(expected, depths + self.max_tokens // request.block_size)

    def _computing(self, hashes: Sequence[bytes], depths: Floats, cluster: ClusterView) -> int:
        """Bits of the slots whose running step computes the first block of the prompt that the slot lacks."""
        if not len(cluster.pending) or depths.min(initial=np.inf) >= len(hashes):
            return 0
        lacking = np.full(len(depths), block_key(hashes[0]), np.int64)
        begun = np.flatnonzero(depths)
        different, which = np.unique(depths[begun].astype(np.intp), return_inverse=True)
        keys = [block_key(hashes[depth] if depth < len(hashes) else None) for depth in different.tolist()]
        lacking[begun] = np.array(keys, np.int64)[which]
        computing = cluster.pending.computing(cluster.prefills, lacking)
        return sum(1 << slot for slot in np.flatnonzero(computing).tolist())

    def _queue(self, request: RequestView, cluster: ClusterView, now: float, media_s: Floats) -> _Queue:
        """The total comes from reports and from what was sent since. This door knows its own prompts; it
        assumes that all others are text with earlier deadlines."""
        pool = cluster.prefills
        total = pool.reported_units + pool.sent_units
        keys, token_s = cluster.keys(request, now, self.num_uncached), self._steps.queued_token_s
        own = cluster.pending.running(pool, now, keys)
        others = np.maximum(0.0, pool.reported_units - np.maximum(0.0, own.total - pool.sent_units))
        may_run = np.minimum(others + own.running, total)
        running, left_s = running_step(pool, may_run, self.max_tokens, self._fixed_s, token_s, now)
        left_s = self._blocks_s + np.maximum(left_s, self._decode_wait_s)
        running_before = np.minimum(running, others + own.running_before)
        soon = now + media_s
        not_before = np.where(self.is_needed.any(0), soon + total * token_s, now + left_s)
        in_step = running / np.maximum(1.0, may_run)
        ahead = cluster.pending.ahead(pool, now, keys, soon, token_s, not_before, in_step)
        num_prompts = pool.reported_requests + pool.sent_requests
        num_others = np.maximum(0.0, num_prompts - own.num_prompts)
        num_others = num_others * np.maximum(0.0, others - running) / np.maximum(1.0, others)
        before = np.minimum(others + ahead.before, total)
        text_before = np.minimum(others + ahead.text_before, total)
        return _Queue(
            left_s,
            np.maximum(0.0, before - running_before),
            np.maximum(0.0, text_before - running_before),
            np.maximum(0.0, np.minimum(ahead.behind, total - before) - (running - running_before)),
            np.minimum(num_prompts, ahead.num_prompts + num_others),
        )

    def _compute(self, request: RequestView, queue: _Queue, text_share: float) -> None:
        num_tokens = queue.before + self.num_uncached
        num_steps = np.ceil(num_tokens / self.max_tokens)
        if not request.media:  # a share of every step is kept for text
            kept = np.maximum(1.0, text_share * self.max_tokens)
            num_steps = np.minimum(num_steps, np.ceil((queue.text_before + self.num_uncached) / kept))
        self._num_steps = num_steps
        num_computed = np.minimum(num_steps * self.max_tokens, num_tokens + queue.behind)
        num_others = np.maximum(0.0, num_computed - self.num_uncached)
        own_s = self._tokens_s(self.num_uncached, self.num_cached)
        self.work_s = own_s + self.num_uncached / self.max_tokens * self._steps.fixed_s
        self.text_s = queue.left_s + self._steps_s(num_steps, num_others) + own_s
        before_s = self._steps_s(np.floor(queue.before / self.max_tokens), queue.before)
        self.queue_s = np.minimum(queue.left_s + before_s, self.text_s - own_s)

    def _steps_s(self, num_steps: Floats | float, num_tokens: Floats) -> Floats:
        """Seconds of so many steps that compute so many tokens of other prompts."""
        return num_steps * self._fixed_s + num_tokens * self._steps.queued_token_s

    def _tokens_s(self, num_tokens: Floats, first: Floats) -> Floats:
        """Seconds of so many tokens of a prompt from its `first` on, without the fixed cost of steps. A
        token's context is the tokens of earlier steps."""
        context = first + np.maximum(0.0, num_tokens - self.max_tokens) / 2
        return num_tokens * (self._steps.per_token_s + self._steps.per_pair_s * context)

    def _add_media(self, request: RequestView) -> None:
        shape = len(request.media), len(self.is_able)
        starts = np.array([float(item.start) for item in request.media]).reshape(-1, 1)
        ends = np.array([float(item.end) for item in request.media]).reshape(-1, 1)
        first = np.maximum(starts, self.num_cached)
        is_needed = ends > self.num_cached
        text_s = self._tokens_s(first - self.num_cached, self.num_cached)
        is_left = is_needed & (is_needed.cumsum(0) == 1) & is_left_for_item(text_s, self._steps.fixed_s)
        first = np.where(is_left & ~self._steps.has_answers, self.num_cached, first)
        num_tokens = request.num_prompt_tokens - first
        steps_s = np.ceil(num_tokens / self.max_tokens) * self._fixed_s
        self.tail_s = (steps_s + self._tokens_s(num_tokens, first)).reshape(shape)
        self.is_needed = is_needed.reshape(shape)


def _num_cached(request: RequestView, depths: Floats) -> Floats:
    """[prefills]: tokens in so many blocks, without the last token of the prompt: it is computed anyway."""
    return np.minimum(depths, (request.num_prompt_tokens - 1) // request.block_size) * request.block_size


def able_to_compute(
    request: RequestView, pool: WorkerPool, num_cached: Floats, can_decode: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """[prefills]: workers that may compute the prompt: for any answer; or, of those that `can_decode` it, for
    an answer of their own. Of these, prompts with media or a negative prompt, which may be long, are left to
    workers that compute any prompt, unless only text is missing behind the `num_cached` tokens, or more is
    missing at all of the others that are not avoided. Raises what `able_to_hold` raises."""
    has_speed = ~np.isnan(pool.own_curve("prefill").fixed_s)
    is_text_left = (num_cached >= request.media_end) & (request.num_negative_tokens == 0)
    others = pool.takes_any & pool.is_listed & pool.is_not_avoided(request.avoided)
    most_cached = num_cached[others].max(initial=-1.0)
    is_able = pool.takes_any | (can_decode & has_speed & (is_text_left | (num_cached > most_cached)))
    return able_to_hold(request, pool, pool.is_listed & is_able, request.num_prefill_blocks)


def able_to_send(request: RequestView, pool: WorkerPool) -> NDArray[np.bool_]:
    """[prefills]: workers that can compute the prompt for any answer. Raises what `able_to_hold` raises."""
    return able_to_hold(request, pool, pool.is_listed & pool.takes_any, request.num_prefill_blocks)


def able_to_hold(
    request: RequestView, pool: WorkerPool, is_able: NDArray[np.bool_], num_blocks: int
) -> NDArray[np.bool_]:
    """[slots]: of the able workers, those that hold the request's adapter and have so many blocks at all, as
    the request prefers them. Raises UnavailableError if no worker is able, RequestError if the request is too
    large for all."""
    if not is_able.any():
        raise UnavailableError(f"no {pool.phase} worker is ready", retry_after_s=1.0)
    if request.adapter and not (is_able := is_able & pool.holding(request.adapter)).any():
        raise UnavailableError(f"no {pool.phase} worker holds this adapter at present", retry_after_s=1.0)
    is_large = is_able & (pool.num_blocks >= num_blocks)
    if not is_large.any():
        largest = int(pool.num_blocks[is_able].max()) * request.block_size
        raise RequestError(
            f"the request needs {num_blocks * request.block_size} tokens of KV cache; "
            f"a {pool.phase} worker holds {largest}"
        )
    return pool.preferred(is_large, request.avoided)
