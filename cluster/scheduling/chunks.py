"""Which tokens of which prompts run in a step.

Prompts with runnable tokens stand in two class queues, text and media, each in order of virtual deadline. A
prompt whose next media item is still being encoded stands in no queue, so it costs nothing and delays no
other prompt. A step is filled in the common order of both queues, with one reservation: text has `text_share`
of the budget as long as it can fill it. So a long video prompt slows text down by a bounded factor and never
stalls it. What one class cannot use goes to the other.

If the model attends in both directions within a media span (`uncut_spans`), a chunk ends before the span or
contains all of it. A span that does not fit with text's share runs when its prompt is the most urgent one:
as the first chunk, whole, over the budget if necessary. With a chunk that exceeds the budget, only text's
share runs.

The most urgent runnable prompt always gets tokens, and the number of prompts that can be more urgent is
bounded (`keys`): no prompt starves.

The cost of a step depends on how many prompts it serves, not on how many wait: O(chunks), plus O(log n) and a
short memory move per prompt that becomes runnable or stops being runnable.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice
from math import ceil

from cluster.scheduling.keys import OrderKey, SchedulingPolicy, Ticket, order_key

Span = tuple[int, int]  # [start, end) in prompt tokens; sequences of spans are sorted and disjoint


@dataclass(eq=False, slots=True)
class _Prompt:
    """[num_computed, num_ready) can run now. `num_ready` never lies inside an uncut span."""

    request_id: str
    is_text: bool
    place: tuple[OrderKey, int]  # unique: the order in its class queue
    num_total: int
    uncut_spans: Sequence[Span]
    num_computed: int = 0
    num_ready: int = 0

    @property
    def num_runnable(self) -> int:
        return max(0, self.num_ready - self.num_computed)


_ClassQueue = list[tuple[tuple[OrderKey, int], _Prompt]]  # sorted by place


@dataclass(slots=True)
class _StepBuilder:
    """A step while it is filled. `num_reserved` of the `num_left` tokens are kept for text."""

    num_left: int
    num_reserved: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)  # by request id

    def room(self, prompt: _Prompt) -> int:
        return self.num_left if prompt.is_text else self.num_left - self.num_reserved

    def run(self, prompt: _Prompt) -> None:
        """Adds as many tokens of the prompt as fit."""
        start = prompt.num_computed
        end = min(prompt.num_ready, start + self.room(prompt))
        if prompt.uncut_spans:
            end = cut(start, end, prompt.uncut_spans, may_exceed=not self.num_scheduled_tokens)
        if end <= start:
            return
        self.num_scheduled_tokens[prompt.request_id] = end - start
        if prompt.is_text:
            self.num_reserved = max(0, self.num_reserved - (end - start))
        self.num_left = max(self.num_left - (end - start), self.num_reserved)


class ChunkScheduler:
    """Prompts in work: they hold their memory and are computed chunk by chunk. Counts are tokens of the whole
    prompt."""

    def __init__(self, policy: SchedulingPolicy):
        self._policy = policy
        self._prompts: dict[str, _Prompt] = {}
        self._text: _ClassQueue = []
        self._media: _ClassQueue = []
        self._num_runnable_text = 0  # tokens
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._prompts

    @property
    def has_runnable(self) -> bool:
        """Whether a token of any prompt could be computed now."""
        return bool(self._text or self._media)

    def add(self, ticket: Ticket, num_tokens_total: int, uncut_spans: Sequence[Span] = ()) -> None:
        """Takes a prompt into work. Nothing is computed. All tokens are ready if it is text; none are ready
        if it has media.

        Raises ValueError if the prompt is in work already."""
        if ticket.request_id in self._prompts:
            raise ValueError(f"request {ticket.request_id} is in work already")
        self._num_added += 1
        place = (order_key(ticket, self._policy), self._num_added)
        prompt = _Prompt(ticket.request_id, ticket.is_text, place, num_tokens_total, uncut_spans)
        self._prompts[ticket.request_id] = prompt
        self._move(prompt, num_computed=0, num_ready=num_tokens_total if ticket.is_text else 0)

    def set_computed(self, request_id: str, num_computed_tokens: int) -> None:
        """The KV of [0, num_computed_tokens) is there. Raises KeyError for a request that is not in work."""
        prompt = self._prompts[request_id]
        self._move(prompt, num_computed_tokens, prompt.num_ready)

    def set_ready(self, request_id: str, num_ready_tokens: int) -> None:
        """The embeddings of [0, num_ready_tokens) are there. An uncut span counts once all of it is ready.

        Raises KeyError for a request that is not in work."""
        prompt = self._prompts[request_id]
        num_ready = cut(0, min(num_ready_tokens, prompt.num_total), prompt.uncut_spans, may_exceed=False)
        self._move(prompt, prompt.num_computed, num_ready)

    def is_runnable(self, request_id: str) -> bool:
        """Whether a token of the prompt could be computed now. False for a prompt that is not in work."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.num_runnable > 0

    def remove(self, request_id: str) -> None:
        """Removes a prompt. Unknown prompts are ignored."""
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._move(prompt, prompt.num_total, prompt.num_total)

    def schedule(self, max_batch_tokens: int, left_out: Container[str] = ()) -> dict[str, int]:
        """What runs next: the number of tokens of each request that runs, in the order of the step, and none
        of the requests in `left_out`. Changes nothing, so the same state gives the same answer.

        At most `max_batch_tokens` in total. Exception: if the first chunk is one span that may not be cut and
        does not fit with text's share, then only that share runs with it."""
        step = _StepBuilder(max_batch_tokens, self._num_reserved(max_batch_tokens))
        num_text_seen = 0
        for _, prompt in merge(self._text, self._media):
            if step.room(prompt) <= 0:
                break
            num_text_seen += prompt.is_text
            if prompt.request_id not in left_out:
                step.run(prompt)
        for _, prompt in islice(self._text, num_text_seen, None):  # what is left is text's share
            if step.room(prompt) <= 0:
                break
            if prompt.request_id not in left_out:
                step.run(prompt)
        return step.num_scheduled_tokens

    def _num_reserved(self, max_batch_tokens: int) -> int:
        """Text's share: no more than text can fill, and at least one token less than the budget, so that
        media always advances."""
        share = ceil(self._policy.text_share * max_batch_tokens)
        return max(0, min(share, max_batch_tokens - 1, self._num_runnable_text))

    def _move(self, prompt: _Prompt, num_computed: int, num_ready: int) -> None:
        """The only writer of a prompt's progress, of the class queues and of the count of runnable text
        tokens."""
        before = prompt.num_runnable
        prompt.num_computed, prompt.num_ready = num_computed, num_ready
        after = prompt.num_runnable
        queue = self._text if prompt.is_text else self._media
        if prompt.is_text:
            self._num_runnable_text += after - before
        if after and not before:
            insort(queue, (prompt.place, prompt))
        elif before and not after:
            del queue[bisect_left(queue, (prompt.place,))]


def cut(start: int, end: int, uncut_spans: Sequence[Span], *, may_exceed: bool) -> int:
    """The nearest legal end of a chunk [start, end) at or below `end`.

    If that leaves nothing: the end of the span that is in the way, if `may_exceed`; otherwise `start`."""
    span = _span_around(end, uncut_spans)
    if span is None:
        return end
    span_start, span_end = span
    if span_start > start:
        return span_start
    return span_end if may_exceed else start


def usable_prefix(
    num_cached_tokens: int, num_prompt_tokens: int, block_size: int, uncut_spans: Sequence[Span]
) -> int:
    """How much of a cached prefix can be used, in tokens: whole blocks; at least one token is left to
    compute, because it gives the logits; no span is cut."""
    usable = min(num_cached_tokens, num_prompt_tokens - 1) // block_size * block_size
    while (span := _span_around(usable, uncut_spans)) is not None:
        usable = span[0] // block_size * block_size
    return usable


def _span_around(position: int, spans: Sequence[Span]) -> Span | None:
    """The span that a cut at `position` would divide."""
    i = bisect_left(spans, (position,)) - 1  # the last span that starts before
    return spans[i] if i >= 0 and position < spans[i][1] else None
