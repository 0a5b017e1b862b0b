"""The queue and the chunk scheduler together, in a world where a step lasts a second."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.chunks import ChunkScheduler, Span
from cluster.scheduling.keys import SchedulingPolicy, Ticket, order_key
from cluster.scheduling.queue import WaitingQueue

VIDEO_TOKENS = 7680


@dataclass(frozen=True)
class Prompt:
    ticket: Ticket
    uncut_spans: tuple[Span, ...] = ()


def finish_steps(
    prompts: Iterable[Prompt], policy: SchedulingPolicy, budget: int, max_running: int
) -> dict[str, int]:
    """request id → the step after which its prompt is computed."""
    arriving = deque(sorted(prompts, key=lambda prompt: prompt.ticket.arrived_at))
    prompt_of = {prompt.ticket.request_id: prompt for prompt in arriving}
    left = {prompt.ticket.request_id: prompt.ticket.num_tokens for prompt in arriving}
    queue, chunks = WaitingQueue(policy), ChunkScheduler(policy)
    finished: dict[str, int] = {}
    now = 0
    while arriving or queue or chunks:
        while arriving and arriving[0].ticket.arrived_at <= now:
            queue.push(arriving.popleft().ticket)
        while queue and len(chunks) < max_running:
            ticket = queue.pop()
            chunks.add(ticket, ticket.num_tokens, prompt_of[ticket.request_id].uncut_spans)
            chunks.set_ready(ticket.request_id, ticket.num_tokens)
        now += 1
        for request_id, num_tokens in chunks.schedule(budget).items():
            left[request_id] -= num_tokens
            total = prompt_of[request_id].ticket.num_tokens
            chunks.set_computed(request_id, total - left[request_id])
            if not left[request_id]:
                chunks.remove(request_id)
                finished[request_id] = now
    return finished


def first_come_first_served(prompts: Iterable[Prompt], budget: int) -> dict[str, int]:
    """The same world without classes or keys."""
    waiting = [
        [p.ticket.request_id, p.ticket.arrived_at, p.ticket.num_tokens]
        for p in sorted(prompts, key=lambda p: p.ticket.arrived_at)
    ]
    finished: dict[str, int] = {}
    now = 0
    while waiting:
        left = budget
        for row in waiting:
            taken = min(left, row[2]) if row[1] <= now else 0
            row[2], left = row[2] - taken, left - taken
        now += 1
        finished |= {row[0]: now for row in waiting if not row[2]}
        waiting = [row for row in waiting if row[2]]
    return finished


def test_a_long_video_prompt_delays_text_by_at_most_one_step():
    policy = SchedulingPolicy(aging_s=10, tokens_per_s=512, text_share=0.5)
    text = [Prompt(Ticket(f"text {i}", i, 60 + 37 * (i % 5))) for i in range(1, 30)]
    video = Prompt(Ticket("video", 0, VIDEO_TOKENS, is_text=False))
    alone = finish_steps(text, policy, 512, 64)
    beside = finish_steps([video, *text], policy, 512, 64)
    in_line = first_come_first_served([video, *text], 512)
    assert all(beside[request_id] - alone[request_id] <= 1 for request_id in alone)
    assert in_line["text 1"] - alone["text 1"] >= VIDEO_TOKENS // 512 - 1
    assert beside["video"] <= 1 + VIDEO_TOKENS // (512 // 2)


POLICY = SchedulingPolicy(aging_s=3, tokens_per_s=8, text_share=0.5)
BUDGET = 16


@st.composite
def prompts(draw: st.DrawFn, with_spans: bool) -> list[Prompt]:
    """A few requests, and an adversary that sends more work than can be done in every second for a while."""
    result = []
    for number in range(draw(st.integers(1, 4))):
        is_text, num_tokens = draw(st.booleans()), draw(st.integers(1, 100))
        start = draw(st.integers(0, num_tokens))
        spans = () if is_text or not with_spans or start == num_tokens else ((start, num_tokens),)
        priority, arrived_at = draw(st.integers(0, 2)), draw(st.integers(0, 5))
        result.append(Prompt(Ticket(f"{number}", arrived_at, num_tokens, is_text, priority), spans))
    sizes = draw(st.lists(st.integers(1, 24), min_size=1, max_size=4))
    texts = draw(st.lists(st.booleans(), min_size=1, max_size=3))
    for second in range(draw(st.integers(0, 40))):
        for k in range(2):
            size, is_text = sizes[(second + k) % len(sizes)], texts[(second + k) % len(texts)]
            spans = ((0, size),) if with_spans and not is_text else ()
            result.append(Prompt(Ticket(f"flood {second} {k}", second, size, is_text), spans))
    return result


def num_tokens_before(ticket: Ticket, prompts: Iterable[Prompt]) -> int:
    """The work of all that may go before, whenever they arrive, and its own."""
    key = order_key(ticket, POLICY)
    return sum(p.ticket.num_tokens for p in prompts if order_key(p.ticket, POLICY) <= key)


@given(prompts(with_spans=False))
def test_under_any_load_a_request_waits_for_nothing_but_the_work_that_is_more_urgent(case: list[Prompt]):
    finished = finish_steps(case, POLICY, BUDGET, max_running=len(case))
    assert len(finished) == len(case)
    for prompt in case:
        ticket = prompt.ticket
        speed = BUDGET if ticket.is_text else BUDGET - ceil(POLICY.text_share * BUDGET)
        bound = ceil(num_tokens_before(ticket, case) / speed)
        assert finished[ticket.request_id] - ticket.arrived_at <= bound


@given(prompts(with_spans=True), st.integers(1, 6))
def test_spans_and_a_full_pool_starve_no_request(case: list[Prompt], max_running: int):
    finished = finish_steps(case, POLICY, BUDGET, max_running)
    assert len(finished) == len(case)
    for prompt in case:
        in_work = sum(sorted((p.ticket.num_tokens for p in case), reverse=True)[:max_running])
        bound = num_tokens_before(prompt.ticket, case) + in_work
        assert finished[prompt.ticket.request_id] - prompt.ticket.arrived_at <= bound
