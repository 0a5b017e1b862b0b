"""What media may cost, what is done when it is bad or encoders are behind, and who may share it: over HTTP,
and clients are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import httpx
import msgspec
import pytest

from bench.workload import data_uri, png_bytes
from deploy.demo_model.training.media import jpeg_bytes
from tests.contract.fetch_host import MediaHost, answer
from tests.flow.local_cluster import HANG_S, LocalCluster
from tests.flow.media_client import (
    Part,
    ask,
    asked,
    check,
    clip_part,
    notes_of,
    num_cached_tokens,
    num_prompt_tokens,
    part,
    picture,
    picture_part,
    post,
    refusal,
    serving,
    text_of,
)
from tests.flow.media_reference import MediaReference
from tests.flow.test_law import MAX_TOKENS, MODEL
from tests.flow.test_media_crowd import Gate, gate

pytestmark = pytest.mark.asyncio(loop_scope="module")


def num_encoded(cluster: LocalCluster) -> int:
    return cluster.encoders[0].encoder.engine.load().encoded.num_encoded


@pytest.fixture(scope="module")
def reference() -> MediaReference:
    return MediaReference(MODEL)


# What it may cost


async def test_reduced_media_is_told_with_honest_numbers_and_frames_go_before_pixels(served):
    parts = [clip_part(16), picture_part(6)]
    _, client = served
    whole = await ask(client, parts)
    assert not notes_of(whole)
    fewer = await ask(client, parts, max_media_tokens=150)
    (clip,) = notes_of(fewer)
    assert (clip["item"], clip["modality"], clip["reason"]) == (0, "video", "budget")
    assert clip["num_frames"] < 16 and "max_pixels" not in clip
    num_words = num_prompt_tokens(fewer) - clip["num_tokens"] - 64
    assert 100 <= clip["num_tokens"] + 64 <= 150
    assert num_prompt_tokens(whole) == num_words + 8 * 16 + 64

    least = await ask(client, parts, max_media_tokens=40)
    clip, still = notes_of(least)
    assert clip["num_frames"] == 4 and still["modality"] == "image" and "num_frames" not in still
    assert num_prompt_tokens(least) == num_words + clip["num_tokens"] + still["num_tokens"] <= num_words + 40


async def test_a_reduced_answer_is_the_answer_to_what_the_notes_say(served):
    parts = [clip_part(16, 2), picture_part(7)]
    _, client = served
    fewer = await ask(client, parts, max_media_tokens=130)
    (note,) = notes_of(fewer)
    by_hand = await ask(client, parts, media_io_kwargs={"video": {"max_frames": note["num_frames"]}})
    assert not notes_of(by_hand)
    assert text_of(by_hand) == text_of(fewer) and by_hand["usage"]["prompt_tokens"] == num_prompt_tokens(
        fewer
    )


async def test_media_that_must_stay_exact_is_refused_when_it_costs_too_much(served):
    parts = [picture_part(8), picture_part(9)]
    cluster, client = served
    before = num_encoded(cluster)
    error = await refusal(client, parts, max_media_tokens=127, exact_media=True)
    assert error["code"] == "context_length_exceeded" and "128 tokens" in error["message"]
    got = await ask(client, parts, max_media_tokens=128, exact_media=True)
    assert not notes_of(got) and num_encoded(cluster) == before + 2
    error = await refusal(client, parts, max_media_tokens=3)
    assert error["code"] == "context_length_exceeded", "two rows are too few for two images"


async def test_media_that_overflows_the_context_is_reduced_and_answered():
    parts = [picture_part(seed) for seed in range(8)]  # 512 rows
    async with serving(max_model_len=400) as (_, client):
        got = await ask(client, parts, ignore_eos=True)
        assert [note["item"] for note in notes_of(got)] == list(range(8))
        assert got["usage"]["total_tokens"] <= 400 and num_prompt_tokens(got) > 200
        error = await refusal(client, parts, exact_media=True)
        assert error["code"] == "context_length_exceeded" and "512 tokens" in error["message"]


@pytest.mark.parametrize("size", [(768, 1024), (60, 1000)])
async def test_a_photograph_much_larger_than_the_model_sees_can_be_reduced(served, size):
    _, client = served
    whole = await ask(client, [picture_part(10, *size)])
    got = await ask(client, [picture_part(10, *size)], max_media_tokens=20)
    (note,) = notes_of(got)
    assert 8 <= note["num_tokens"] <= 20 and note["max_pixels"] < 128 * 128
    assert num_prompt_tokens(got) < num_prompt_tokens(whole)


async def test_the_operators_caps_hold_for_everybody():
    async with serving(max_tokens=50, max_items=2) as (_, client):
        got = await ask(client, [picture_part(1), picture_part(2)], max_media_tokens=500)
        assert sum(note["num_tokens"] for note in notes_of(got)) <= 50 and len(notes_of(got)) == 2
        error = await refusal(client, [picture_part(seed) for seed in range(3)])
        assert error["code"] == "invalid_value" and "3 media items; at most 2" in error["message"]
        error = await refusal(client, [picture_part(1)], exact_media=True)
        assert error["code"] == "context_length_exceeded"


# What is done when it is bad


def bad_parts(host: MediaHost) -> list[Part]:
    whole = jpeg_bytes(picture(11), 90)
    return [
        part("image", data_uri("image/jpeg", whole[: len(whole) // 2])),  # the header is whole
        part("video", data_uri("video/mp4", png_bytes(picture(12)))),
        part("image", host.url("/none")),
    ]


async def test_bad_items_are_left_out_and_named_where_the_client_prefers_that(reference):
    good = picture_part(13)
    expected = reference.answer(asked(good, images=(picture(13),)), MAX_TOKENS)
    async with MediaHost() as host, serving(fetch={"internal_hosts": [host.at]}) as (cluster, client):
        first, second, third = bad_parts(host)
        got = await ask(client, [first, second, good, third], on_media_error="omit")
        check(got, expected)
        assert [(note["item"], note["modality"], note["reason"]) for note in notes_of(got)] == [
            (0, "image", "error"), (1, "video", "error"), (3, "image", "error"),
        ]  # fmt: skip
        for note in notes_of(got):
            assert note["error"].startswith(f"item {note['item']} ({note['modality']}): ")
        for bad in (first, second, third):
            for fields in ({}, {"on_media_error": "refuse"}):
                error = await refusal(client, [good, bad], **fields)
                assert error["code"] == "invalid_media" and error["message"].startswith("item 1 (")
            await cluster.audit()


async def test_a_request_whose_items_are_all_bad_is_answered_from_its_words(reference):
    async with MediaHost() as host, serving(fetch={"internal_hosts": [host.at]}) as (cluster, client):
        got = await ask(client, bad_parts(host), on_media_error="omit")
        check(got, reference.answer(asked(), MAX_TOKENS))
        assert [note["item"] for note in notes_of(got)] == [0, 1, 2]
        assert num_encoded(cluster) == 0


# When encoders are behind


async def first_held(held: Gate, request: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Send the request, and go on once the encoder is held with its item: it reports no load from now on."""
    sent = asyncio.ensure_future(request)
    assert await asyncio.to_thread(held.has_first.wait, HANG_S)
    return sent


async def queued(cluster: LocalCluster, request: Coroutine[Any, Any, Any]) -> asyncio.Future[Any]:
    """Send the request, and go on once it counts as work of an encoder."""
    before = cluster.door.num_running
    sent = asyncio.ensure_future(request)
    async with asyncio.timeout(HANG_S):
        while cluster.door.num_running <= before:
            assert not sent.done(), sent.result()
            await asyncio.sleep(0.002)
    return sent


async def first_chunk(response: httpx.Response) -> dict[str, Any]:
    lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line[6:]) for line in lines]
    assert not any("media" in chunk for chunk in chunks[1:])
    return chunks[0]


async def test_new_media_is_reduced_while_encoders_are_behind_and_the_client_is_told():
    async with serving(lets_all_in=True, reduce_from_queued_rows=40) as (cluster, client):
        with gate(cluster) as held:
            waiting = await first_held(held, ask(client, [picture_part(20)]))
            new = await queued(cluster, ask(client, [picture_part(21)]))
            streamed = await queued(cluster, post(client, [picture_part(22)], stream=True))
            exact = await queued(cluster, ask(client, [picture_part(23)], exact_media=True))
            same = await queued(cluster, ask(client, [picture_part(20), picture_part(24)]))
            held.let_through(100)
            whole, got, untouched, mixed = await asyncio.gather(waiting, new, exact, same)
            chunk = await first_chunk(await streamed)
        assert not notes_of(whole) and not notes_of(untouched)
        assert [note["item"] for note in notes_of(mixed)] == [1], "the encoder has the other item"
        for (note,), least in ((notes_of(got), 16), (notes_of(mixed), 1), (notes_of(chunk), 1)):
            assert note["reason"] == "load" and least <= note["num_tokens"] <= 64 * 40 / 64
        assert num_prompt_tokens(got) == num_prompt_tokens(whole) - 64 + notes_of(got)[0]["num_tokens"]
        await cluster.audit()
        assert not notes_of(await ask(client, [picture_part(25)])), "nobody waits any more"


async def test_a_queue_reduces_nothing_unless_the_operator_says_so():
    async with serving(lets_all_in=True) as (cluster, client):
        with gate(cluster) as held:
            first = await first_held(held, ask(client, [picture_part(30)]))
            second = await queued(cluster, ask(client, [picture_part(31)]))
            held.let_through(2)
            assert not any(notes_of(got) for got in await asyncio.gather(first, second))


# Who may share it


def key(name: str) -> dict[str, Any]:
    return {"headers": {"authorization": f"Bearer {name}"}}


async def test_tenants_share_no_embeddings_and_no_kv_of_their_media(served):
    cluster, client = served
    before = num_encoded(cluster)
    whole = await ask(client, [picture_part(40)], **key("one"))
    assert num_encoded(cluster) == before + 1
    again = await ask(client, [picture_part(40)], **key("one"))
    assert num_encoded(cluster) == before + 1 and num_cached_tokens(again) >= 64
    other = await ask(client, [picture_part(40)], **key("two"))
    assert num_encoded(cluster) == before + 2 and num_cached_tokens(other) < 16
    keyless = await ask(client, [picture_part(40)])
    assert num_encoded(cluster) == before + 3 and num_cached_tokens(keyless) < 16
    assert {text_of(got) for got in (again, other, keyless)} == {text_of(whole)}


async def test_one_tenants_crowd_shares_one_encode_and_two_tenants_need_two(served):
    cluster, client = served
    clip, before = clip_part(8, 3), num_encoded(cluster)
    await asyncio.gather(*(ask(client, [clip], **key(name)) for name in ("one", "two") * 6))
    assert num_encoded(cluster) == before + 2


async def test_a_url_is_read_once_for_each_tenant():
    async with MediaHost({"/": answer(png_bytes(picture(41)), cache_control="max-age=60")}) as host:
        async with serving(fetch={"internal_hosts": [host.at]}) as (_, client):
            for name in ("one", "one", "two"):
                await ask(client, [part("image", host.url("/"))], **key(name))
        assert len(host.requests) == 2


@pytest.mark.parametrize("shares_caches", [False, True])
async def test_usage_tells_no_tenant_what_another_has_sent(shares_caches: bool):
    """Text, an image, and a raw prompt: what a tenant repeats is cached, what another has sent is not, unless
    the operator wants it."""
    async with serving() as (cluster, client):
        door = cluster.door
        door.limits = msgspec.structs.replace(door.limits, shares_caches=shares_caches)
        cluster.let_prefill_locally(lambda _: False)
        raw = {"model": "demo", "prompt": "red circle " * 20, "max_tokens": 1}
        cached = []
        for name in ("one", "one", "two"):
            response = await client.post("/v1/completions", json=raw, **key(name))
            seen = num_cached_tokens(response.json())
            cached.append((num_cached_tokens(await ask(client, [picture_part(43)], **key(name))), seen))
        assert cached[0] == (0, 0) and min(cached[1]) > 0
        assert cached[2] == (cached[1] if shares_caches else (0, 0))


async def test_a_salt_separates_caches():
    async with serving() as (cluster, client):
        cluster.let_prefill_locally(
            lambda _: False
        )  # all in prefill's cache, however fast workers seem to be
        cached = [
            num_cached_tokens(await ask(client, [picture_part(42)], cache_salt=salt))
            for salt in ("a", "a", "b", "b")
        ]
        unsalted = num_cached_tokens(await ask(client, [picture_part(42)]))
        assert cached[0] == cached[2] == unsalted == 0 and cached[1] == cached[3] >= 64
        body = {"model": "demo", "prompt": "red circle " * 20, "max_tokens": 1}
        words = []
        for salt in ("a", "a", "b"):
            response = await client.post("/v1/completions", json=body | {"cache_salt": salt})
            words.append(num_cached_tokens(response.json()))
        assert words[0] == words[2] == 0 < words[1]
