from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import ModelOutput

from cluster.model.changes import (
    Changes,
    add_bias,
    allow,
    apply_masks,
    forbid,
    guide,
    penalize,
)
from cluster.model.logprobs import RawLogprobs
from cluster.model.token_counts import TokenCounts
from cluster.types.request import LogitChanges

NONE = float("-inf")


def long_tensor(rows: list[list[int]]) -> Any:
    """As the type checker wants it: a class that no tensor has."""
    return torch.tensor(rows)


def test_guided_logits_are_those_of_transformers():
    torch.manual_seed(0)
    logits, negative = torch.randn(3, 11), torch.randn(3, 11)

    def model(*_args, **_kwargs):
        return ModelOutput(logits=negative[:, None])

    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model)
    expected = processor(long_tensor([[0]] * 3), logits.clone())
    torch.testing.assert_close(guide(logits, negative, 1.7), expected)


def test_a_scale_of_one_leaves_the_distribution_alone():
    logits, negative = torch.randn(2, 7), torch.randn(2, 7)
    torch.testing.assert_close(guide(logits, negative, 1.0).softmax(-1), logits.softmax(-1))


def test_forbidden_tokens_cannot_be_drawn_and_the_others_stay():
    logits = torch.arange(8.0).view(2, 4)
    out = forbid(logits.clone(), [(0, (3, 1)), (1, ())])
    assert out[0].tolist() == [0.0, NONE, 2.0, NONE] and out[1].equal(logits[1])


def test_forbidden_tokens_outside_the_vocabulary_are_ignored():
    logits = torch.zeros(3, 4)
    out = forbid(logits, [(0, (4, 2_000_000_000, 2**62)), (1, (-1, -4, 2)), (2, (2**80,))])
    assert [row.isinf().nonzero().flatten().tolist() for row in out] == [[], [2], []]


def test_a_bias_is_that_of_transformers():
    logits = torch.randn(2, 9)
    expected = SequenceBiasLogitsProcessor([[[3], 1.5], [[8], -100.0]])(long_tensor([[0]]), logits[1:])
    changed = logits.clone()
    add_bias(changed, [(1, np.array([3, 8]), np.array([1.5, -100.0], dtype=np.float32))])
    assert changed[1:].equal(expected) and changed[0].equal(logits[0])


def penalized(
    logits: torch.Tensor, prompt: list[int], answer: list[int], changes: LogitChanges
) -> torch.Tensor:
    counts = TokenCounts(prompt if changes.repetition_penalty != 1 else (), answer)
    out = logits.clone()
    penalize(out, [(0, *next(counts.rows(())), changes)])
    together = logits.repeat(2, 1)
    Changes(counted=[(1, *next(counts.rows(())), changes)]).apply_together(together)
    assert together[1:].equal(out) and together[:1].equal(logits)
    return out


def test_the_repetition_penalty_is_that_of_transformers():
    logits = torch.randn(1, 50)
    prompt, answer = [4, 9, 4, 49], [9, 0, 17, 17]
    processor = RepetitionPenaltyLogitsProcessor(1.3)
    expected = processor(long_tensor([prompt + answer]), logits.clone())
    assert penalized(logits, prompt, answer, LogitChanges(repetition_penalty=1.3)).equal(expected)


def test_frequency_and_presence_penalties_count_the_answer_alone():
    logits = torch.randn(1, 50)
    prompt, answer = [4, 9, 4, 49], [9, 0, 17, 17]
    counts = torch.bincount(torch.tensor(answer), minlength=50)
    expected = logits - counts * 0.7 - (counts > 0) * -0.4
    changes = LogitChanges(frequency_penalty=0.7, presence_penalty=-0.4)
    torch.testing.assert_close(penalized(logits, prompt, answer, changes), expected)
    all_three = penalized(logits, prompt, answer, LogitChanges(repetition_penalty=2.0, frequency_penalty=0.7))
    repeated = RepetitionPenaltyLogitsProcessor(2.0)(long_tensor([prompt + answer]), logits.clone())
    torch.testing.assert_close(all_three, repeated - counts * 0.7)


def test_counts_behind_drafts_are_those_of_the_tokens_one_by_one():
    tokens = np.random.default_rng(3).integers(0, 300, 400).tolist()
    prompt, answer, drafts = tokens[:90], tokens[90:380], tokens[380:]
    counts = TokenCounts(prompt, answer[:200])
    for token_id in answer[200:]:
        counts.add(token_id)
    for num_drafts, (ids, generated) in enumerate(counts.rows(drafts)):
        behind = answer + drafts[:num_drafts]
        assert sorted(ids.tolist()) == sorted({*prompt, *behind})
        assert dict(zip(ids.tolist(), generated.tolist(), strict=True)) == {
            token_id: behind.count(token_id) for token_id in {*prompt, *behind}
        }


def test_only_allowed_tokens_keep_their_logits():
    logits = torch.randn(3, 6)
    out = logits.clone()
    allow(out, [(1, np.array([4, 0]))])
    assert out[1].tolist() == [logits[1, 0], NONE, NONE, NONE, logits[1, 4], NONE]
    assert out[0].equal(logits[0]) and out[2].equal(logits[2])


def test_a_mask_keeps_the_tokens_whose_bits_are_set():
    allowed = torch.rand(2, 70) < 0.5
    masks = np.packbits(np.pad(allowed.numpy(), ((0, 0), (0, 26))), axis=1, bitorder="little").view(np.int32)
    for vocab_size in (70, 96, 130):  # tokens behind the mask cannot be drawn
        logits = torch.randn(3, vocab_size)
        out, together = logits.clone(), logits.clone()
        apply_masks(out, [2, 0], masks)
        Changes(masked=[2, 0], masks=masks).apply_together(together)
        assert together.equal(out)
        for row, mask in ((2, allowed[0]), (0, allowed[1])):
            assert (out[row] > NONE)[:70].equal(mask) and (out[row, 70:] == NONE).all()
            assert out[row][out[row] > NONE].equal(logits[row, :70][mask])
        assert out[1].equal(logits[1])


@pytest.mark.parametrize("together", [False, True])
def test_the_most_probable_tokens_are_found_in_their_order(together):
    logits = torch.randn(3, 1000).round(decimals=1)  # many are equal
    logits[2, 4:] = NONE
    wanted, drawn = {5: (1, 20), 6: (2, 3), 7: (0, 0)}, [3, 1, 999]
    told = RawLogprobs(logits, wanted, [5, 6, 7], together=together).reading(torch.tensor(drawn))()
    for i, (row, num) in enumerate(wanted.values()):
        own = logits[row].log_softmax(-1)
        assert told[i].drawn == float(own[drawn[i]])
        assert list(told[i].top) == own.topk(num).values.tolist() == own[list(told[i].top_ids)].tolist()
        assert len(set(told[i].top_ids)) == num
