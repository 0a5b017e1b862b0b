"""What the n-gram index and the draft model guess, and what they hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine import speculation
from cluster.engine.speculation import GRAM_SIZES, MAX_HISTORY, DraftModelProposer, NgramProposer
from cluster.errors import ConfigError
from tests.unit.engine.drafting import Request, decode, requests_of, tiny_model


def naive_draft(token_ids: list[int], max_tokens: int, forbidden: frozenset[int]) -> list[int]:
    for size in GRAM_SIZES:
        for end in range(len(token_ids) - 1, size - 1, -1):
            if token_ids[end - size : end] == token_ids[len(token_ids) - size :]:
                known = list(token_ids)
                while len(known) < len(token_ids) + max_tokens:
                    known.append(known[end + len(known) - len(token_ids)])
                draft = known[len(token_ids) :]
                return draft[: next((i for i, token in enumerate(draft) if token in forbidden), max_tokens)]
    return []


@given(
    parts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    max_tokens=st.integers(0, 9),
)
def test_the_ngram_index_finds_what_a_search_of_the_whole_history_finds(parts, max_tokens):
    forbidden = frozenset({3})
    proposer = NgramProposer(forbidden)
    request = Request("r", [])
    for part in parts:
        request.token_ids += part
        wanted = naive_draft(request.token_ids, max_tokens, forbidden)
        assert proposer.propose([request], [max_tokens]) == [wanted]


def test_a_history_beyond_the_limit_is_not_indexed_and_what_comes_after_is():
    proposer = NgramProposer()
    request = Request("r", [1, 2, 3, 4, *range(10, 10 + MAX_HISTORY), 1, 2])
    assert proposer.propose([request], [4]) == [[]]
    request.token_ids += [5, 1, 2]
    assert proposer.propose([request], [2]) == [[5, 1]]


def test_a_forgotten_request_leaves_no_history():
    proposer = NgramProposer()
    proposer.propose([Request("r", [1, 2, 3, 1, 2])], [1])
    proposer.forget("r")
    assert proposer.propose([Request("r", [9, 1, 2])], [1]) == [[]]


@pytest.mark.parametrize("num_blocks", [1, 12, 30, 60])
def test_a_small_draft_pool_costs_drafts_only_and_leaks_nothing(target, draft, expected, num_blocks):
    proposer, requests = DraftModelProposer(draft, target, num_blocks), requests_of(target)
    assert decode(target, requests, proposer) == expected
    assert (sum(len(guess) for r in requests for guess in r.drafts) > 0) == (num_blocks > 1)
    assert proposer.blocks.num_referenced == 0
    proposer.blocks.check_integrity()


@pytest.mark.parametrize("num_blocks", [30, 256])
def test_kv_that_the_draft_model_kept_gives_the_guesses_of_fresh_kv(target, draft, num_blocks):
    kept = DraftModelProposer(draft, target, num_blocks)
    sizes = set()

    class Compared:
        forget = kept.forget

        def propose(self, sequences, max_tokens):
            fresh = DraftModelProposer(draft, target, num_blocks=256).propose(sequences, max_tokens)
            guesses = kept.propose(sequences, max_tokens)
            assert all(guess in ([], whole) for guess, whole in zip(guesses, fresh, strict=True))
            sizes.update(len(guess) for guess in guesses)
            return guesses

    decode(target, requests_of(target), Compared(), num_tokens=20)
    assert {0, 4} <= sizes


def test_a_long_prompt_catches_up_in_chunks_while_others_get_their_drafts(target, monkeypatch):
    monkeypatch.setattr(speculation, "MAX_CHUNK_TOKENS", 16)
    proposer = DraftModelProposer(target, target, num_blocks=64)
    short, long = Request("short", [1, 2, 3]), Request("long", list(range(5, 45)))
    lengths = []
    for _ in range(5):
        drafts = proposer.propose([long, short], [2, 2])
        lengths.append([len(guess) for guess in drafts])
        short.token_ids += drafts[1]
    assert lengths == [[0, 2], [0, 2], [2, 2], [2, 2], [2, 2]]


def test_a_draft_that_was_not_used_is_made_again(target):
    proposer = DraftModelProposer(target, target, num_blocks=64)
    request = Request("r", list(range(5, 12)))
    (first,) = proposer.propose([request], [4])
    assert proposer.propose([request], [4]) == [first]
    request.token_ids += first[:2]
    assert proposer.propose([request], [2]) == [first[2:]]
    request.token_ids += [7, 8, 9, 7, 8, 9]
    fresh = DraftModelProposer(target, target, num_blocks=64)
    assert proposer.propose([request], [4]) == fresh.propose([request], [4])


def test_requests_with_media_and_beyond_the_context_get_no_draft(target):
    proposer = DraftModelProposer(target, target, num_blocks=256, placeholders=[290])
    with_media, too_long = Request("m", [1, 290, 290, 2]), Request("l", [1] * (target.max_model_len - 1))
    assert proposer.propose([with_media, too_long, Request("t", [1, 2])], [3, 3, 0]) == [[], [], []]
    assert proposer.blocks.num_referenced == 0


def test_two_vocabularies_are_refused_by_name(target):
    with pytest.raises(ConfigError, match=r"\(12 tokens\) and .* \(300 tokens\) .*same vocabulary"):
        DraftModelProposer(tiny_model(12, seed=0), target, num_blocks=4)
