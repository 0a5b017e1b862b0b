"""nano-vllm's run: 256 requests at once, prompts of 100 to 1,024 random tokens, answers of as many,
temperature 0.6, no end before the last token. Drawn in the same order from the same seed, so the lengths are
those of its published figures. An engine gets the tokens themselves, a server as many words of one token
each.

    python -m bench.gpu.offline URL MODEL_ID FIRST STRIDE START_AT

is one of several clients, so that no client is what is measured: it sends every STRIDE-th request from FIRST
on, all at START_AT (of the monotonic clock), and prints one line of JSON. Imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

SEED = 0
NUM_REQUESTS = 256
LENGTHS = (100, 1024)
MAX_TOKEN_ID = 10_000
TEMPERATURE = 0.6
OFFLINE_RUN = "256 requests of 100 to 1,024 tokens, answers of as many"
BATCH = 1  # the priority of work that may wait minutes at the door
TEMPLATE_TOKENS = 45  # that the chat template of `bench.engine.vocabulary` adds to one message
NUM_CLIENTS = 4
START_S = 5.0  # for all clients to be there


@dataclass(frozen=True)
class OfflineRequest:
    prompt: tuple[int, ...]
    num_tokens: int  # of the answer


@dataclass
class ClientReport:
    """The report of one client. Instants are those of the monotonic clock, which all processes share."""

    started_at: float
    ended_at: float
    num_prompt_tokens: int
    num_tokens: int  # of complete answers
    ttfts_s: list[float]
    gaps_s: list[float]
    failures: list[str]


def offline_requests(
    count: int = NUM_REQUESTS, lengths: tuple[int, int] = LENGTHS, max_token_id: int = MAX_TOKEN_ID
) -> list[OfflineRequest]:
    rng = random.Random(SEED)
    prompts: list[tuple[int, ...]] = []
    for _ in range(count):
        length = rng.randint(*lengths)
        prompts.append(tuple(rng.randint(0, max_token_id) for _ in range(length)))
    return [OfflineRequest(prompt, rng.randint(*lengths)) for prompt in prompts]


def tokens_read(requests: Sequence[OfflineRequest]) -> int:
    """Whose K and V all steps of answers read together: each step those of the prompt and of the tokens
    before."""
    return sum(
        (each.num_tokens - 1) * len(each.prompt) + each.num_tokens * (each.num_tokens - 1) // 2
        for each in requests
    )


def ask_all(url: str, model_id: str) -> list[ClientReport]:
    """All requests at once, by several processes. Blocks until the last answer."""
    start_at = time.monotonic() + START_S
    command = [sys.executable, "-m", "bench.gpu.offline", url, model_id]
    others = [str(NUM_CLIENTS), str(start_at)]
    clients = [
        subprocess.Popen([*command, str(first), *others], stdout=subprocess.PIPE, text=True)
        for first in range(NUM_CLIENTS)
    ]
    said = [client.communicate()[0] for client in clients]
    return [ClientReport(**json.loads(line)) for line in said]


async def ask(url: str, model_id: str, requests: Sequence[tuple[int, OfflineRequest]]) -> ClientReport:
    """requests: each with its number, which is the seed of its draws."""
    from bench.client import ChatRequest, Endpoint, open_session
    from bench.client import ask as ask_one
    from bench.engine.prompts import Prompts, user

    prompts = Prompts(SEED)
    async with open_session() as session:
        asked = (
            ask_one(
                session,
                Endpoint(url, model_id, {"temperature": TEMPERATURE, "seed": number, "priority": BATCH}),
                ChatRequest(
                    [user(prompts.text(len(each.prompt) - TEMPLATE_TOKENS, "offline", number))],
                    each.num_tokens,
                    "offline",
                ),
            )
            for number, each in requests
        )
        answers = await asyncio.gather(*asked)
    complete = [answer for answer in answers if not answer.failure]
    return ClientReport(
        started_at=min(answer.started_at for answer in answers),
        ended_at=max(answer.ended_at for answer in answers),
        num_prompt_tokens=sum(answer.num_prompt_tokens for answer in complete),
        num_tokens=sum(answer.num_tokens for answer in complete),
        ttfts_s=[answer.ttft_s for answer in complete],
        gaps_s=[gap for answer in complete for gap in answer.gaps_s],
        failures=[answer.failure for answer in answers if answer.failure],
    )


def main() -> None:
    url, model_id, first, stride, start_at = sys.argv[1:]
    own = list(enumerate(offline_requests()))[int(first) :: int(stride)]
    time.sleep(max(0.0, float(start_at) - time.monotonic()))
    print(json.dumps(asdict(asyncio.run(ask(url, model_id, own)))))


if __name__ == "__main__":
    main()
