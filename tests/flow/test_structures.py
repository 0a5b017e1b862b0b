"""Answers under a structure, from the whole cluster in one process: valid, and the same on every way
through it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from bench.schemas import schemas
from cluster.structure import masks
from router.api.app import build_api
from tests.fakes.structures import check_valid
from tests.fakes.workers import ManualExecutor
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_engine_features import with_decode
from tests.flow.test_law import cluster_args

NUM_SCHEMAS = 16  # more: tests/unit/structure/test_matcher.py, without a model; bench.structure
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "kind": {"enum": ["person", "thing", "place"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{2,6}$"}, "maxItems": 3},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
ASKED = {"messages": [{"role": "user", "content": "Describe a person."}], "max_tokens": 120}


def under(schema: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "strict": True, "schema": schema},
        }
    }


@asynccontextmanager
async def client_of(cluster: LocalCluster) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_api(cluster.door))
    async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
        yield client


async def ask(client: httpx.AsyncClient, **fields: Any) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    response = await client.post("/v1/chat/completions", json={"model": "demo", **ASKED, **fields})
    assert response.status_code == 200, response.text
    return [(choice["message"]["content"], choice["finish_reason"]) for choice in response.json()["choices"]]


async def streamed(client: httpx.AsyncClient, **fields: Any) -> str:
    body = {"model": "demo", "stream": True, **ASKED, **fields}
    response = await client.post("/v1/chat/completions", json=body)
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def compact(schema: Any) -> dict[str, Any]:
    return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}


async def check_schemas(client: httpx.AsyncClient) -> None:
    made = [schema for _, schema in schemas(NUM_SCHEMAS)]
    fields = [
        {"temperature": 1.0, "seed": seed, "max_tokens": 120, **compact(each)}
        for seed, each in enumerate(made)
    ]
    complete = [
        (schema, text)
        for schema, [(text, reason)] in zip(
            made, await asyncio.gather(*(ask(client, **each) for each in fields)), strict=True
        )
        if reason == "stop"
    ]
    for schema, text in complete:
        check_valid(schema, text)
    assert len(complete) >= 0.3 * NUM_SCHEMAS


async def check_combinations(client: httpx.AsyncClient) -> None:
    fields = {"temperature": 1.0, "seed": 4, **compact(PERSON)}
    several = await ask(client, n=3, **fields)
    guided = await ask(client, guidance_scale=1.5, negative_prompt="x", **fields)
    for text, reason in [*several, *guided]:
        assert reason == "stop"
        check_valid(PERSON, text)
    assert len({text for text, _ in several}) == 3
    assert await streamed(client, **fields) == several[0][0]
    ((text, reason),) = await ask(client, **under(PERSON) | {"max_tokens": 5})
    assert reason == "length" and text
    # Complete with the token that prefill draws, before any step of decode
    assert await ask(client, n=2, guided_choice=["."]) == [(".", "stop")] * 2
    ((text, reason),) = await ask(
        client, response_format={"type": "json_object"}, ignore_eos=True, max_tokens=40
    )
    assert reason == "length" or isinstance(json.loads(text), dict)


async def check_refusals(client: httpx.AsyncClient) -> None:
    for fields, param in (
        (under({"not": {}}), "response_format.json_schema.schema"),
        ({"guided_regex": "(unclosed"}, "guided_regex"),
        ({**under(PERSON), "min_tokens": 5}, "min_tokens"),
    ):
        body = {"model": "demo", **ASKED, **fields}
        for stream in (False, True):
            response = await client.post("/v1/chat/completions", json={**body, "stream": stream})
            assert response.status_code == 400 and response.json()["error"]["param"] == param


async def test_answers_keep_to_their_structure_whatever_else_is_asked_for():
    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        assert (await ask(client, max_tokens=10))[0][0][:1] != "{"
        await check_schemas(client)
        await check_combinations(client)
        await check_refusals(client)


async def test_answers_are_the_same_with_drafts_and_behind_a_preemption():
    fields = [{"temperature": 1.0, "seed": seed, "n": 2, **compact(PERSON)} for seed in range(4)]
    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        wanted = await asyncio.gather(*(ask(client, **each) for each in fields))
    drafts = {"method": "ngram", "num_speculative_tokens": 4}
    async with (
        local_cluster(
            let_all_in(with_decode(cluster_args(64), kv_blocks=20, speculation=drafts)),
            overcommits=len(fields),
        ) as cluster,
        client_of(cluster) as client,
    ):
        got = await asyncio.gather(*(ask(client, **each) for each in fields))
        assert got == wanted
        totals = cluster.decodes[0].engine.load().totals
        assert totals.num_preempted and totals.num_accepted


class Held:
    """In place of the thread that fills masks. While `holds`, jobs wait for `run_one`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.holds = False
        self.manual, self._thread = ManualExecutor(), ThreadPoolExecutor(1)
        made = masks.ThreadPoolExecutor
        monkeypatch.setattr(
            masks,
            "ThreadPoolExecutor",
            lambda num, name, *_: self if name == "masks" else made(num, name, *_),
        )

    def submit(self, function: Any, *args: Any) -> Any:
        return (self.manual if self.holds else self._thread).submit(function, *args)

    def shutdown(self, **options: Any) -> None:
        self._thread.shutdown(**options)


async def test_answers_are_the_same_when_masks_are_late(monkeypatch: pytest.MonkeyPatch):
    """They are filled when the step has taken what there is, however fast the machine is."""
    fields = [{"temperature": 1.0, "seed": seed, "n": 2, **compact(PERSON)} for seed in range(3)]
    held, take, late = Held(monkeypatch), masks.MaskFiller.take, []

    def taken(filler: masks.MaskFiller) -> Any:
        result = take(filler)
        late.extend(result[1])
        while held.manual.jobs:
            held.manual.run_one()
        return result

    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        wanted = await asyncio.gather(*(ask(client, **each) for each in fields))
        monkeypatch.setattr(masks.MaskFiller, "take", taken)
        monkeypatch.setattr(masks, "GRACE_S", 0.0)
        held.holds = True
        late.clear()
        assert await asyncio.gather(*(ask(client, **each) for each in fields)) == wanted
        assert late


async def test_other_answers_go_on_while_a_mask_is_filled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(masks, "GRACE_S", 0.0)
    held = Held(monkeypatch)
    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        held.holds = True
        slow = asyncio.create_task(ask(client, guided_regex="[a-z]{3}"))
        while not held.manual.jobs:
            await asyncio.sleep(0.01)
        assert (await ask(client, max_tokens=40))[0][0] and not slow.done()
        assert len(held.manual.jobs) == 1  # no step has it again
        held.holds = False
        held.manual.run_one()
        ((text, reason),) = await slow
        assert len(text) == 3 and reason == "stop"


def called(schema: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "order", "parameters": schema, **fields}
    return {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": 1,
    }


async def test_tools_that_are_not_strict_may_have_any_schema():
    kinds = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2}
    code = {"type": "string", "pattern": "^(?!x)[a-z]+$", "maxLength": 3}
    schema = {
        "type": "object",
        "properties": {"kinds": kinds, "code": code},
        "required": ["kinds", "code"],
        "additionalProperties": False,
    }
    wrong = {"type": "object", "patternProperties": [3]}
    async with local_cluster(cluster_args(64)) as cluster, client_of(cluster) as client:
        body = {"model": "demo", **ASKED, **called(schema)}
        response = await client.post("/v1/chat/completions", json=body)
        (call,) = response.json()["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert set(arguments["kinds"]) <= {"a", "b"} and len(arguments["code"]) <= 3
        for fields in (called(schema, strict=True), called(wrong), called(wrong, strict=True)):
            refused = await client.post("/v1/chat/completions", json={"model": "demo", **ASKED, **fields})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == "tools[0].function.parameters"
