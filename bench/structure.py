"""Are answers under a JSON schema valid, and what do structures cost?

    python -m bench.structure check [--schemas 2000] [--streams 16] [--max-tokens 400] [--blanks] [--random]
    python -m bench.structure speed [--schemas 64] [--streams 16] [--rounds 5]
    python -m bench.structure hostile [--streams 16] [--max-tokens 400] [--rounds 5] [--url http://…:8000]

One process, no cluster: a door and one language worker with the demo model (`--random`: the same with random
weights), temperature 1. `--url`: the cluster there instead. Schemas come from `bench.schemas`; the library `jsonschema`, which has no part in the
server, judges the answers.

check    per class of schemas: valid, invalid, cut off by --max-tokens, refused. Exit status 1 if one is
         invalid.
speed    tokens per second when every answer has a structure, against the same number of tokens of the same
         prompts without one. Rounds of the two take turns; the ratio is the median over the rounds.
hostile  how long the door takes to refuse structures that are hard to compile, one after the other, and the
         gap between two tokens of other answers meanwhile: alone, with them, and with a process of the
         lowest priority that only counts, which shows what any work of one core costs on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import jsonschema
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from bench import DEMO_MODEL
from bench.arguments import parser_of
from bench.client import TimedAnswer, open_session, post
from bench.in_process import choice_of, setup_here, started
from bench.metrics import model_id
from bench.schemas import Schema, schemas
from cluster.config.settings import ClusterArgs
from cluster.errors import RequestError
from decode_service.service import language_worker
from router.door import Door

PROMPT = "Describe a thing as JSON."
LOOP = "import os; os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))\nwhile True: pass"


def hostile_structures(salt: int) -> dict[str, dict[str, Any]]:
    """Others for each salt: what is known already costs nothing. `salt`: below 1,000."""
    choices = ["ab" * (i % 30) + str(i + salt) for i in range(4000)]
    properties = {f"^{'a?' * 12}{i + salt}x{{1,90}}$": {"type": "string"} for i in range(200)}
    brackets = 60_000 + salt
    return {
        "a pattern of many counted repetitions": {
            "guided_regex": f"(?s).*a.{{0,{3000 - salt}}}(b.{{0,3000}}c.{{0,3000}}){{0,50}}d"
        },
        "a grammar 60,000 brackets deep": {
            "guided_grammar": "start: " + "(" * brackets + '"a"' + ")" * brackets
        },
        "4,000 choices that overlap": {"guided_choice": choices},
        "200 patterns with negated neighbours": {
            "guided_json": {"type": "object", "patternProperties": properties}
        },
    }


@dataclass(frozen=True)
class Answered:
    text: str
    num_tokens: int
    finish_reason: str | None
    gaps_s: tuple[float, ...]


@contextlib.asynccontextmanager
async def serving(model: Path) -> AsyncIterator[Door]:
    args = ClusterArgs.model_validate({"model": str(model), "model_id": "demo", "dtype": "float32"})
    worker = language_worker(args, setup_here(args, "language-0"))

    async def call_decode(replica_id: str, request_id: str) -> None:
        await worker.run(request_id)

    door = Door(args, call_decode)
    async with started(door, [worker]):
        yield door


def random_model(folder: Path) -> Path:
    """The demo model with random weights."""
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("training", "examples"))
    torch.manual_seed(0)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if weight.ndim > 1:
            weights[name] = torch.randn(weight.shape).mul_(2 * weight.float().std()).to(weight.dtype)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


class Asking(Protocol):
    async def __call__(self, seed: int, max_tokens: int, **fields: Any) -> Answered:
        """Raises RequestError for a structure that is refused."""
        ...


def request_body(model: str, seed: int, max_tokens: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": model, "messages": [{"role": "user", "content": f"{PROMPT} Number {seed}."}],
        "temperature": 1.0, "seed": seed, "max_tokens": max_tokens, **fields,
    }  # fmt: skip


async def ask_door(door: Door, seed: int, max_tokens: int, **fields: Any) -> Answered:
    body = request_body("demo", seed, max_tokens, fields)
    choice = await choice_of(door, body)
    texts, gaps, reason, last_at = [], [], None, time.perf_counter()
    try:
        async for delta in choice:
            now = time.perf_counter()
            gaps.append(now - last_at)
            texts.append(delta.text)
            reason, last_at = delta.finish_reason, now
        return Answered("".join(texts), choice.usage.completion_tokens, reason, tuple(gaps[1:]))
    finally:
        await choice.aclose()


async def ask_url(
    session: aiohttp.ClientSession, url: str, model: str, seed: int, max_tokens: int, **fields: Any
) -> Answered:
    more = {"stream": True, "stream_options": {"include_usage": True}}
    body, answer = request_body(model, seed, max_tokens, {**fields, **more}), TimedAnswer("")
    await post(session, url, json.dumps(body).encode(), answer)
    if answer.failure:
        raise RequestError(answer.failure)
    return Answered(answer.text, answer.num_tokens, answer.reasons.get(0), tuple(answer.gaps_s))


def wanted(schema: Schema, with_blanks: bool = False) -> dict[str, Any]:
    """The fields that ask for the schema. Without blanks more answers end before they are cut: neither model
    was trained to write JSON."""
    if not with_blanks:
        return {"structured_outputs": {"json": schema, "disable_any_whitespace": True}}
    named = {"name": "thing", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def verdict(schema: Schema, answered: Answered) -> str:
    if answered.finish_reason != "stop":
        return "cut"
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(answered.text))
    except (ValueError, jsonschema.ValidationError) as error:
        print(f"INVALID {json.dumps(schema)}\n    {answered.text!r}\n    {str(error)[:200]}", file=sys.stderr)
        return "invalid"
    return "valid"


async def check(ask: Asking, args: argparse.Namespace) -> int:
    slots = asyncio.Semaphore(args.streams)
    counts: dict[str, Counter[str]] = defaultdict(Counter)

    async def one(number: int, kind: str, schema: Schema) -> None:
        async with slots:
            try:
                counts[kind][
                    verdict(schema, await ask(number, args.max_tokens, **wanted(schema, args.blanks)))
                ] += 1
            except RequestError as error:
                print(f"refused ({kind}): {error.message}", file=sys.stderr)
                counts[kind]["refused"] += 1

    async with asyncio.TaskGroup() as group:
        for number, (kind, schema) in enumerate(schemas(args.schemas)):
            group.create_task(one(number, kind, schema))
    columns = ("valid", "invalid", "cut", "refused")
    print(f"{'class':16}" + "".join(f"{column:>9}" for column in columns))
    for kind, count in [*counts.items(), ("all", sum(counts.values(), Counter()))]:
        print(f"{kind:16}" + "".join(f"{count[column]:9}" for column in columns))
    return int(any(count["invalid"] for count in counts.values()))


async def rate(ask: Asking, streams: int, bodies: Sequence[dict[str, Any]]) -> tuple[float, float, list[int]]:
    """Tokens per second, per second of processor time of this process, and of each answer."""
    slots = asyncio.Semaphore(streams)

    async def one(seed: int, body: dict[str, Any]) -> int:
        async with slots:
            return (await ask(seed, **body)).num_tokens

    began_at, used_s = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(seed, body)) for seed, body in enumerate(bodies)]
    num_tokens = [task.result() for task in tasks]
    took_s, used_s = time.perf_counter() - began_at, time.process_time() - used_s
    return sum(num_tokens) / took_s, sum(num_tokens) / used_s, num_tokens


async def speed(ask: Asking, args: argparse.Namespace) -> int:
    """The first round compiles grammars and is not counted."""
    structured = [
        {"max_tokens": args.max_tokens, **wanted(schema, args.blanks)} for _, schema in schemas(args.schemas)
    ]
    rounds: list[tuple[float, ...]] = []
    for round_idx in range(args.rounds + 1):
        with_it, used, num_tokens = await rate(ask, args.streams, structured)
        plain = [{"max_tokens": count, "ignore_eos": True} for count in num_tokens]
        without, used_without, _ = await rate(ask, args.streams, plain)
        if round_idx:
            rounds.append((with_it, without, used, used_without))
    columns = list(zip(*rounds, strict=True))
    told = [("second", *columns[:2]), ("second of processor time", *columns[2:])]
    for name, of, other in told[: 1 if args.url else 2]:  # another process computes there
        ratios = [one / two for one, two in zip(of, other, strict=True)]
        print(
            f"tokens per {name}, medians of {args.rounds} rounds: {statistics.median(of):.0f} with, "
            f"{statistics.median(other):.0f} without; ratio {statistics.median(ratios):.3f}, "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
        )
    return 0


async def hostile(ask: Asking, args: argparse.Namespace) -> int:
    async def gap_p50_p99() -> tuple[float, float]:
        plain = [ask(seed, args.max_tokens, ignore_eos=True) for seed in range(args.streams)]
        gaps = [gap for each in await asyncio.gather(*plain) for gap in each.gaps_s]
        p50, p99 = 1e3 * np.percentile(gaps, [50, 99])
        return float(p50), float(p99)

    took_s: dict[tuple[str, str], list[float]] = defaultdict(list)

    async def beside_structures() -> tuple[float, float]:
        others = asyncio.ensure_future(gap_p50_p99())
        while not others.done():
            for name, body in hostile_structures(random.randrange(1000)).items():
                if not others.done():
                    outcome, seconds = await outcome_of(ask, body)
                    took_s[name, outcome].append(seconds)
        return await others

    async def beside_loop() -> tuple[float, float]:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", LOOP)
        try:
            return await gap_p50_p99()
        finally:
            process.kill()
            await process.wait()

    rounds = []
    for _ in range(args.rounds + 1):
        rounds.append((await gap_p50_p99(), await beside_structures(), await beside_loop()))
    for (name, outcome), seconds in sorted(took_s.items()):
        print(f"{name:40} {len(seconds):3} times, {min(seconds):.2f} to {max(seconds):.2f} s: {outcome}")
    measured = np.array(rounds[1:])  # the first loads what is needed
    medians, ratios = np.median(measured, axis=0), measured[:, 1:] / measured[:, :1]
    for column, percentile in enumerate(("p50", "p99")):
        print(f"gap between tokens, {percentile}, alone: {medians[0, column]:.2f} ms")
        for row, beside in enumerate(("structures", "a loop")):
            ratio = ratios[:, row, column]
            print(
                f"  beside {beside}: {medians[row + 1, column]:.2f} ms; "
                f"ratio {np.median(ratio):.2f}, {ratio.min():.2f} to {ratio.max():.2f}"
            )
    return 0


async def outcome_of(ask: Asking, body: dict[str, Any]) -> tuple[str, float]:
    """And the seconds until it was known."""
    began_at = time.perf_counter()
    try:
        await ask(0, 16, **body)
        outcome = "answered"
    except RequestError as error:
        outcome = f"refused: {error.message[:60]}"
    return outcome, time.perf_counter() - began_at


async def run(args: argparse.Namespace) -> int:
    work = {"check": check, "speed": speed, "hostile": hostile}[args.what]
    if args.url:
        async with open_session(120.0) as session:
            model = await asyncio.to_thread(model_id, args.url)
            return await work(partial(ask_url, session, args.url, model), args)
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder) / "model") if args.random else DEMO_MODEL
        async with serving(model) as door:
            return await work(partial(ask_door, door), args)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("what", choices=("check", "speed", "hostile"))
    parser.add_argument("--schemas", type=int, help="2000 for check, 64 for speed")
    parser.add_argument("--streams", type=int, default=16, help="answers at once")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blanks", action="store_true", help="check: white space is allowed")
    parser.add_argument("--random", action="store_true", help="random weights")
    parser.add_argument("--url", help="of a cluster that runs")
    args = parser.parse_args()
    args.schemas = args.schemas or (2000 if args.what == "check" else 64)
    sys.exit(asyncio.run(run(args)))


if __name__ == "__main__":
    main()
