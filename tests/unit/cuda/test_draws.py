"""Draws on a simulated GPU: the same tokens as on the CPU, in few launches whatever the number of rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cluster.engine.drawing import Drawer
from cluster.engine.state import AnswerChoice, LanguageRequest
from cluster.engine.timing import Stopwatch
from cluster.model.changes import Changes, guide, guide_rows
from cluster.model.cuda.draw import GREEDY
from cluster.model.logprobs import PromptScores, RawLogprobs
from cluster.model.sampling import gumbel_noise, keep_likely, sample
from cluster.types.request import (
    GenerateRequest,
    Guidance,
    LogitChanges,
    Prompt,
    SamplingParams,
    StopParams,
)
from tests.fakes.cuda_device import SimulatedCuda
from tests.unit.engine.test_drawing import Digits

VOCABULARY = 1 << 15

MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.8, seed=1),
    SamplingParams(temperature=1.3, top_k=50, seed=2),
    SamplingParams(temperature=1.0, top_p=0.7, seed=3),
    SamplingParams(temperature=1.0, min_p=0.05, seed=4),
]


def logits_of(num_rows: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCABULARY, generator=torch.Generator().manual_seed(5))


def test_the_same_tokens_are_drawn_as_on_the_cpu(device: SimulatedCuda) -> None:
    logits, positions = logits_of(len(MIXED)), list(range(len(MIXED)))
    assert sample(logits.to("cuda"), MIXED, positions) == sample(logits, MIXED, positions)


def test_many_rows_are_drawn_in_as_many_launches_as_few(device: SimulatedCuda) -> None:
    counts = []
    for num_rows in (2, 40):
        logits, before = logits_of(num_rows).to("cuda"), len(device.operators)
        sample(logits, [MIXED[1]] * num_rows, range(num_rows))
        counts.append(len(device.operators) - before)
    assert counts[0] == counts[1]


def test_kernels_are_given_each_row_once_and_the_tokens_are_in_order(
    device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch in the place of the kernels, which are tried in tests/unit/model/test_cuda_draw.py."""
    calls = []

    def draw_tokens(logits, records):
        calls.append(len(records))
        keys, temperatures = torch.tensor(records["key"].tolist(), device="cuda"), records["temperature"]
        asked = [
            SamplingParams(float(t), 1.0 - float(p), int(k), float(m))
            for t, p, k, m in zip(
                temperatures, records["limit"], records["top_k"], records["min_p"], strict=True
            )
        ]
        noise = gumbel_noise(keys, logits.shape[-1])
        rows = []
        for row, p in enumerate(asked):
            is_greedy = p.temperature == GREEDY
            scores = (
                logits[row : row + 1]
                if is_greedy
                else keep_likely(logits[row : row + 1] / p.temperature, [p])
            )
            rows.append(scores.double() + (0.0 if is_greedy else noise[row]))
        return torch.cat(rows).argmax(-1)

    logits, params = logits_of(2 * len(MIXED)), [*MIXED, *MIXED[::-1]]
    wanted = sample(logits, params, range(len(params)))
    monkeypatch.setattr("cluster.model.sampling.draw_tokens", draw_tokens)
    monkeypatch.setattr("cluster.model.sampling._kernels_draw", lambda _: True)
    assert sample(logits.to("cuda"), params, range(len(params))) == wanted
    assert calls == [len(params)]  # whatever their filters


def test_changes_of_logits_are_those_of_the_cpu(device: SimulatedCuda) -> None:
    ids, counts = np.array([3, 9, 40]), np.array([0, 2, 1], dtype=np.float32)
    changes = LogitChanges(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2)
    masks = np.full((2, 4), 0x55555555, dtype=np.int32)
    found = []
    for where in ("cpu", "cuda"):
        logits = logits_of(4)[:, :200].clone().to(where)
        guided = guide_rows(logits, [(0, 0, 1.5), (1, 2, 0.5)])
        for row, scale in enumerate((1.5, 0.5)):
            assert torch.equal(guided[row], guide(logits[2 * row], logits[2 * row + 1], scale))
        Changes(
            bias=[(1, ids, np.array([1.5, -2.0, 0.25], dtype=np.float32))],
            counted=[(0, ids, counts, changes)],
            forbidden=[(2, [1, 2, 999])],
            allowed=[(3, ids), (0, ids)],
            masked=[1, 0],
            masks=masks,
        ).apply(logits)
        found.append([logits.cpu(), guided.cpu()])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


def test_log_probabilities_are_those_of_the_cpu(device: SimulatedCuda) -> None:
    found = []
    for where in ("cpu", "cuda"):
        logits = logits_of(3).to(where)
        raw = RawLogprobs(logits, {0: (2, 3), 1: (0, 0)}, [0, 2, 1])
        told = raw.reading(torch.tensor([7, 0, 8]).to(where))()
        scores = PromptScores([0, 1, 2], [4, 5, 6], 2)
        scores.take(logits)
        found.append([told[0], told[2], *scores.found()])
    for ours, theirs in zip(*found, strict=True):
        assert ours.top_ids == theirs.top_ids
        assert [ours.drawn, *ours.top] == pytest.approx([theirs.drawn, *theirs.top], abs=1e-5)


class OddTokens(Digits):
    """Late in every second step, for the first choice."""

    def take(self) -> tuple[np.ndarray, frozenset[int]]:
        masks, _ = super().take()
        return masks, frozenset({0} if self.num_started % 2 == 0 else ())


def all_kinds(num_rows: int) -> list[tuple[LanguageRequest, AnswerChoice]]:
    """Choices with everything that changes logits and reads log-probabilities; half of them have guidance."""
    changes = LogitChanges(
        bias=((4, 1.5), (11, 2.0)), repetition_penalty=1.2, frequency_penalty=0.4, presence_penalty=-0.3,
        bad_words=((8, 9),), allowed_token_ids=(6, 9, 11, 39),
    )  # fmt: skip
    pairs = []
    for row in range(num_rows):
        asked = GenerateRequest(
            f"r{row}", Prompt((3, 7, 7, 21, row)), (SamplingParams(),), StopParams(24, (11,), 10),
            guidance=Guidance(1.5, Prompt((3, row))) if row % 2 else None, changes=changes,
            num_logprobs=row % 6,
        )  # fmt: skip
        request = LanguageRequest(asked, 1, 1.0, 0.0, Stopwatch(0.0), computes=False, sends=False)
        (choice,) = request.choices
        choice.append(8)
        pairs.append((request, choice))
    return pairs


@pytest.mark.parametrize("num_steps", [1, 2])
def test_what_changes_a_draw_is_enqueued_without_waiting_in_as_many_operations_for_all_rows(
    num_steps: int, device: SimulatedCuda
) -> None:
    """Its results, log-probabilities included, are read behind what `on_drawn` enqueues."""
    counts = []
    for num_rows in (4, 16):
        logits, found = logits_of(num_rows + num_rows // 2)[:, :64].clone(), []
        for where in ("cpu", "cuda"):
            choices, drawer = all_kinds(num_rows), Drawer(OddTokens())
            for _ in range(num_steps):
                drawer.begin(choices)
            there = logits.clone().to(where)
            num_syncs, before, at = device.num_syncs, len(device.operators), []
            step = drawer.next_tokens(there, choices, lambda _, late, at=at: at.append(device.num_syncs))
            found.append(step)
        assert at == [num_syncs] and device.num_syncs == num_syncs + 2  # copies enqueued before `on_drawn`
        counts.append(len(device.operators) - before)
        ours, theirs = found
        assert ours.tokens[num_steps > 1 :] == theirs.tokens[num_steps > 1 :] and ours.late == theirs.late
        assert {i: (each.top_ids, each.top) for i, each in ours.logprobs.items()} == {
            i: (each.top_ids, each.top) for i, each in theirs.logprobs.items()
        }
        assert len(ours.late) == num_steps - 1 and len(ours.logprobs) == num_rows
    assert counts[0] == counts[1]
