import torch
from transformers import UnbatchedClassifierFreeGuidanceLogitsProcessor
from transformers.utils import ModelOutput

from cluster.model.guidance import forbid, guide


def test_guided_logits_are_those_of_transformers():
    torch.manual_seed(0)
    logits, negative = torch.randn(3, 11), torch.randn(3, 11)

    def model(*_args, **_kwargs):
        return ModelOutput(logits=negative[:, None])

    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, model)
    expected = processor(torch.zeros(3, 1, dtype=torch.int64), logits.clone())
    torch.testing.assert_close(guide(logits, negative, 1.7), expected)


def test_a_scale_of_one_leaves_the_distribution_alone():
    logits, negative = torch.randn(2, 7), torch.randn(2, 7)
    torch.testing.assert_close(guide(logits, negative, 1.0).softmax(-1), logits.softmax(-1))


def test_forbidden_tokens_cannot_be_drawn_and_the_others_stay():
    logits = torch.arange(8.0).view(2, 4)
    out = forbid(logits.clone(), [(3, 1), ()])
    assert out[0].tolist() == [0.0, float("-inf"), 2.0, float("-inf")] and out[1].equal(logits[1])


def test_forbidden_tokens_outside_the_vocabulary_are_ignored():
    logits = torch.zeros(3, 4)
    out = forbid(logits, [(4, 2_000_000_000, 2**62), (-1, -4, 2), (2**80,)])
    assert [row.isinf().nonzero().flatten().tolist() for row in out] == [[], [2], []]
