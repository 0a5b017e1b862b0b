"""Log-probabilities of a prompt's tokens equal the whole model's in fp32: with every chunk size and topology,
cached or not, for text and media, in the form of both endpoints; and each choice is told them once, whatever
happens to the request."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
import torch

from bench.workload import KINDS, Case, Reference, make_cases
from cluster.ids import new_request_id
from cluster.types.messages import TokenEvent
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from router.api.app import build_api
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MODEL, cluster_args

TEXTS = ["Where is the größte red circle? 圆 <|im_end|> It is", "a", "one two three four five six seven"]
NUM_TOP = 3


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL)


def logprobs_of(reference: Reference, inputs: dict[str, Any]) -> torch.Tensor:
    """[tokens, V]: of what follows each token."""
    with torch.inference_mode():
        return reference.model(**inputs).logits[0].float().log_softmax(-1)


@pytest.fixture(scope="module")
def texts(reference: Reference) -> list[tuple[list[int], torch.Tensor]]:
    """Tokens and what the model gives behind them."""
    found = []
    for text in TEXTS:
        ids = reference.processor.tokenizer.encode(text)
        given = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        }
        found.append((ids, logprobs_of(reference, given)))
    return found


@pytest.fixture(scope="module")
def media(reference: Reference) -> list[tuple[Case, list[int], torch.Tensor]]:
    cases = [case for case in make_cases(21, len(KINDS)) if case.kind in ("image", "video", "audio")]
    given = [reference.inputs(case) for case in cases]
    return [
        (case, inputs["input_ids"][0].tolist(), logprobs_of(reference, inputs))
        for case, inputs in zip(cases, given, strict=True)
    ]


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> dict[str, Any]:
    response = await client.post(path, json={"model": "demo", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


def check_echo(reference: Reference, choice: dict[str, Any], ids: list[int], expected: torch.Tensor) -> None:
    """As lm-eval-harness reads it: what was asked first, then what was generated."""
    told, tokenizer = choice["logprobs"], reference.processor.tokenizer
    assert choice["text"].startswith(tokenizer.decode(ids))
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    for i, token_id in enumerate(ids[1:], 1):
        row = expected[i - 1]
        assert told["token_logprobs"][i] == pytest.approx(float(row[token_id]), abs=1e-4)
        best = max(told["top_logprobs"][i], key=told["top_logprobs"][i].get)
        assert best == told["tokens"][i] or int(row.argmax()) != token_id
        assert told["top_logprobs"][i][best] == pytest.approx(float(row.max()), abs=1e-4)
    places = list(zip(told["tokens"], told["text_offset"], strict=True))[: len(ids)]
    whole = [(token, at) for token, at in places if not token.startswith("bytes:")]
    assert whole and all(choice["text"][at:].startswith(token) for token, at in whole)


def check_told(told: list[dict[str, Any] | None], ids: list[int], expected: torch.Tensor) -> None:
    """In vLLM's form. What stands for media has no text, and no log-probability."""
    assert told[0] is None and len(told) == len(ids)
    config = json.loads((MODEL / "config.json").read_text())
    shown = {config[f"{kind}_token_index"] for kind in ("image", "video", "audio")}
    for i, (token_id, entry) in enumerate(zip(ids, told, strict=True)):
        assert (entry is None) == (i == 0 or token_id in shown)
        if entry is not None:
            row = expected[i - 1]
            (first, own), *_ = entry.items()
            assert int(first) == token_id and own["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
            best = min(entry.values(), key=lambda each: each["rank"] or 99)
            assert best["rank"] == 1 and best["logprob"] == pytest.approx(float(row.max()), abs=1e-4)
            assert len(entry) in (NUM_TOP, NUM_TOP + 1)


WORKERS = [
    pytest.param((1, 1, 1), 16, id="E/P/D in chunks"),
    pytest.param((1, 0, 0, 1), 4096, id="E/PD"),
    pytest.param((0, 0, 0, 0, 0, 1), 48, id="EPD"),
]


@pytest.mark.parametrize(("num_replicas", "max_batch_tokens"), WORKERS)
async def test_they_equal_those_of_the_whole_model(reference, texts, media, num_replicas, max_batch_tokens):
    """Twice: prompts are cached then."""
    prompts = [ids for ids, _ in texts]
    fields = {"echo": True, "logprobs": 1, "max_tokens": 1, "n": 2, "seed": 3}
    async with local_cluster(cluster_args(max_batch_tokens), num_replicas) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            for some in (media if num_replicas[1] else media[:1], media[:1]):
                got = await post(client, "/v1/completions", prompt=prompts, **fields)
                for i, choice in enumerate(got["choices"]):
                    check_echo(reference, choice, *texts[i // 2])
                    assert len(choice["logprobs"]["tokens"]) == len(texts[i // 2][0]) + 1
                for case, ids, expected in some:
                    body = {"messages": case.messages, "max_tokens": 2, "prompt_logprobs": NUM_TOP}
                    got = await post(client, "/v1/chat/completions", **body)
                    check_told(got["prompt_logprobs"], ids, expected)
                    assert got["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            await check_forms(client, reference, *texts[0])


async def check_forms(
    client: httpx.AsyncClient, reference: Reference, ids: list[int], expected: torch.Tensor
) -> None:
    """Of a text: streamed, without an answer, apart from it, and echoed alone."""
    fields = {"prompt": TEXTS[0], "echo": True, "logprobs": 1}
    whole = (await post(client, "/v1/completions", **fields, max_tokens=3))["choices"][0]
    streamed: dict[str, Any] = {"text": "", "logprobs": {name: [] for name in whole["logprobs"]}}
    async with client.stream(
        "POST",
        "/v1/completions",
        json={"model": "demo", "temperature": 0, "max_tokens": 3, **fields, "stream": True},
    ) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])["choices"][0]
                streamed["text"] += event["text"]
                for name, values in (event["logprobs"] or {}).items():
                    streamed["logprobs"][name] += values
    assert {name: whole[name] for name in streamed} == streamed
    check_echo(reference, whole, ids, expected)
    told = await post(
        client, "/v1/completions", **{**fields, "logprobs": None}, max_tokens=0, prompt_logprobs=NUM_TOP
    )
    choice = told["choices"][0]
    assert choice["text"] == TEXTS[0] and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert told["usage"]["completion_tokens"] == 0 and told["usage"]["prompt_tokens"] == len(ids)
    check_told(choice["prompt_logprobs"], ids, expected)
    scored = await post(client, "/v1/completions", **fields, max_tokens=0)
    check_echo(reference, scored["choices"][0], ids, expected)
    assert len(scored["choices"][0]["logprobs"]["tokens"]) == len(ids)
    echoed = (await post(client, "/v1/completions", prompt=TEXTS[0], echo=True, max_tokens=3))["choices"][0]
    assert echoed["text"] == whole["text"] and echoed["logprobs"] is None


async def events_of(cluster: LocalCluster, request: GenerateRequest) -> list[list[TokenEvent]]:
    async def read(stream: Any) -> list[TokenEvent]:
        return [event async for event in stream]

    streams = cluster.door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0)))
    return await asyncio.gather(*map(read, streams))


async def test_each_choice_is_told_once_also_if_its_answer_is_preempted(texts):
    """Four requests of two choices, guided ones among them, in too few blocks."""
    ids, expected = texts[0]
    args = cluster_args(16)
    args = args.model_copy(update={"decode": args.decode.model_copy(update={"kv_blocks": 24})})
    requests = [
        GenerateRequest(
            new_request_id(),
            Prompt(tuple(ids)),
            (SamplingParams(),) * 2,
            StopParams(48),
            Guidance(1.5, Prompt((7, 9))) if i % 2 else None,
            num_prompt_logprobs=1,
        )
        for i in range(4)
    ]
    async with local_cluster(let_all_in(args), (0, 1, 1), overcommits=len(requests)) as cluster:
        got = await asyncio.gather(*(events_of(cluster, request) for request in requests))
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
    for first, *rest in (events for choices in got for events in choices):
        values = [each.drawn for each in first.prompt_logprobs]
        assert values == pytest.approx(expected[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-4)
        assert rest and not any(event.prompt_logprobs for event in rest)
