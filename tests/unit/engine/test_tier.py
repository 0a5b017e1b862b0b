"""Prompts whose KV comes back from the second tier: they are answered as if it had been computed, and it is
not. The runner checks every number that it reads."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cluster.kvcache.tier_slots import FileSlots, HostSlots
from cluster.types.media import MediaItem, PlacedMedia
from cluster.types.request import GenerateRequest, Prompt
from kv_transfer.lease.events import LateWrite
from tests.fakes.engines import Rig
from tests.fakes.kv_rows import BLOCK_SIZE, KV_LAYOUT
from tests.fakes.relay import Relay, cached_at
from tests.fakes.requests import LAST_PROMPT_TOKEN, make_item, make_request

LENGTH = 24  # tokens of a prompt: two of them fill the pool


def make_rig(folder: Path | None = None) -> Rig:
    """A prefill worker with little memory and a large tier."""
    size = KV_LAYOUT.block_bytes
    levels = [HostSlots(10_000, size) if folder is None else FileSlots(folder, 10_000, size)]
    return Rig(kv_blocks=13, decode_blocks=40, tier_levels=levels)


def prompt_of(number: int, name: str = "") -> GenerateRequest:
    request = make_request(name or f"r{number}", 5, max_tokens=3)
    return msgspec.structs.replace(
        request, prompt=Prompt((*range(1000 * number, 1000 * number + LENGTH - 1), LAST_PROMPT_TOKEN))
    )


def run(rig: Rig, relay: Relay, request: GenerateRequest) -> int:
    """How many tokens prefill computed for it."""
    computed = 0

    def count() -> None:
        nonlocal computed
        computed += sum(
            sequence.num_missing_tokens
            for each in rig.prefill.engine.requests.values()
            for sequence in each.sequences
            if sequence.num_computed_tokens == sequence.num_cached_tokens
        )

    rig.mid_step = count
    relay.start(request)
    relay.play()
    story = relay.stories[request.request_id]
    assert story.error is None and story.tokens == [50, 51, 52]
    return computed


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_evicted_prefix_comes_back_instead_of_being_computed(kind: str, tmp_path: Path) -> None:
    rig = make_rig(tmp_path if kind == "disk" else None)
    relay = Relay(rig)
    for number in range(4):
        assert run(rig, relay, prompt_of(number)) == LENGTH
    assert run(rig, relay, prompt_of(0, "again")) == BLOCK_SIZE
    load = rig.prefill.engine.load()
    assert load.tier.num_loaded == LENGTH // BLOCK_SIZE - 1
    assert load.tier.num_stored >= load.tier.num_loaded
    relay.finish()


def test_doors_count_kept_blocks_as_cached(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    relay, known = Relay(rig), cached_at(rig.prefill)
    for number in range(4):
        run(rig, relay, prompt_of(number))
    assert len(known) == 4 * LENGTH // BLOCK_SIZE > 13  # more than the pool has blocks
    relay.finish()


def test_a_damaged_file_is_computed_again(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    relay = Relay(rig)
    for number in range(4):
        run(rig, relay, prompt_of(number))
    file = tmp_path / "0.kv"
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    assert run(rig, relay, prompt_of(0, "again")) == LENGTH
    assert rig.prefill.engine.load().tier.num_corrupt >= 1
    relay.finish()


def test_a_request_may_leave_while_its_prefix_is_loaded() -> None:
    rig = make_rig()
    relay = Relay(rig)
    for number in range(4):
        run(rig, relay, prompt_of(number))
    run_one, rig.tier_executor.run_one = rig.tier_executor.run_one, lambda: None  # the tier's thread hangs
    relay.start(prompt_of(0, "left"))
    relay.start(prompt_of(0, "waits"))
    relay.play(10)
    assert rig.prefill.engine.load().num_waiting == 2
    relay.land("left")
    relay.play(10)
    rig.tier_executor.run_one = run_one
    relay.play()
    assert relay.stories["waits"].tokens == [50, 51, 52]
    assert rig.prefill.engine.load().tier.num_loaded == LENGTH // BLOCK_SIZE - 1  # once for both
    relay.finish()


def test_what_was_kept_before_a_late_write_is_not_used() -> None:
    rig = make_rig()
    relay = Relay(rig)
    for number in range(4):
        run(rig, relay, prompt_of(number))
    rig.prefill.tell(rig.prefill.engine.on_transfer, LateWrite("lease", (0,)), rig.clock.at)
    rig.turn(3)
    assert run(rig, relay, prompt_of(0, "again")) == LENGTH
    relay.finish()


def test_media_prompts_come_back_without_their_embeddings() -> None:
    rig = make_rig()
    relay = Relay(rig)
    items = [make_item("a", 5)]
    first = make_request("first", 9, items, max_tokens=3)
    for request in (first, prompt_of(1), prompt_of(2), msgspec.structs.replace(first, request_id="again")):
        relay.start(request, items if request.prompt.media else [])
        relay.play()
        assert relay.stories[request.request_id].is_over
    assert relay.stories["again"].tokens == relay.stories["first"].tokens
    assert rig.prefill.engine.load().tier.num_loaded > 0
    relay.finish()


def with_media(name: str, first_token: int) -> tuple[GenerateRequest, list[MediaItem]]:
    """Three blocks of text, an image of four, and one of text."""
    item, start = make_item(f"image {name}", 4 * BLOCK_SIZE), 3 * BLOCK_SIZE
    rows, end = [9] * 4 * BLOCK_SIZE, range(500, 499 + BLOCK_SIZE)
    ids = (*range(first_token, first_token + start), *rows, *end, LAST_PROMPT_TOKEN)
    placed = PlacedMedia(item.modality, item.media_hash, ((start, len(rows)),), item.geometry)
    return msgspec.structs.replace(make_request(name, 5, max_tokens=3), prompt=Prompt(ids, (placed,))), [item]


def test_media_that_waits_for_its_prefix_does_not_wait_for_a_younger_request() -> None:
    """There is room for one image and for the blocks of one of the prompts. If the younger request got blocks
    while the older one has the room, each would wait for the other."""
    rig = make_rig()
    relay = Relay(rig)
    for number in range(1, 5):
        run(rig, relay, prompt_of(number))
    run_one, rig.tier_executor.run_one = rig.tier_executor.run_one, lambda: None  # the tier's thread is slow
    relay.start(*with_media("older", 1000))  # begins as the first prompt does
    relay.start(*with_media("younger", 9000))
    relay.play(40)
    rig.tier_executor.run_one = run_one
    relay.play()
    for name in ("older", "younger"):
        assert relay.stories[name].tokens == [50, 51, 52] and relay.stories[name].error is None
    assert rig.prefill.engine.load().tier.num_loaded > 0
    relay.finish()
