from __future__ import annotations

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.chunks import ChunkScheduler, Span, cut, usable_prefix
from cluster.scheduling.keys import SchedulingPolicy, Ticket

SHARE = 0.5


def scheduler(text_share: float = SHARE) -> ChunkScheduler:
    return ChunkScheduler(SchedulingPolicy(aging_s=10, tokens_per_s=1000, text_share=text_share))


def add_text(chunks: ChunkScheduler, request_id: str, num_tokens: int, arrived_at: float = 0) -> None:
    chunks.add(Ticket(request_id, arrived_at, num_tokens), num_tokens)


def add_media(
    chunks: ChunkScheduler,
    request_id: str,
    num_tokens: int,
    spans: tuple[Span, ...] = (),
    arrived_at: float = 0,
) -> None:
    chunks.add(Ticket(request_id, arrived_at, num_tokens, is_text=False), num_tokens, spans)
    chunks.set_ready(request_id, num_tokens)


def test_within_a_class_the_order_is_the_virtual_deadline():
    chunks = scheduler()
    add_text(chunks, "large", 8)
    add_text(chunks, "late", 3, arrived_at=5)
    add_text(chunks, "small", 4)
    assert list(chunks.schedule(10).items()) == [("small", 4), ("large", 6)]


def test_text_gets_its_share_beside_a_media_prompt_that_came_first():
    chunks = scheduler(text_share=0.25)
    add_media(chunks, "video", 7680)
    add_text(chunks, "text", 100, arrived_at=60)
    assert list(chunks.schedule(40).items()) == [("video", 30), ("text", 10)]


def test_what_one_class_cannot_use_goes_to_the_other():
    chunks = scheduler()
    add_media(chunks, "video", 100)
    assert list(chunks.schedule(40).items()) == [("video", 40)]
    add_text(chunks, "text", 6, arrived_at=60)
    assert list(chunks.schedule(40).items()) == [("video", 34), ("text", 6)]
    chunks.remove("video")
    assert list(chunks.schedule(40).items()) == [("text", 6)]


def test_no_more_is_kept_for_text_than_it_has_left():
    chunks = scheduler()
    add_media(chunks, "video", 100)
    add_text(chunks, "text", 20, arrived_at=60)
    add_text(chunks, "done", 20, arrived_at=60)
    chunks.set_computed("text", 18)
    chunks.remove("done")
    assert list(chunks.schedule(40).items()) == [("video", 38), ("text", 2)]


def test_more_urgent_text_is_not_held_to_its_share():
    chunks = scheduler()
    add_text(chunks, "text", 35)
    add_media(chunks, "video", 100, arrived_at=1)
    assert list(chunks.schedule(40).items()) == [("text", 35), ("video", 5)]


def test_media_moves_even_when_text_owns_the_whole_step():
    chunks = scheduler(text_share=1)
    add_media(chunks, "video", 100)
    add_text(chunks, "text", 100, arrived_at=60)
    assert list(chunks.schedule(16).items()) == [("video", 1), ("text", 15)]


def test_a_prompt_whose_media_is_being_encoded_delays_no_other():
    chunks = scheduler()
    chunks.add(Ticket("waits", 0, 20, is_text=False), 20)
    add_media(chunks, "runs", 30, arrived_at=60)
    assert list(chunks.schedule(16).items()) == [("runs", 16)]
    chunks.set_ready("waits", 8)
    assert list(chunks.schedule(16).items()) == [("waits", 8), ("runs", 8)]
    chunks.set_computed("waits", 8)
    assert list(chunks.schedule(16).items()) == [("runs", 16)]


def test_a_cached_prefix_is_not_run_again():
    chunks = scheduler()
    add_text(chunks, "a", 20)
    chunks.set_computed("a", 16)
    assert list(chunks.schedule(16).items()) == [("a", 4)]


def test_a_chunk_ends_before_a_span_that_may_not_be_cut():
    chunks = scheduler()
    add_media(chunks, "a", 40, ((8, 24),))
    assert list(chunks.schedule(16).items()) == [("a", 8)]


def test_a_span_longer_than_the_budget_runs_whole_as_the_first_chunk_beside_texts_share():
    chunks = scheduler()
    add_media(chunks, "image", 40, ((0, 24),))
    add_media(chunks, "other", 40, arrived_at=1)
    assert list(chunks.schedule(16).items()) == [("image", 24)]
    add_text(chunks, "text", 100, arrived_at=2)
    assert list(chunks.schedule(16).items()) == [("image", 24), ("text", 8)]


def test_a_span_that_does_not_fit_waits_and_is_skipped():
    chunks = scheduler()
    add_text(chunks, "text", 10)
    add_media(chunks, "image", 32, ((0, 32),))
    add_media(chunks, "video", 50, arrived_at=60)
    assert list(chunks.schedule(16).items()) == [("text", 10), ("video", 6)]


def test_half_a_span_is_not_ready():
    chunks = scheduler()
    chunks.add(Ticket("a", 0, 40, is_text=False), 40, ((8, 24),))
    chunks.set_ready("a", 20)
    assert list(chunks.schedule(64).items()) == [("a", 8)]
    chunks.set_computed("a", 8)
    assert list(chunks.schedule(64).items()) == []


def test_a_request_that_left_is_forgotten_and_an_unknown_one_is_refused():
    chunks = scheduler()
    add_text(chunks, "a", 4)
    with pytest.raises(ValueError, match="in work already"):
        add_text(chunks, "a", 4)
    chunks.remove("a")
    chunks.remove("a")
    assert not chunks and "a" not in chunks and list(chunks.schedule(8).items()) == []
    with pytest.raises(KeyError):
        chunks.set_computed("a", 1)
    with pytest.raises(KeyError):
        chunks.set_ready("a", 1)


def test_a_cached_prefix_leaves_one_token_to_compute():
    assert usable_prefix(32, 32, 16, ()) == 16
    assert usable_prefix(32, 33, 16, ()) == 32


def test_a_cached_prefix_does_not_cut_a_span():
    assert usable_prefix(48, 100, 16, ((20, 60),)) == 16
    assert usable_prefix(64, 100, 16, ((20, 60),)) == 64
    assert usable_prefix(48, 100, 16, ((4, 20), (20, 60))) == 0


def test_cut_returns_the_start_when_nothing_may_run_and_the_spans_end_when_it_may_exceed():
    assert cut(8, 20, ((8, 32),), may_exceed=False) == 8
    assert cut(8, 20, ((8, 32),), may_exceed=True) == 32
    assert cut(0, 32, ((8, 32), (32, 40)), may_exceed=False) == 32


@st.composite
def spans_and_length(draw: st.DrawFn) -> tuple[tuple[Span, ...], int]:
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = position + draw(st.integers(0, 9))
        position = start + draw(st.integers(1, 20))
        spans.append((start, position))
    return tuple(spans), position + draw(st.integers(1, 20))


@given(spans_and_length(), st.integers(0, 100))
def test_a_usable_prefix_is_whole_blocks_that_cut_no_span(
    case: tuple[tuple[Span, ...], int], num_blocks: int
):
    spans, length = case
    usable = usable_prefix(num_blocks * 16, length, 16, spans)
    assert 0 <= usable <= num_blocks * 16 and usable % 16 == 0 and usable < length
    assert not any(start < usable < end for start, end in spans)


prompts = st.lists(
    st.tuples(st.booleans(), spans_and_length(), st.integers(0, 5), st.floats(0, 1), st.floats(0, 1)),
    max_size=8,
)


@given(prompts, st.integers(1, 40), st.floats(0, 1))
def test_every_step_keeps_budget_share_and_spans_and_asking_changes_nothing(
    cases, budget: int, text_share: float
):
    chunks, spans_of, is_text_of = scheduler(text_share), {}, {}
    runnable = {True: 0, False: 0}
    for number, (is_text, (spans, length), arrived_at, ready_part, computed_part) in enumerate(cases):
        request_id = str(number)
        spans_of[request_id], is_text_of[request_id] = () if is_text else spans, is_text
        chunks.add(Ticket(request_id, arrived_at, length, is_text), length, spans_of[request_id])
        ready = cut(
            0, length if is_text else int(ready_part * length), spans_of[request_id], may_exceed=False
        )
        computed = cut(0, int(computed_part * ready), spans_of[request_id], may_exceed=False)
        chunks.set_ready(request_id, ready)
        chunks.set_computed(request_id, computed)
        spans_of[request_id] = (computed, spans_of[request_id])
        runnable[is_text] += ready - computed

    step = chunks.schedule(budget)
    assert chunks.schedule(budget) == step
    assert all(num_tokens > 0 for num_tokens in step.values())
    assert bool(step) == any(runnable.values())

    def total(is_text: bool) -> int:
        return sum(num_tokens for name, num_tokens in step.items() if is_text_of[name] == is_text)

    owed = min(ceil(text_share * budget), budget - 1, runnable[True])
    assert total(True) >= owed
    if total(True) + total(False) > budget:
        first, num_tokens = next(iter(step.items()))
        computed, spans = spans_of[first]
        assert (computed, computed + num_tokens) in spans
        assert total(False) == num_tokens and total(True) == owed
    elif not any(spans for _, spans in spans_of.values()):
        assert total(True) + total(False) == min(budget, sum(runnable.values()))
    for request_id, num_tokens in step.items():
        computed, spans = spans_of[request_id]
        end = computed + num_tokens
        assert not any(span_start < end < span_end for span_start, span_end in spans)


def test_a_prompt_can_run_while_there_is_something_ready_that_is_not_computed():
    chunks = scheduler()
    chunks.add(Ticket("r", 0, 8, is_text=False), 8)
    assert not chunks.is_runnable("r")
    chunks.set_ready("r", 5)
    assert chunks.is_runnable("r")
    chunks.set_computed("r", 5)
    assert not chunks.is_runnable("r")
    chunks.set_ready("r", 8)
    assert chunks.is_runnable("r")
    chunks.remove("r")
    assert not chunks.is_runnable("r")
