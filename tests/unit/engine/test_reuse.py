"""KV that a worker keeps under its hashes: prompts and answers are found again, and only what is missing
travels."""

from __future__ import annotations

import msgspec
import pytest

from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest
from cluster.engine.tables import try_allocate_prompts
from cluster.engine.timing import Stopwatch
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.hashing import BlockHashes
from cluster.types.request import GenerateRequest, Prompt
from tests.fakes.engines import DOOR, FEATURE_LAYOUT, Rig
from tests.fakes.kv_rows import BLOCK_SIZE, KV_LAYOUT
from tests.fakes.relay import Relay, cached_at
from tests.fakes.requests import make_item, make_request


def turn_after(request, answer, num_tokens, name):
    """The next turn of a conversation: prompt and answer so far, and new text."""
    token_ids = (*request.prompt.token_ids, *answer, *range(200, 200 + num_tokens))
    prompt = msgspec.structs.replace(request.prompt, token_ids=token_ids)
    return msgspec.structs.replace(request, request_id=name, prompt=prompt)


def num_blocks_sent(rig: Rig) -> float:
    return rig.prefill.transfer_engine.sent.raw_bytes / KV_LAYOUT.block_bytes


@pytest.mark.parametrize(("num_tokens", "lacked"), [(7, 0), (8, 1), (10, 1), (2, 1)])
def test_only_blocks_that_decode_lacks_travel(rig: Rig, relay: Relay, num_tokens: int, lacked: int) -> None:
    """Of prompts of 8, 9, 11 and 3 tokens; a prompt of whole blocks needs no byte at all."""
    relay.start(make_request("first", num_tokens, max_tokens=2))
    relay.play()
    before, spared = num_blocks_sent(rig), rig.decode.engine.load().received.spared_bytes
    relay.start(make_request("again", num_tokens, max_tokens=9))
    relay.play()
    assert relay.stories["again"].tokens == list(range(50, 59))
    assert num_blocks_sent(rig) - before == lacked
    num_full = (num_tokens + 1) // BLOCK_SIZE
    assert rig.decode.engine.load().received.spared_bytes - spared == num_full * KV_LAYOUT.block_bytes


@pytest.mark.parametrize("has_media", [False, True])
def test_the_next_turn_finds_prompt_and_answer_where_the_answer_was_generated(has_media: bool) -> None:
    rig = Rig(decode_blocks=40)
    relay = Relay(rig)
    items = [make_item("a", 5)] if has_media else []
    first = make_request("first", 9, items, max_tokens=12)
    story = relay.start(first, items)
    relay.play()
    before = num_blocks_sent(rig)
    second = turn_after(first, story.tokens, 3, "second")
    relay.start(second, items)
    relay.play()
    assert relay.stories["second"].is_over and relay.stories["second"].error is None
    num_kept = (len(first.prompt.token_ids) + len(story.tokens) - 1) // BLOCK_SIZE  # the last token has no KV
    assert num_blocks_sent(rig) - before == -(-len(second.prompt.token_ids) // BLOCK_SIZE) - num_kept
    relay.finish()


def test_a_turn_that_decode_computes_itself_begins_behind_the_last_answer(rig: Rig, relay: Relay) -> None:
    first = make_request("first", 5, max_tokens=11)
    story = relay.start(first, prefills_locally=True)
    relay.play()
    computed = []
    rig.mid_local_prefill = lambda: computed.append(rig.decode.engine.requests["second"].num_missing_tokens)
    second = turn_after(first, story.tokens, 2, "second")
    relay.start(second, prefills_locally=True)
    relay.play()
    assert computed == [len(second.prompt.token_ids) - 16]
    assert relay.stories["second"].is_over


@pytest.mark.parametrize("num_choices", [1, 2])
def test_decode_computes_a_turn_whose_images_it_has_and_nothing_travels(num_choices: int) -> None:
    rig = Rig(decode_blocks=60)
    relay = Relay(rig)
    items = [make_item("a", 5), make_item("b", 2)]
    first = make_request("first", 9, items, max_tokens=12)
    story = relay.start(first, items)
    relay.play()
    before = num_blocks_sent(rig)
    second = turn_after(first, story.tokens, 3, "second")
    second = msgspec.structs.replace(second, sampling=second.sampling * num_choices)
    relay.start(second, items, prefills_locally=True)
    relay.play()
    expected = second.prompt.token_ids[-1] + 1
    assert [line.token_ids[0] for line in relay.stories["second"].lines] == [expected] * num_choices
    assert relay.stories["second"].is_over and rig.ended == ["first", "second"]
    assert num_blocks_sent(rig) == before
    relay.finish()


def test_a_turn_whose_images_are_evicted_while_it_waits_is_encoded_again() -> None:
    rig = Rig(decode_blocks=14)
    relay = Relay(rig)
    items = [make_item("a", 5)]
    first = make_request("first", 9, items, max_tokens=5)
    story = relay.start(first, items)
    relay.play()
    holder = relay.start(make_request("holder", 30, max_tokens=20))  # 8 blocks, then 13
    relay.play(4)
    assert holder.tokens and holder.is_open
    second = turn_after(first, story.tokens, 20, "second")  # 10 blocks, of which 4 are cached
    relay.start(second, items, prefills_locally=True)
    relay.play(2)
    assert "second" in rig.decode.engine.requests, "it waits for blocks"
    relay.play()
    assert rig.ended == ["first", "holder", "second"]
    assert relay.stories["second"].is_over and relay.stories["second"].error is None
    assert len(rig.encoder_calls) == 1, "the encoder has it in its cache"
    assert rig.encoder.transfer_engine.sent.raw_bytes == 2 * 2 * FEATURE_LAYOUT.block_bytes
    relay.finish()


def test_choices_and_negative_prompts_are_kept_each_under_its_own_name() -> None:
    rig = Rig(decode_blocks=60)
    relay = Relay(rig)
    first = make_request("first", 6, max_tokens=12, num_choices=3, negative=5)
    relay.start(first)
    relay.play()
    before = num_blocks_sent(rig)
    relay.start(msgspec.structs.replace(first, request_id="again"))
    relay.play()
    assert [line.token_ids for line in relay.stories["again"].lines] == [list(range(50, 62))] * 3
    assert num_blocks_sent(rig) - before == 2  # the partly filled last blocks of both prompts
    relay.finish()


def test_coded_kv_is_not_exact_and_is_kept_for_nothing() -> None:
    rig = Rig(decode_blocks=40, codec="int8")
    relay = Relay(rig)
    for name in ("first", "again"):
        relay.start(make_request(name, 40, max_tokens=5))
        relay.play()
        assert relay.stories[name].tokens == [50, 51, 52, 53, 54]
    assert rig.decode.engine.load().num_cached_blocks == 0
    relay.finish()


def test_doors_hear_which_blocks_decode_has(rig: Rig, relay: Relay) -> None:
    known = cached_at(rig.decode)
    for number in range(6):
        prompt = Prompt(tuple(range(100 * number, 100 * number + 13)))
        request = msgspec.structs.replace(make_request(f"r{number}", 5, max_tokens=6), prompt=prompt)
        relay.start(request, prefills_locally=bool(number % 2))
        relay.play()
    assert known == set(rig.pools["decode"].content()) and known


def test_a_cached_block_that_is_evicted_while_its_request_waits_is_computed_again(
    rig: Rig, relay: Relay
) -> None:
    first = make_request("first", 11, max_tokens=2)
    relay.start(first)
    relay.play()
    large = msgspec.structs.replace(
        make_request("large", 30, max_tokens=2), prompt=Prompt(tuple(range(700, 736)))
    )
    relay.start(large)
    relay.start(msgspec.structs.replace(first, request_id="again"))
    relay.play(100)
    assert relay.stories["again"].tokens == relay.stories["first"].tokens == [50, 51]


def waiting(asked: GenerateRequest) -> LanguageRequest:
    request = LanguageRequest(asked, DOOR, 10.0, 0.0, Stopwatch(0.0), computes=True, sends=True)
    request.add_prompt(TokenSequence("r/0", asked.prompt, hashes=BlockHashes(asked.prompt, BLOCK_SIZE)))
    return request


def test_a_request_that_waits_does_not_take_its_cached_prefix_in_every_step() -> None:
    """Of 8 blocks 4 are cached, and 3 are held, of which one begins the prompt of 7 blocks, too."""
    pool = BlockPool(8, BLOCK_SIZE)
    asked = make_request("r", 7 * BLOCK_SIZE - 1)
    names = BlockHashes(asked.prompt, BLOCK_SIZE).hashes
    blocks = pool.allocate(5)
    for block_id, name in zip(blocks, names, strict=False):
        pool.register(block_id, name)
    pool.free(blocks[1:])
    others = pool.allocate(2)
    pool.note_cached()
    request = waiting(asked)
    assert not try_allocate_prompts(request, pool, 0, ((),)) and len(pool.take_cached()) == 4
    for _ in range(3):
        assert not try_allocate_prompts(request, pool, 0, ((),))
        assert not pool.take_cached(), "it is looked at, and not taken and freed again"
    pool.free(others[:1])
    assert try_allocate_prompts(request, pool, 0, ((),)) and request.main.num_cached_tokens == 5 * BLOCK_SIZE
    assert pool.num_free == 0
