"""How much work an encoder that takes 200 ms hides: time to first token, next to the longest of its
parts and to their sum.

One process: encoder, prefill, decode and door as they are, the in-process agent, HTTP. The encoder's call
takes `ENCODE_S` longer than it would and needs no CPU slot: it stands for an encoder on a device of its own.

    text     n tokens of text alone                              how long prefill takes
    image    a short text, an image                              how long encoding takes
    one      n tokens of text, an image                          at best as long as the longer of the two
    two      n / 2 tokens, an image, n / 2 tokens, an image      see below

`two`: an encoder call has one image, so the second image is encoded while prefill computes the text after
the first.
"""

from __future__ import annotations

import itertools
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch

from bench.client import NO_END, ChatRequest, Endpoint, ask, open_session
from bench.encoder.clients import request, required, text_part
from bench.engine.prompts import WORDS, Part, Prompts
from bench.in_process import api, setup_here, started
from bench.records import Record
from cluster.clock import SystemClock
from cluster.config.environment import read_environment
from cluster.config.resolution import resolve
from cluster.config.settings import ClusterArgs
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import Modality
from cluster.worker.cpu_slots import no_cpu_slots
from decode_service.service import decode_worker
from encoder_service.runner import EncoderRunner, Piece
from encoder_service.service import EncoderService
from prefill_service.service import prefill_worker
from router.door import Door

ENCODE_S = 0.2
IMAGE_SIDE = 64
SHORT_WORDS = 4
SAMPLE_WORDS = 1000  # their tokens are counted
CASES = ("text", "image", "one", "two")


def slow_down(runner: EncoderRunner, delay_s: float) -> None:
    """Its calls take so much longer."""
    encode = runner.encode

    def slow(modality: Modality, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        time.sleep(delay_s)
        return encode(modality, pieces)

    runner.encode = slow


class Texts:
    """Random texts of about a given number of tokens of one tokenizer."""

    def __init__(self, model: str, seed: int):
        self._rng = random.Random(seed)
        sample = TextProcessor.load(model).text_prompt(self.words(SAMPLE_WORDS))
        self._words_per_token = SAMPLE_WORDS / len(sample)

    def words(self, count: int) -> str:
        return " ".join(self._rng.choices(WORDS, k=count))

    def part(self, num_tokens: int) -> Part:
        return text_part(self.words(round(num_tokens * self._words_per_token)))


def make_request(case: str, texts: Texts, num_tokens: int, images: Sequence[Part]) -> ChatRequest:
    half = num_tokens // 2
    parts = {
        "text": lambda: [texts.part(num_tokens)],
        "image": lambda: [text_part(texts.words(SHORT_WORDS)), images[0]],
        "one": lambda: [texts.part(num_tokens), images[0]],
        "two": lambda: [texts.part(half), images[0], texts.part(half), images[1]],
    }[case]()
    return request(case, 1, *parts)


async def measure(model: str, lengths: Sequence[int], repeats: int, seed: int) -> list[Record]:
    """Raises RuntimeError if a request fails."""
    args = cluster_args(model, max(lengths))
    prompts, texts = Prompts(seed), Texts(args.model, seed)
    records: list[Record] = []
    async with cluster(args) as url, open_session() as session:
        server = Endpoint(url, args.model_id, NO_END)
        for repetition, length, case in itertools.product(range(-1, repeats), lengths, CASES):
            images = [prompts.image(IMAGE_SIDE, repetition, length, case, idx) for idx in range(2)]
            asked = make_request(case, texts, length, images)
            (answer,) = required([await ask(session, server, asked)])
            if repetition >= 0:  # repetition -1 warms up
                records.append({
                    "type": "overlap", "model": args.model_id, "case": case, "text_tokens": length,
                    "repetition": repetition, "prompt_tokens": answer.num_prompt_tokens, "encode_s": ENCODE_S,
                    "ttft_s": answer.ttft_s,
                })  # fmt: skip
    return records


def cluster_args(model: str, num_tokens: int) -> ClusterArgs:
    num_blocks = 2 * num_tokens // 16 + 256
    args: dict[str, Any] = {
        "model": model,
        "encode": {"max_batch_items": 1, "cache_bytes": 8 << 20},
        "prefill": {"kv_blocks": num_blocks, "feature_bytes": 8 << 20},
        "decode": {"kv_blocks": num_blocks},
    }
    return resolve(ClusterArgs.model_validate(args), read_environment(), num_cores=torch.get_num_threads())


@asynccontextmanager
async def cluster(args: ClusterArgs) -> AsyncIterator[str]:
    """All four phases in this process behind HTTP, with a slowed-down encoder. Yields the URL."""
    unique = secrets.token_hex(4)
    encoder = EncoderService(args, setup_here(args, f"e-{unique}"))
    prefill = prefill_worker(args, setup_here(args, f"p-{unique}"))
    decode = decode_worker(args, setup_here(args, f"d-{unique}"))
    slow_down(encoder.encoder.engine.runner, ENCODE_S)
    encoder.encoder.engine._cpu_slots = no_cpu_slots(SystemClock())
    door = Door(args, lambda replica_id, request_id: decode.run(request_id))
    async with started(door, (encoder, prefill, decode)), api(door) as url:
        yield url
