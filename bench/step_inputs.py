"""What the host does to fill the inputs of a recorded step of answers, and how much it copies to the device.

    python -m bench.step_inputs [--answers 256] [--contexts 1000,8000,100000] [--limit 131072] [--steps 160]

Each answer is a token longer in each step, and has one more block every 16 steps. Runs on the CPU:
microseconds of this thread for a step, the median over the rounds, and the bytes of the copy, on average. A
GPU makes the copy by itself; here the thread does.
"""

from __future__ import annotations

import time
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.arguments import numbers, parser_of
from bench.rounds import in_turns
from bench.tables import table
from cluster.model.cuda.step_inputs import StepBuffers, answers_of

BLOCK_SIZE = 16


class CountedCopies(TorchDispatchMode):
    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default:
            into: Tensor = args[0]
            self.num_bytes += into.nbytes
        return func(*args, **(kwargs or {}))


class Answers:
    def __init__(self, num_answers: int, context: int, limit: int):
        self.buffers = StepBuffers(
            answers_of(num_answers), -(-limit // BLOCK_SIZE), 1, BLOCK_SIZE, 0, torch.device("cpu")
        )
        self.sizes = answers_of(num_answers)
        self.contexts = [context + row % BLOCK_SIZE for row in range(num_answers)]
        self.tables = [
            list(range(1000 * row, 1000 * row + -(-length // BLOCK_SIZE)))
            for row, length in enumerate(self.contexts)
        ]
        # whose next token begins a block, by the step's number
        self.growing = [
            [own for own, length in zip(self.tables, self.contexts, strict=True) if not (length + step) % 16]
            for step in range(BLOCK_SIZE)
        ]
        self.zeros, self.step = [0] * num_answers, 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            for block_ids in self.growing[self.step % BLOCK_SIZE]:
                block_ids.append(len(block_ids))
            self.buffers.fill_answers(self.sizes, 0, self.contexts, self.zeros, self.tables)
            self.contexts = [context + 1 for context in self.contexts]
            self.step += 1


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--contexts", type=numbers, default=[1000, 8000, 100_000])
    parser.add_argument("--limit", type=int, default=131_072, help="tokens of the longest context")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    with torch.inference_mode():
        for context in args.contexts:
            answers = Answers(args.answers, context, args.limit)
            (times,) = in_turns(
                [partial(answers.run, args.steps)], clock=time.thread_time, rounds=args.rounds
            )
            microseconds = 1e6 * median(times) / args.steps
            with CountedCopies() as copies:
                answers.run(BLOCK_SIZE)
            rows.append([f"{context:,}", f"{microseconds:.0f}", f"{copies.num_bytes // BLOCK_SIZE:,}"])
    print("\n".join(table(["context", "us a step", "bytes"], rows)))


if __name__ == "__main__":
    main()
