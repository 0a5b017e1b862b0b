"""Which tokens of a prompt are scored, and that only requests that want it pay for it."""

from __future__ import annotations

import pytest

from cluster.engine.runner import _scores
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest, PromptWork
from cluster.engine.tables import register_computed, try_allocate_prompts
from cluster.engine.timing import Stopwatch
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import BlockHashes
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from tests.fakes.requests import make_item, make_request

SIZE = 4
TEXT, NEGATIVE = Prompt(tuple(range(10, 23))), Prompt(tuple(range(50, 59)))


def held(request: GenerateRequest, *, computes: bool = True) -> LanguageRequest:
    found = LanguageRequest(request, 0, 1.0, 0.0, Stopwatch(0.0), computes=computes, sends=False)
    for i, prompt in enumerate(request.prompts):
        found.add_prompt(TokenSequence(str(i), prompt, hashes=BlockHashes(prompt, SIZE)))
    return found


def asked(num_prompt_logprobs: int | None) -> GenerateRequest:
    return GenerateRequest(
        "r", TEXT, (SamplingParams(),), StopParams(4), Guidance(2.0, NEGATIVE),
        num_prompt_logprobs=num_prompt_logprobs,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("num_prompt_logprobs", "computes", "num_cached"),
    [(None, True, [12, 8]), (0, True, [0, 8]), (0, False, [12, 8])],
)
def test_a_prompt_that_is_scored_takes_no_cached_prefix(num_prompt_logprobs, computes, num_cached):
    """Where it is computed; where its KV arrives, only what is lacking travels."""
    blocks = BlockPool(32, SIZE)
    for _ in range(2):
        request = held(asked(num_prompt_logprobs), computes=computes)
        assert try_allocate_prompts(request, blocks, 0, ((), ()))
        found = [sequence.num_cached_tokens for sequence in request.sequences]
        for sequence in request.sequences:
            sequence.computed(sequence.num_missing_tokens)
            register_computed(sequence, blocks)
            blocks.free(sequence.block_table)
    assert found == num_cached


def test_text_behind_each_chunk_is_scored_and_media_is_not():
    request = held(make_request("r", 4, [make_item("x", 3)]))  # three of text, three of media, two of text
    main = request.main
    assert _scores(PromptWork(request, main, 4), 0, 4) is None  # the request does not want it
    scored = GenerateRequest("r", main.prompt, (SamplingParams(),), StopParams(4), num_prompt_logprobs=2)
    request = held(scored)
    told = []
    for start, end in ((0, 2), (2, 4), (4, 8)):
        scores = _scores(PromptWork(request, request.main, end - start), start, end)
        told.append(None if scores is None else (scores.rows, scores.targets, scores.num_top))
    assert told == [([0, 1], [101, 102], 2), None, ([1, 2], [103, 40], 2)]
    assert _scores(PromptWork(held(scored, computes=False), main, 4), 0, 4) is None  # its KV arrived
    guided = held(asked(2))
    assert _scores(PromptWork(guided, guided.sequences[1], 4), 0, 4) is None
