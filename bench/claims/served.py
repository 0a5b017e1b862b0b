"""What guidance, audio and video cost, counted in the demo model's four phases in this process."""

from __future__ import annotations

import asyncio
import base64
import mimetypes
from collections import Counter
from collections.abc import Callable
from typing import Any

from bench import DEMO_MODEL
from bench.claims.claim import COUNTED, Claim, Found
from bench.in_process import choice_of, setup_here, started
from cluster.config.settings import ClusterArgs
from cluster.engine.state import PromptWork
from decode_service.service import decode_worker
from encoder_service.service import EncoderService
from prefill_service.service import prefill_worker
from router.door import Door

SETTINGS = {"model": str(DEMO_MODEL), "model_id": "demo", "dtype": "float32"}
WORKERS = {"encode": {"cache_bytes": 8 << 20}, "prefill": {"kv_blocks": 256}, "decode": {"kv_blocks": 256}}
MEDIA = ("red_circle.png", "moving_right.mp4", "seven.wav")
CALLS: dict[
    str, tuple[str, tuple[str, ...], dict[str, Any]]
] = {  # words before the media, media, more fields
    "an image": ("Look.", MEDIA[:1], {}),
    "the same, guided": (
        "Look.",
        MEDIA[:1],
        {"guidance_scale": 1.5, "negative_prompt": "Say three numbers."},
    ),
    "image, clip and sound": ("Look.", MEDIA, {}),
    "the same again": ("Look.", MEDIA, {}),
    "the same behind other words": ("Look and listen.", MEDIA, {}),
}
COLUMNS = (
    "items encoded",
    "prompt tokens computed",
    "steps of decode",
    "sequences in them",
    "KiB of KV sent",
)
NUM_TOKENS = 12


def messages(words: str, files: tuple[str, ...]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "text", "text": words}]
    for file in files:
        mime, data = str(mimetypes.guess_type(file)[0]), (DEMO_MODEL / "examples" / file).read_bytes()
        kind, coded = f"{mime.partition('/')[0]}_url", base64.b64encode(data).decode()
        parts.append({"type": kind, kind: {"url": f"data:{mime};base64,{coded}"}})
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "Describe it."}]}]


def counted(run: Callable[..., Any], counts: Counter[str]) -> Callable[..., Any]:
    """A language runner's `run`, with counts of what is in its steps."""

    def runs(works: Any, *rest: Any) -> Any:
        answers = [work.request for work in works if not isinstance(work, PromptWork)]
        counts["prompt tokens computed"] += sum(w.num_tokens for w in works if isinstance(w, PromptWork))
        counts["steps of decode"] += bool(answers)
        counts["sequences in them"] += sum(len(c.sequences) for r in answers for c in r.live_choices)
        return run(works, *rest)

    return runs


async def count() -> dict[str, Counter[str]]:
    """The counts of a greedy answer to each call, one after the other."""
    args = ClusterArgs.model_validate({**SETTINGS, **WORKERS})
    encoder = EncoderService(args, setup_here(args, "e"))
    prefill, decode = prefill_worker(args, setup_here(args, "p")), decode_worker(args, setup_here(args, "d"))
    door, totals, found = Door(args, lambda replica_id, request_id: decode.run(request_id)), Counter(), {}
    for worker in (prefill, decode):
        worker.engine.runner.run = counted(worker.engine.runner.run, totals)
    async with started(door, (encoder, prefill, decode)):
        for name, (words, files, fields) in CALLS.items():
            before, body = totals.copy(), {"model": "demo", "messages": messages(words, files), **fields}
            body |= {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
            choice = await choice_of(door, body)
            async for _ in choice:
                pass
            await choice.aclose()
            totals["items encoded"] = encoder.encoder.engine.load().encoded.num_encoded
            totals["KiB of KV sent"] = prefill.process.transfer_engine.sent.raw_bytes >> 10
            found[name] = Counter({column: totals[column] - before[column] for column in COLUMNS})
    return found


def measure() -> Found:
    found = asyncio.run(count())
    rows = [(name, *(f"{counts[column]:,}" for column in COLUMNS)) for name, counts in found.items()]
    guided, *media = list(found.values())[1:]
    encodes = ", ".join(str(each["items encoded"]) for each in media)
    steps = f"{guided['sequences in them']} sequences in {guided['steps of decode']} steps"
    ours = f"guided: {steps}; three media in three prompts: {encodes} encodes"
    return Found((f"{NUM_TOKENS} tokens about", *COLUMNS), rows, ours)


PUBLISHED = "no deadline for CFG companions (vLLM-Omni 0.30); omni E/P/D tests skipped in CI (SGLang 0.5.23)"
CLAIMS = {"served": Claim("CFG branches; audio and video", PUBLISHED, COUNTED, measure)}
