"""`python -m bench.engine agree`: greedy answers of every server against transformers' `generate` in float32.

Weights are random, so near-ties are common: in bfloat16 a correct server may deviate from the reference after
some tokens. An answer whose first token already differs is wrong.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from bench.client import ChatRequest, Endpoint, TimedAnswer, ask, open_session
from bench.engine.models import VISION_MODEL
from bench.engine.prompts import Message, Prompts, user
from bench.engine.rows import IMAGE_SIDE
from bench.engine.servers import Setup, make_plan, running

NUM_PROMPTS, NUM_TOKENS = 5, 16


def agree(setup: Setup, model: str, servers: Sequence[str], seed: int) -> int:
    """Prints every answer. Returns 1 if a server's first token differs from the reference's for more than one
    prompt.
    """
    messages = make_messages(Prompts(seed), model)
    expected = reference_answers(setup.models / model, messages)
    status = 0
    for name in servers:
        with running(make_plan(setup, name, model)) as server:
            records = asyncio.run(_ask_all(server.endpoint, messages))
        shared = [shared_prefix(record.text, text) for record, text in zip(records, expected, strict=True)]
        for record, text, ratio in zip(records, expected, shared, strict=True):
            print(f"{name}: {ratio:4.0%} {record.failure or record.text!r}\n{'reference':>16} {text!r}")
        identical = sum(record.text == text for record, text in zip(records, expected, strict=True))
        print(
            f"{name}: {identical} of {len(messages)} identical, {sum(shared) / len(shared):.0%} shared",
            flush=True,
        )
        status |= sum(ratio == 0 for ratio in shared) > 1
    return status


def make_messages(prompts: Prompts, model: str) -> list[list[Message]]:
    if model == VISION_MODEL:
        media = [[prompts.image(IMAGE_SIDE, "agree", idx)] for idx in range(NUM_PROMPTS)]
    else:
        media = [[] for _ in range(NUM_PROMPTS)]
    return [[user(prompts.text(32, "agree", idx), *media[idx])] for idx in range(NUM_PROMPTS)]


async def _ask_all(endpoint: Endpoint, messages: Sequence[list[Message]]) -> list[TimedAnswer]:
    async with open_session() as session:
        return [await ask(session, endpoint, ChatRequest(each, NUM_TOKENS, "agree")) for each in messages]


def shared_prefix(text: str, expected: str) -> float:
    """Number of leading characters in common / number of expected characters."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, expected, strict=False))
    return sum(1 for _ in same) / max(1, len(expected))


def reference_answers(folder: Path, messages: Sequence[list[Message]]) -> list[str]:
    """Greedy answers of the undivided model in float32, as long as those of the servers."""
    from cluster.media.torchvision_compat import ensure_torchvision

    ensure_torchvision()  # must run before transformers is imported
    import torch
    import transformers

    has_vision = folder.name == VISION_MODEL
    family = transformers.AutoModelForImageTextToText if has_vision else transformers.AutoModelForCausalLM
    processor = (transformers.AutoProcessor if has_vision else transformers.AutoTokenizer).from_pretrained(
        folder
    )
    model = family.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for each in messages:
        inputs = _inputs(processor, each)
        with torch.inference_mode():
            output = cast(Any, model).generate(
                **inputs, max_new_tokens=NUM_TOKENS, min_new_tokens=NUM_TOKENS, do_sample=False
            )
        new_ids = output[0, inputs["input_ids"].shape[1] :]
        answers.append(getattr(processor, "tokenizer", processor).decode(new_ids, skip_special_tokens=True))
    return answers


def _inputs(processor: Any, messages: list[Message]) -> Any:
    content = messages[0]["content"]
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    if isinstance(content, str):
        return processor([prompt], return_tensors="pt")
    from PIL import Image

    file = base64.b64decode(content[0]["image_url"]["url"].partition(",")[2])
    return processor(text=[prompt], images=[Image.open(io.BytesIO(file))], return_tensors="pt")
