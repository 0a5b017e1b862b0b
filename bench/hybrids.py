"""What a step of a hybrid model costs, with native layers and with transformers' own modules.

    python -m bench.hybrids [--hidden 1024] [--layers 8] [--rounds 5]

A random model of Qwen3.5's form: three of four layers have the gated delta rule. Steps of answers and prompts
alternate between the two ways. Next to the times: how far the logits of both differ (relative, 2-norm), and
how many blocks of KV a state takes. Figures: docs/measured.md.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3_5TextConfig

from bench.arguments import parser_of
from bench.rounds import in_turns
from bench.tables import table
from cluster.kvcache.memory import BlockMemory
from cluster.model.cuda.graphs import Recording
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.state_step import StatefulForward
from cluster.model.states import StateSpan

CONTEXT = 256  # tokens before an answer's
NUM_BLOCKS = 48  # of KV, for a sequence
VOCAB_SIZE = 32_000
CPU = torch.device("cpu")
Given = TypeVar("Given")


def make(hidden: int, layers: int, folder: Path) -> LanguageModel:
    write(hidden, layers, folder, torch.bfloat16)
    return LanguageModel.load(folder, dtype=torch.bfloat16, device=CPU)


def write(
    hidden: int, layers: int, folder: Path, dtype: torch.dtype, device: torch.device = CPU,
    vocab_size: int = VOCAB_SIZE,
) -> None:  # fmt: skip
    """device: where the weights are drawn; a CPU takes ten seconds for a billion."""
    config = Qwen3_5TextConfig(
        hidden_size=hidden, intermediate_size=7 * hidden // 2, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=2, head_dim=256, vocab_size=vocab_size,
        linear_num_key_heads=hidden // 64, linear_num_value_heads=hidden // 64,
    )  # fmt: skip
    write_config(config, folder, dtype, device)


def write_config(config: PreTrainedConfig, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
    """A random model."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config)
    torch.nn.Module.to(model, "cpu", dtype)
    model.save_pretrained(folder)


@contextmanager
def without_kernels(model: LanguageModel) -> Iterator[None]:
    forwards = mixers_of(model)
    kernels = [forward.kernel for forward in forwards]
    try:
        for forward in forwards:
            forward.kernel = None
        yield
    finally:
        for forward, kernel in zip(forwards, kernels, strict=True):
            forward.kernel = kernel


def mixers_of(model: LanguageModel) -> list[StatefulForward]:
    return [] if model.states is None else model.states.forwards


class Steps:
    """Memory for `num_sequences` sequences and their states.

    recording: of the model's steps; None: they are computed unrecorded. num_blocks: of KV, for a sequence."""

    def __init__(
        self, model: LanguageModel, num_sequences: int, recording: Recording | None = None,
        num_blocks: int = NUM_BLOCKS,
    ):  # fmt: skip
        self._model, size = model, model.state_blocks
        first = num_sequences * num_blocks
        num_padding = 0 if recording is None else recording.num_blocks
        total = first + 2 * num_sequences * size + num_padding
        self._kv = BlockMemory(model.kv_layout, total, model.device)
        self._recorded = None if recording is None else recording.over(model, self._kv)
        self._tables = [[*range(i * num_blocks, (i + 1) * num_blocks)] for i in range(num_sequences)]
        places = [[*range(first + i * size, first + (i + 1) * size)] for i in range(2 * num_sequences)]
        self._places = list(zip(places[::2], places[1::2], strict=True))

    def drafted(self, num_right: int = 0, num_drafts: int = 0) -> Tensor:
        """One step of all, with drafts. num_right: drafts of the step before it, which it computes again."""
        chunks = []
        for blocks, (before, after) in zip(self._tables, self._places, strict=True):
            spans = [StateSpan(1 + num_right, before, after), StateSpan(num_drafts, after)]
            chunk = SequenceChunk(
                [5] * (1 + num_right + num_drafts), CONTEXT, CONTEXT, blocks, num_logits=1 + num_drafts,
                states=tuple(span for span in spans if span.num_tokens),
            )  # fmt: skip
            chunks.append(chunk)
        return self._model.forward(chunks, self._kv)

    def answers(self, count: int | None = None, *, is_recorded: bool = False) -> Tensor:
        """One token for each sequence, or for the first `count`."""
        spans = [StateSpan(1, before, after) for before, after in self._places][:count]
        model = self._recorded if is_recorded and self._recorded is not None else self._model
        contexts, tables = [CONTEXT] * len(spans), self._tables[:count]
        return model.decode([5] * len(spans), contexts, [0] * len(spans), tables, self._kv, states=spans)

    def prompt(self, num_tokens: int, *, is_recorded: bool = False) -> Tensor:
        span = StateSpan(num_tokens, (), self._places[0][0])
        ids = [(7 * i + 3) % self._model.vocab_size for i in range(num_tokens)]
        model = self._recorded if is_recorded and self._recorded is not None else self._model
        return model.forward([SequenceChunk(ids, 0, 0, self._tables[0], states=(span,))], self._kv)


def seconds(work: Callable[[], Given]) -> tuple[float, Given]:
    began = time.perf_counter()
    given = work()
    return time.perf_counter() - began, given


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        model = make(arguments.hidden, arguments.layers, Path(folder))
        own = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype)
    if mixers_of(model):
        raise SystemExit("this machine has no native layers for the mixers: there is nothing to compare")
    both = [works_of(model), works_of(LanguageModel.from_model(own))]
    rows = []
    for name in both[0]:
        our_s, own_s = map(median, in_turns([works[name] for works in both], rounds=arguments.rounds))
        logits, expected = (works[name]() for works in both)
        difference = float((logits - expected).norm() / expected.norm())
        times = (f"{1e3 * our_s:.1f}", f"{1e3 * own_s:.1f}", f"{own_s / our_s:.2f}")
        rows.append((name, *times, f"{difference:.1e}"))
    print(f"a state takes {model.state_blocks} blocks of {model.kv_layout.block_bytes:,} bytes")
    print("\n".join(table(("step", "native, ms", "own code, ms", "ratio", "logits differ by"), rows)))


def works_of(model: LanguageModel) -> dict[str, Callable[[], Tensor]]:
    steps = Steps(model, 1)
    works: dict[str, Callable[[], Tensor]] = {
        f"a prompt of {num_tokens}": partial(steps.prompt, num_tokens) for num_tokens in (CONTEXT, 512)
    }
    works.update({f"{count} answers": Steps(model, count).answers for count in (1, 4, 16)})
    return works


if __name__ == "__main__":
    main()
