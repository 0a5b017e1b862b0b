"""What the host does in a step of answers, besides the model: for each step, and for each answer in it.

    python -m bench.host_step [--answers 1,16,64,256] [--steps 200] [--rounds 5] [--sampled]

The real engine and runner over a model that computes nothing: every step gives the same logits, of a small
vocabulary. Counted: planning, blocks, the draw, events, the load report, and the encoding of the message to
the door. On a GPU all of this runs beside the device, or between its steps.

Figures are medians over the rounds: microseconds of a step, and of each further answer (the slope between the
smallest and the largest number).
"""

from __future__ import annotations

import gc
import time
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.arguments import numbers, parser_of
from bench.rounds import in_turns
from bench.tables import table
from cluster.clock import SystemClock
from cluster.engine.engine import LanguageEngine
from cluster.engine.features import FeatureStore
from cluster.engine.limits import StepLimits
from cluster.engine.runner import LanguageRunner
from cluster.kvcache.blocks import BlockPool
from cluster.kvcache.memory import BlockMemory, MemoryLayout, feature_layout
from cluster.model.kv_format import kv_segments
from cluster.rpc.frames import encode_message
from cluster.scheduling.keys import SchedulingPolicy
from cluster.types.messages import StartDecode
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from cluster.worker.cpu_slots import no_cpu_slots
from cluster.worker.outbox import Outbox

VOCAB_SIZE, BLOCK_SIZE, PROMPT_TOKENS = 64, 16, 200
MAX_TOKENS = 8192  # of an answer: no more steps than this


class NoModel:
    """A `StepModel` that computes nothing."""

    recorded_tokens = 0

    def __init__(self) -> None:
        self._logits = torch.randn(4096, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def forward(self, chunks: Any, *_: object) -> Tensor:
        return self._logits[: sum(chunk.num_logits for chunk in chunks)]

    def decode(self, token_ids: Any, *_: object) -> Tensor:
        return self._logits[: len(token_ids)]

    def copy_blocks(self, *_: object) -> None:
        return


def engine_of(num_answers: int, sampling: SamplingParams) -> LanguageEngine:
    """Returns an engine that generates so many answers, whose prompts are computed."""
    clock, layout = SystemClock(), MemoryLayout(kv_segments([(1, 2)] * 2, BLOCK_SIZE, torch.float32))
    num_blocks = num_answers * -(-(PROMPT_TOKENS + MAX_TOKENS) // BLOCK_SIZE)
    kv, rooms = BlockMemory(layout, 1), BlockMemory(feature_layout(1, BLOCK_SIZE, torch.float32), 1)
    transfer: Any = SimpleNamespace(links={}, codecs={}, sent=None, received=None, num_open=0)
    features = FeatureStore(rooms, BlockPool(1, BLOCK_SIZE), transfer)
    steps: Any = NoModel()
    model: Any = SimpleNamespace(
        positions=lambda prompt: None, chunk_cut_spans=False, state_blocks=0, kv_layout=layout, num_layers=1,
        sliding_window=None, num_adapter_slots=0, max_model_len=1 << 30, vocab_size=VOCAB_SIZE,
    )  # fmt: skip

    def deliver(batch: Any) -> None:
        for _, message in batch:
            encode_message(message)

    outbox = Outbox(deliver)
    outbox.add_door(1)
    engine = LanguageEngine(
        model=model, runner=LanguageRunner(model, steps, kv, features),
        blocks=BlockPool(num_blocks, BLOCK_SIZE),
        transfer_engine=transfer, outbox=outbox, clock=clock,
        policy=SchedulingPolicy(aging_s=10.0, tokens_per_s=1e4, text_share=0.5),
        limits=StepLimits(2048, num_answers, target_s=0.5), cpu_slots=no_cpu_slots(clock), features=features,
    )  # fmt: skip
    for i in range(num_answers):
        prompt = Prompt(tuple((i + j) % VOCAB_SIZE for j in range(PROMPT_TOKENS)))
        request = GenerateRequest(f"request-{i:032d}", prompt, (sampling,), StopParams(MAX_TOKENS))
        engine.start(1, StartDecode(request, 3600.0, prefills=True), clock.now())
    while engine.load().num_running < num_answers or engine.load().num_prompts:
        engine.step()
    return engine


def steps(engine: LanguageEngine, num_steps: int) -> None:
    for _ in range(num_steps):
        engine.step()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=numbers, default=[1, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--sampled", action="store_true", help="temperature 0.8 and top_p 0.9; otherwise greedy"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    sampling = SamplingParams(temperature=0.8, top_p=0.9, seed=1) if args.sampled else SamplingParams()
    engines = {num: engine_of(num, sampling) for num in args.answers}
    gc.freeze()
    works = [partial(steps, engine, args.steps) for engine in engines.values()]
    times = in_turns(works, clock=time.thread_time, rounds=args.rounds)
    medians = {num: 1e6 * median(each) / args.steps for num, each in zip(engines, times, strict=True)}
    print(
        "\n".join(table(["answers", "us a step"], [[str(num), f"{us:.0f}"] for num, us in medians.items()]))
    )
    few, many = min(medians), max(medians)
    if few < many:
        print(f"us a further answer: {(medians[many] - medians[few]) / (many - few):.1f}")


if __name__ == "__main__":
    main()
