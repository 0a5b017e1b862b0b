"""Log-probabilities of a prompt's own tokens, found out by the forward that computes it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cluster.model import language
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.logprobs import PromptScores
from cluster.types.logprobs import TokenLogprobs
from tests.unit.model.test_mixed_steps import (
    PROMPT,
    PROMPT_TABLE,
    filled,
    model,  # noqa: F401 (the fixture)
    one_token_chunks,
)

ROWS, TARGETS = [0, 1, 2, 5, 6, 7, 8, 9], [21, 22, 23, 26, 27, 28, 29, 30]  # tokens 3 and 4 show media


class Watched(PromptScores):
    """Notes how many rows of logits are there at once."""

    def __init__(self, num_top: int):
        super().__init__(ROWS, TARGETS, num_top)
        self.sizes: list[int] = []

    def take(self, logits: torch.Tensor) -> None:
        self.sizes.append(len(logits))
        super().take(logits)


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_chunk_is_scored_in_pieces_and_nothing_else_changes(
    model: LanguageModel,  # noqa: F811
    num_top: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(language, "MAX_SCORED_ROWS", 3)
    everything = SequenceChunk(PROMPT, 0, 0, PROMPT_TABLE, num_logits=len(PROMPT))
    expected = model.forward([everything], filled(model)).log_softmax(-1)[ROWS]
    plain = SequenceChunk(PROMPT, 0, 0, PROMPT_TABLE)
    scores = Watched(num_top)
    scored = SequenceChunk(PROMPT, 0, 0, PROMPT_TABLE, scores=scores)
    before, after = filled(model), filled(model)
    logits = model.forward([*one_token_chunks(), plain], before)
    assert torch.equal(model.forward([*one_token_chunks(), scored], after), logits)
    assert torch.equal(before.buffer, after.buffer)
    assert scores.sizes == [3, 3, 2]
    drawn = torch.tensor([each.drawn for each in scores.found()])
    torch.testing.assert_close(drawn, expected[range(8), TARGETS], rtol=0, atol=1e-5)
    top = expected.topk(num_top)
    assert [list(each.top_ids) for each in scores.found()] == top.indices.tolist()
    values = torch.tensor([each.top for each in scores.found()])
    torch.testing.assert_close(values, top.values, rtol=0, atol=1e-5)


def test_rows_are_taken_in_the_order_of_their_targets() -> None:
    scores = PromptScores([0, 1], [1, 0], 1)
    for row in torch.tensor([[[0.0, -torch.inf]], [[-1.0, -1.0]]]):
        scores.take(row)
    half: Any = pytest.approx(-0.6931472)
    assert scores.found() == [TokenLogprobs(-torch.inf, (0,), (0.0,)), TokenLogprobs(half, (0,), (half,))]
