"""The law of the house with changed logits: penalties, biases, bad words and log-probabilities are those of
`generate` with transformers' processors, whatever happens to the request."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch
import transformers as hf

from bench.workload import KINDS, Reference, make_cases
from cluster.ids import new_request_id
from cluster.types.request import GenerateRequest, Guidance, LogitChanges, Prompt, SamplingParams, StopParams
from router.api.app import build_api
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_law import MODEL, cluster_args
from tests.flow.text_models import BLOCK_SIZE, SIZES, draw_prompts, save_text_model

NUM_TOKENS = 32
CHANGES = LogitChanges(repetition_penalty=1.1, frequency_penalty=0.2, presence_penalty=0.3)
SCALE = 1.5
STOP = 77


class OpenAiPenalties(hf.LogitsProcessor):
    """transformers has none; OpenAI's formula."""

    def __init__(self, changes: LogitChanges, num_prompt_tokens: int):
        self._changes, self._start = changes, num_prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self._start :], minlength=scores.shape[1])
        changes = self._changes
        return scores - counts * changes.frequency_penalty - (counts > 0) * changes.presence_penalty


def generated(
    model: Any, inputs: dict[str, Any], changes: LogitChanges, **more: Any
) -> tuple[list[int], torch.Tensor]:
    """Tokens of the answer, and the raw log-probabilities at their positions, [tokens, V]."""
    start = inputs["input_ids"].shape[1]
    with torch.inference_mode():
        output = model.generate(
            **inputs,
            do_sample=False,
            repetition_penalty=changes.repetition_penalty,
            sequence_bias=[[[token_id], bias] for token_id, bias in changes.bias] or None,
            bad_words_ids=[list(word) for word in changes.bad_words] or None,
            logits_processor=hf.LogitsProcessorList([OpenAiPenalties(changes, start)]),
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
    return output.sequences[0, start:].tolist(), torch.cat(output.logits).log_softmax(-1)


# ------------------------------------------------------------------------------------ engines


async def drawn(cluster: LocalCluster, request: GenerateRequest) -> list[list[int]]:
    async def read(stream: Any) -> list[int]:
        return [token_id async for event in stream for token_id in event.token_ids]

    streams = cluster.door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0)))
    return await asyncio.gather(*map(read, streams))


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text_model(tmp_path_factory.mktemp("changed"), hf.Qwen2Config(**SIZES), seed=4)


@pytest.fixture(scope="module")
def asked(text_model: Path) -> list[tuple[GenerateRequest, list[int]]]:
    """Every other one is guided. Bad words and a bias are taken from the answer without them, so that they
    matter; the answer may stop behind 12 tokens."""
    model = hf.Qwen2ForCausalLM.from_pretrained(text_model, dtype=torch.float32).eval()
    pairs = []
    for i, prompt in enumerate(draw_prompts((5, 37, 16, 33))):
        ids, negative = torch.tensor([prompt]), torch.tensor([(*prompt[-1:], 7, 9)])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": NUM_TOKENS}
        guided = {"guidance_scale": SCALE, "negative_prompt_ids": negative} if i % 2 else {}
        before, _ = generated(model, inputs, CHANGES, **guided)
        changes = LogitChanges(
            bias=((before[3], -2.0), (STOP, 4.0)),
            repetition_penalty=CHANGES.repetition_penalty,
            frequency_penalty=CHANGES.frequency_penalty,
            presence_penalty=CHANGES.presence_penalty,
            bad_words=((before[1],), (before[5], before[6])),
        )
        stop = StopParams(NUM_TOKENS, (STOP,), 12)
        answer, _ = generated(
            model, inputs, changes, **guided, eos_token_id=STOP, min_new_tokens=12, pad_token_id=0
        )
        assert answer != before
        guidance = Guidance(SCALE, Prompt(tuple(negative[0].tolist()))) if guided else None
        pairs.append(
            (
                GenerateRequest("", Prompt(prompt), (SamplingParams(),) * 2, stop, guidance, changes=changes),
                answer,
            )
        )
    return pairs


async def test_changed_answers_equal_generate(text_model, asked):
    """Two choices each, with drafts, all at once in too few blocks: answers are preempted, and what is left
    of them is computed behind their own tokens."""
    args = cluster_args(24).model_copy(update={"model": str(text_model), "block_size": BLOCK_SIZE})
    decode = {"kv_blocks": 30, "speculation": {"method": "draft", "model": str(text_model)}}
    args = args.model_copy(update={"decode": type(args.decode).model_validate(decode)})
    requests = [msgspec.structs.replace(request, request_id=new_request_id()) for request, _ in asked]
    async with local_cluster(let_all_in(args), (0, 1, 1), overcommits=len(requests)) as cluster:
        got = await asyncio.gather(*(drawn(cluster, request) for request in requests))
        engine = cluster.decodes[0].engine
        assert engine.load().totals.num_preempted > 0 and engine.runner.num_accepted > 0
    assert got == [[answer] * 2 for _, answer in asked]


# ------------------------------------------------------------------------------------ HTTP

MAX_TOKENS = 12
FIELDS = {"temperature": 0, "max_tokens": MAX_TOKENS, "logprobs": True, "top_logprobs": 4}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.3}


async def whole_and_streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Text and log-probabilities of the answer, whole and put together."""
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text, content = "", []
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as lines:
        async for line in lines.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])["choices"][0]
                text += event["delta"].get("content", "")
                content += (event["logprobs"] or {"content": ()})["content"]
                said = "".join(each["token"] for each in content)
                assert said.removesuffix("<|im_end|>") == text
    return [
        {"text": choice["message"]["content"], "content": choice["logprobs"]["content"]},
        {"text": text, "content": content},
    ]


async def test_log_probabilities_equal_those_of_generate():
    """Of text and of every kind of media: the model's own, also where penalties decide what is drawn."""
    reference = Reference(MODEL)
    tokenizer = reference.processor.tokenizer
    cases = [case for case in make_cases(21, len(KINDS)) if case.kind in ("text", "image", "video", "audio")]
    async with local_cluster(cluster_args(48)) as cluster:
        transport = httpx.ASGITransport(build_api(cluster.door))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=120) as client:
            for i, case in enumerate(cases):
                changes = CHANGES if i % 2 else LogitChanges()
                inputs = {**reference.inputs(case), "max_new_tokens": MAX_TOKENS}
                token_ids, logprobs = generated(reference.model, inputs, changes)
                body = {"model": "demo", "messages": case.messages, **FIELDS, **(PENALTIES if i % 2 else {})}
                for got in await whole_and_streamed(client, body):
                    assert got["text"] == tokenizer.decode(token_ids, skip_special_tokens=True), case.kind
                    assert len(got["content"]) == len(token_ids)
                    for token_id, row, each in zip(token_ids, logprobs, got["content"], strict=True):
                        assert bytes(each["bytes"]).decode() == each["token"] == tokenizer.decode([token_id])
                        assert each["logprob"] == pytest.approx(float(row[token_id]), abs=1e-4)
                        top = [other["logprob"] for other in each["top_logprobs"]]
                        assert top == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
            question = {"role": "user", "content": "Repeat: go red"}  # an answer of several words
            await check_words(client, {"model": "demo", "messages": [question], **FIELDS})


async def check_words(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
    """A word of the answer is missing as a bad word; as a stop string it is there if that is wanted."""

    async def ask(**more: Any) -> dict[str, Any]:
        response = await client.post("/v1/chat/completions", json={**body, "return_token_ids": True, **more})
        return response.json()["choices"][0]

    answer = await ask()
    assert len(answer["token_ids"]) == len(answer["logprobs"]["content"])
    text = answer["message"]["content"]
    first, second, *_ = text.split()
    without = await ask(bad_words=[first])
    assert not without["message"]["content"].startswith(first)
    cut = await ask(stop=[second], include_stop_str_in_output=True)
    until = text[: text.index(second) + len(second)]  # of "one one" the first
    assert cut["message"]["content"] == until and cut["finish_reason"] == "stop"
    assert "".join(each["token"] for each in cut["logprobs"]["content"]).startswith(until)
