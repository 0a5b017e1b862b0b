"""Steps of hybrid models on a simulated GPU: what is recorded, with padding, gives what the model gives
unrecorded, outputs and states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import transformers as hf

from cluster.model.cuda.graphs import RecordedSizes
from cluster.model.cuda.mixers import kernel_of
from cluster.model.cuda.step_inputs import StepSizes, answers_of
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from cluster.model.state_step import StatefulForward
from cluster.model.states import StateSpan
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.fakes.strict_triton import strict_triton
from tests.flow.hybrid_models import CONFIGS, OTHERS
from tests.unit.cuda.recorded_and_plain import PROMPTS, TABLES, Compared

SIZES = RecordedSizes([answers_of(1), answers_of(4)], [StepSizes(32, 8, 12)])


class Sequences:
    """Three prompts in a step each, then their answers; a state moves between two places."""

    def __init__(self, model: LanguageModel):
        self._size, self._first = model.state_blocks, 1 + max(map(max, TABLES))
        self.num_blocks = self._first + 2 * len(PROMPTS) * self._size
        self.compared = Compared(model, SIZES, self.num_blocks)
        self._lens = [len(prompt) for prompt in PROMPTS]

    def _place(self, sequence: int, length: int) -> range:
        start = self._first + (2 * sequence + length % 2) * self._size
        return range(start, start + self._size)

    def prompts(self) -> None:
        for i, prompt in enumerate(PROMPTS):
            span = StateSpan(len(prompt), (), self._place(i, len(prompt)))
            self.compared.forward([SequenceChunk(prompt, 0, 0, TABLES[i], states=(span,))])

    def answers(self, sequences: Sequence[int]) -> None:
        lens = [self._lens[i] for i in sequences]
        spans = [
            StateSpan(1, self._place(i, length), self._place(i, length + 1))
            for i, length in zip(sequences, lens, strict=True)
        ]
        tables = [TABLES[i] for i in sequences]
        self.compared.decode([7 + i for i in sequences], lens, [0] * len(lens), tables, states=spans)
        for i in sequences:
            self._lens[i] += 1


def language(device: SimulatedCuda, config: hf.PretrainedConfig) -> LanguageModel:
    torch.manual_seed(0)
    whole = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    parts = probed_parts(device.put(whole.eval()), 16, "auto")
    return LanguageModel(replace(parts, attention=RecordedAttention()))


def on_kernels(model: LanguageModel) -> list[StatefulForward]:
    """Every mixer by its kernel, uncompared: launches compute nothing here."""
    assert model.states is not None
    for forward in model.states.forwards:
        forward.kernel = kernel_of(forward)
        assert forward.kernel is not None
    return model.states.forwards


DELTA = (
    ("convolve", "few_tokens", "gated_norm"),
    ("convolve", "few_tokens", "chunk_systems", "solve_systems", "many_tokens", "gated_norm"),
)
STATE_SPACE = (
    ("convolve", "few_tokens", "gated_norm"),
    ("convolve", "few_tokens", "chunk_scores", "many_tokens", "gated_norm"),
)
CHANNELS = (DELTA[0], (*DELTA[0][:2], "channel_sums", "channel_systems", *DELTA[1][3:]))
CONVOLUTION = ("short_convolution",), ("short_convolution",)


@pytest.mark.parametrize(
    ("name", "names"),
    [("qwen3_5_text", DELTA), ("falcon_h1", STATE_SPACE), ("kimi_linear", CHANNELS), ("lfm2", CONVOLUTION)],
)
def test_kernels_of_mixers_are_launched_once_for_all_sequences(name, names, device) -> None:
    """Of answers, and of a step with prompts, which is recorded, too. What they compute:
    test_cuda_mixers.py."""
    model = language(device, (CONFIGS | OTHERS)[name])
    with strict_triton() as launches:
        num_mixers = len(on_kernels(model))
        size, first = model.state_blocks, 1 + max(map(max, TABLES))
        places = [range(first + i * size, first + (i + 1) * size) for i in range(8)]
        compared = Compared(model, SIZES, first + 8 * size)
        assert compared.graphed.records_mixed
        spans = [StateSpan(1, places[2 * i], places[2 * i + 1]) for i in range(2)]
        chunks = [SequenceChunk([7], 3 + i, 3 + i, TABLES[i], states=(span,)) for i, span in enumerate(spans)]
        cut = (StateSpan(16, (), places[5]), StateSpan(4, places[5], places[6]))
        prompts = [SequenceChunk(list(range(20)), 0, 0, TABLES[2], states=cut)]
        prompts.append(SequenceChunk(list(range(5)), 0, 0, TABLES[3], states=(StateSpan(5, (), places[7]),)))
        grids = []
        for step, expected in ((chunks, names[0]), ([*chunks, *prompts], names[1])):
            launches.clear()
            model.forward(step, compared.kvs[0])
            assert [each.kernel for each in launches] == [*expected] * num_mixers
            grids.append(launches[0].grid)
            if step is not chunks:  # other numbers of tokens and spans are no other kernels
                variants = [each.variant for each in launches]
                launches.clear()
                model.forward([*prompts, chunks[0]], compared.kvs[0])
                assert [each.variant for each in launches] == variants
        assert grids[1][0] == (27 if name == "lfm2" else 4)  # of 8 tokens; tokens
        tables = [TABLES[i] for i in range(2)]
        launches.clear()
        compared.graphed.decode([7, 7], [3, 4], [0, 0], tables, compared.kvs[0], states=spans)
        assert launches == []  # a replay


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_recorded_answers_of_a_hybrid_are_those_of_its_modules(name: str, device, caplog) -> None:
    """Answers alone and with padding; prompts run unrecorded, as their mixers have no kernels here."""
    model = language(device, CONFIGS[name])
    sequences = Sequences(model)
    compared = sequences.compared
    assert "steps with prompts are not recorded: the states of prompts" in caplog.text
    assert len(compared.replays) == len(SIZES.answers) and not compared.graphed.records_mixed
    sequences.prompts()
    assert compared.num_forwards == len(PROMPTS)
    for step in ([0, 1, 2], [1], [2, 0], [0, 1, 2]):
        sequences.answers(step)
    compared.check_kv()
