"""Dialogues that grow turn by turn: time to first token, and the bytes that travel between the workers.

    python -m bench.multi_turn --url now=http://127.0.0.1:8000 [--url before=http://127.0.0.1:8001]

Every turn repeats the dialogue so far, with a new question and, in turns 1 and 4, a new image. Clusters take
turns, dialogue by dialogue, and get the same dialogues. Bytes are counted from outside: the transfer counters
of the workers, as /metrics has them before and after each turn. The bound of a turn's KV is

    (1 - hit) * KV of the prompt + one block
    hit = tokens in full blocks of the turn before / tokens of the prompt

because the KV of all tokens of the turn before, its answer but for the last token included, has been at a
worker. An answer whose text is tokenised in another way in the next turn, which is then longer than others,
is no hit. The KV of a token follows from turn 1, whose prompt no cache has: the dialogues share no prefix.
Exit status 1 if a request fails, or if the first cluster exceeds a bound.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import aiohttp

from bench.arguments import DEFAULT_URL, parser_of
from bench.client import ChatRequest, Endpoint, ask, open_session
from bench.engine.prompts import Message, Prompts, user
from bench.metrics import samples

IMAGE_TURNS = (1, 4)
IMAGE_SIDE = 224  # pixels
OPENING_TOKENS = 256
COUNTERS = ("epdg_transfer_raw_bytes_total", "epdg_transfer_coded_bytes_total")
SETTLED_S = 0.4  # counters that have not changed for so long belong to no turn that still runs
SETTLE_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class TurnResult:
    """One turn of one dialogue."""

    ttft_s: float
    num_prompt_tokens: int
    num_new_tokens: int  # of them, tokens behind prompt and answer of the turn before
    num_seen_tokens: int  # of them, tokens of the turn before whose KV has been computed
    num_cached_tokens: int  # of them, tokens whose KV the worker that computed the prompt had
    kv_bytes: float  # that travelled
    media_bytes: float  # embeddings that travelled

    def bound(self, token_bytes: float, block_size: int) -> float:
        num_hit_tokens = self.num_seen_tokens // block_size * block_size
        return (self.num_prompt_tokens - num_hit_tokens + block_size) * token_bytes


Found = dict[str, list[list[TurnResult]]]  # by cluster: dialogues, by turn


async def read_bytes(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Bytes that all workers of a pool have sent, as soon as they do not change any more."""
    deadline, settled_at, last = time.monotonic() + SETTLE_TIMEOUT_S, 0.0, None
    while True:
        async with session.get(f"{url}/metrics") as response:
            text = await response.text()
        sent: dict[str, float] = defaultdict(float)
        for each in samples(text, *COUNTERS):
            sent[each.labels["pool"]] += each.value
        now = time.monotonic()
        if sent != last:
            last, settled_at = sent, now
        if now - settled_at >= SETTLED_S:
            return sent
        if now > deadline:
            raise TimeoutError(f"the transfer counters of {url} do not settle")
        await asyncio.sleep(0.05)


async def run_dialogue(
    session: aiohttp.ClientSession, endpoint: Endpoint, args: argparse.Namespace, idx: int
) -> list[TurnResult]:
    """One result per turn. Raises RuntimeError if a request fails."""
    prompts, results, num_seen_tokens, num_turn_tokens = Prompts(args.seed), [], 0, 0
    messages: list[Message] = [{"role": "system", "content": prompts.text(OPENING_TOKENS, idx)}]
    before = await read_bytes(session, endpoint.url)
    for turn in range(1, 1 + (args.turns if idx >= 0 else 2)):
        media = [prompts.image(IMAGE_SIDE, idx, turn)] if turn in IMAGE_TURNS else []
        messages.append(user(prompts.text(args.question, idx, turn), *media))
        answer = await ask(session, endpoint, ChatRequest(messages, args.answer, "turn"))
        if answer.failure:
            raise RuntimeError(f"turn {turn} of dialogue {idx} at {endpoint.url}: {answer.failure}")
        messages.append({"role": "assistant", "content": answer.text})
        after = await read_bytes(session, endpoint.url)
        grown = {pool: sent - before.get(pool, 0.0) for pool, sent in after.items()}
        media_bytes, before = grown.pop("encode", 0.0), after
        results.append(
            TurnResult(
                answer.ttft_s,
                answer.num_prompt_tokens,
                answer.num_prompt_tokens - num_turn_tokens,
                num_seen_tokens,
                answer.num_cached_tokens,
                sum(grown.values()),
                media_bytes,
            )
        )
        num_turn_tokens = answer.num_prompt_tokens + answer.num_tokens
        num_seen_tokens = num_turn_tokens - 1
    return results


def without_changed_answers(found: Found) -> Found:
    """The same results, with the hits of turns before which an answer was tokenised in another way."""
    turns = list(zip(*(dialogue for dialogues in found.values() for dialogue in dialogues), strict=True))
    least = {i: min(one.num_new_tokens for one in turn) for i, turn in enumerate(turns) if i > 0}
    least_text = min((least[i] for i in least if i + 1 not in IMAGE_TURNS), default=0)

    def corrected(dialogue: Sequence[TurnResult], i: int) -> TurnResult:
        if i == 0 or dialogue[i].num_new_tokens == (least[i] if i + 1 in IMAGE_TURNS else least_text):
            return dialogue[i]
        return replace(dialogue[i], num_seen_tokens=dialogue[i - 1].num_prompt_tokens)

    return {
        name: [[corrected(dialogue, i) for i in range(len(dialogue))] for dialogue in dialogues]
        for name, dialogues in found.items()
    }


def show(name: str, dialogues: Sequence[Sequence[TurnResult]], block_size: int) -> bool:
    """Prints medians by turn. Returns whether every single turn has kept its bound."""
    firsts = [dialogue[0] for dialogue in dialogues]
    # a turn sends whole blocks
    token_bytes = max(one.kv_bytes / (-(-one.num_prompt_tokens // block_size) * block_size) for one in firsts)
    print(f"\n{name}: {len(dialogues)} dialogues, {token_bytes:,.0f} bytes of KV for each token of turn 1")
    titles = ("turn", "prompt", "seen", "cached", "TTFT p50 ms", "KV KiB", "bound KiB", "media KiB")
    print(" ".join(f"{title:>11}" for title in titles))
    for turn, results in enumerate(zip(*dialogues, strict=True), 1):
        columns = (
            [one.num_prompt_tokens for one in results],
            [one.num_seen_tokens for one in results],
            [one.num_cached_tokens for one in results],
            [1e3 * one.ttft_s for one in results],
            [one.kv_bytes / 1024 for one in results],
            [one.bound(token_bytes, block_size) / 1024 for one in results],
            [one.media_bytes / 1024 for one in results],
        )
        print(" ".join(f"{value:11.0f}" for value in (turn, *map(statistics.median, columns))))
    later = [one for dialogue in dialogues for one in dialogue[1:]]
    is_kept = all(one.kv_bytes <= one.bound(token_bytes, block_size) for one in later)
    ttft_ms = 1e3 * later_ttft_s(dialogues)
    print(f"turns >= 2: TTFT p50 {ttft_ms:.1f} ms; bound {'met' if is_kept else 'NOT met'}")
    return is_kept


def later_ttft_s(dialogues: Sequence[Sequence[TurnResult]]) -> float:
    """The median of all turns but the first."""
    return statistics.median(one.ttft_s for dialogue in dialogues for one in dialogue[1:])


async def measure(args: argparse.Namespace) -> Found:
    clusters = dict(one.split("=", 1) if "=" in one else (one, one) for one in args.url)
    found: Found = {name: [] for name in clusters}
    async with open_session() as session:
        for idx in range(-1, args.dialogues):  # two turns to warm up
            for name, url in clusters.items():
                results = await run_dialogue(session, Endpoint(url, args.model, {}), args, idx)
                if idx >= 0:
                    found[name].append(results)
    return found


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--url", action="append", help="[NAME=]URL of a cluster; may be repeated")
    parser.add_argument("--model", default="demo_model")
    parser.add_argument("--dialogues", type=int, default=3, help="for each cluster")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--question", type=int, default=32, help="tokens of each question")
    parser.add_argument("--answer", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--block-size", type=int, default=16, help="the clusters' setting")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the prompts; a cluster must not know them yet"
    )
    args = parser.parse_args()
    args.url = args.url or [DEFAULT_URL]
    try:
        found = without_changed_answers(asyncio.run(measure(args)))
    except (aiohttp.ClientError, RuntimeError, TimeoutError) as error:
        raise SystemExit(f"not measured: {error}") from error
    first, *others = [(show(name, dialogues, args.block_size), name) for name, dialogues in found.items()]
    for _, name in others:
        ratio = later_ttft_s(found[first[1]]) / later_ttft_s(found[name])
        print(f"TTFT p50 of turns >= 2, {first[1]} / {name}: {ratio:.2f}")
    return 0 if first[0] else 1


if __name__ == "__main__":
    raise SystemExit(main())
