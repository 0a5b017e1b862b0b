"""Folders of random text models with the demo model's tokenizer, which the door wants; what `generate` and a
cluster answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from cluster.ids import new_request_id
from cluster.kvcache.hashing import block_hashes
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.types.structure import Structure
from router.dispatcher import TokenStream
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.flow.local_cluster import LocalCluster
from tests.flow.test_law import MODEL

BLOCK_SIZE, WINDOW = 8, 32
GREEDY = SamplingParams()
SIZES = {
    "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3, "eos_token_id": None,
    "bos_token_id": None,
}  # fmt: skip


def save_text_model(folder: Path, config: hf.PretrainedConfig, seed: int) -> Path:
    torch.manual_seed(seed)
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def save_mistral(folder: Path, window: int | None) -> Path:
    """Looks back `window` tokens, or to the beginning."""
    return save_text_model(folder, hf.MistralConfig(**SIZES, sliding_window=window), seed=6)


def draw_prompts(lengths: Sequence[int]) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(8)
    return [tuple(torch.randint(5, 900, (length,), generator=draw).tolist()) for length in lengths]


def generated(folder: Path, prompts: Sequence[tuple[int, ...]], num_tokens: int) -> list[list[int]]:
    """What transformers answers, greedily."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return generated_by(model, prompts, num_tokens)


def generated_by(
    model: Any, prompts: Sequence[tuple[int, ...]], num_tokens: int, **options: Any
) -> list[list[int]]:
    """options: of `generate`."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False,
                **options,
            )  # fmt: skip
        answers.append(output[0, len(prompt) :].tolist())
    return answers


async def answers(
    cluster: LocalCluster,
    prompt: tuple[int, ...],
    num_tokens: int,
    sampling: SamplingParams = GREEDY,
    num_choices: int = 1,
    on_event: Callable[[], None] = lambda: None,
    adapter: str = "",
    structure: Structure | None = None,
) -> list[list[int]]:
    """Of all choices. adapter: its digest. Who is cancelled leaves nothing open."""

    async def read(stream: TokenStream) -> list[int]:
        token_ids: list[int] = []
        async for event in stream:
            token_ids += event.token_ids
            on_event()
        return token_ids

    stop = StopParams(num_tokens)
    prompted = Prompt(prompt, adapter=adapter)
    request = GenerateRequest(
        new_request_id(), prompted, (sampling,) * num_choices, stop, structure=structure
    )
    hashes = block_hashes(prompted, BLOCK_SIZE)
    streams = cluster.door.dispatcher.generate(ClientRequest(request, (), hashes, RequestTimeline(0.0)))
    try:
        return [await read(stream) for stream in streams]
    finally:
        for stream in streams:
            await stream.aclose()
