from hypothesis import given
from hypothesis import strategies as st

from prefill_service.scheduler import Candidate, Chunk, cut, schedule, usable_prefix


def test_prompts_are_served_in_order_of_arrival_until_the_budget_is_spent():
    candidates = [Candidate("a", 0, 6), Candidate("b", 4, 10), Candidate("c", 0, 5)]
    assert schedule(candidates, 10) == [Chunk("a", 6), Chunk("b", 4)]


def test_a_prompt_that_waits_for_embeddings_is_passed_over():
    assert schedule([Candidate("waits", 8, 8), Candidate("runs", 0, 3)], 16) == [Chunk("runs", 3)]


def test_a_chunk_ends_before_a_span_that_may_not_be_cut():
    assert schedule([Candidate("a", 0, 40, ((8, 24),))], 16) == [Chunk("a", 8)]


def test_a_span_longer_than_the_budget_runs_whole_when_it_comes_first():
    assert schedule([Candidate("a", 8, 40, ((8, 32),))], 16) == [Chunk("a", 24)]


def test_a_span_longer_than_the_rest_of_the_budget_waits_for_the_next_step():
    candidates = [Candidate("a", 0, 10), Candidate("b", 8, 40, ((8, 32),))]
    assert schedule(candidates, 16) == [Chunk("a", 10)]


def test_a_cached_prefix_leaves_one_token_to_compute():
    assert usable_prefix(32, 32, 16, ()) == 16
    assert usable_prefix(32, 33, 16, ()) == 32


def test_a_cached_prefix_does_not_cut_a_span():
    assert usable_prefix(48, 100, 16, ((20, 60),)) == 16
    assert usable_prefix(64, 100, 16, ((20, 60),)) == 64


@st.composite
def spans_and_length(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    spans, position = [], 0
    for _ in range(draw(st.integers(0, 4))):
        start = position + draw(st.integers(0, 9))
        position = start + draw(st.integers(1, 20))
        spans.append((start, position))
    return spans, position + draw(st.integers(1, 20))


@given(spans_and_length(), st.integers(1, 32))
def test_repeated_scheduling_computes_every_token_once_and_cuts_no_span(case, budget):
    spans, length = case
    computed, steps = 0, 0
    while computed < length:
        (chunk,) = schedule([Candidate("a", computed, length, spans)], budget)
        computed += chunk.num_scheduled_tokens
        steps += 1
        assert not any(start < computed < end for start, end in spans)
        longest = max((end - start for start, end in spans), default=0)
        assert chunk.num_scheduled_tokens <= max(budget, longest)
    assert computed == length and steps <= length


@given(spans_and_length(), st.integers(0, 100))
def test_a_usable_prefix_is_whole_blocks_below_the_cached_length(case, num_cached_blocks):
    spans, length = case
    usable = usable_prefix(num_cached_blocks * 16, length, 16, spans)
    assert 0 <= usable <= num_cached_blocks * 16 and usable % 16 == 0 and usable < length


def test_cut_returns_the_start_when_nothing_may_run():
    assert cut(8, 20, ((8, 32),), may_exceed=False) == 8
