"""Hidden rows of recorded steps, and a head that reads them, on a simulated GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as hf

from cluster.config.draft_heads import Eagle3Head
from cluster.engine.head_drafts import HeadProposer
from cluster.model.draft_head import DraftHead
from cluster.model.eagle3 import Eagle3Module
from cluster.model.hidden_rows import HiddenRows
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from cluster.model.probe import LayerShape
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.unit.cuda.recorded_and_plain import PROMPTS, TABLES, Compared
from tests.unit.engine.drafting import Request, known_of

CONFIG = hf.LlamaConfig(
    vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=96, initializer_range=0.15, eos_token_id=None,
)  # fmt: skip
LAYERS = (1, 0, 1)


@pytest.fixture
def target(device: SimulatedCuda) -> LanguageModel:
    torch.manual_seed(0)
    parts = probed_parts(device.put(hf.LlamaForCausalLM(CONFIG).eval()), 16, "auto")
    return LanguageModel(replace(parts, attention=RecordedAttention()))


@pytest.mark.parametrize("layers", [(), LAYERS], ids=["mtp", "eagle3"])
def test_a_replayed_step_keeps_the_rows_of_its_tokens(target: LanguageModel, layers: tuple[int, ...]) -> None:
    """More tokens than there is room for: the first are kept."""
    rows = HiddenRows(25, 32, target.dtype, target.device, layers)
    target.keep_rows(rows)
    compared = Compared(target)
    mixed = [SequenceChunk(PROMPTS[i], 0, 0, TABLES[i], num_logits=i) for i in (1, 0, 2)]
    steps = [
        (23, lambda model, kv: model.forward(mixed[:2], kv)),
        (3, lambda model, kv: model.decode([9, 10, 11], [3, 20, 0], [0] * 3, TABLES[:3], kv)),
        (25, lambda model, kv: model.forward(mixed, kv)),
    ]
    for count, step in steps:
        kept = []
        for model, kv in zip((compared.graphed, compared.model), compared.kvs, strict=True):
            step(model, kv)
            kept.append(rows.take(range(count)).cpu())
        assert kept[0].any(-1).all()
        torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-4)


def test_a_head_drafts_on_the_device(target: LanguageModel, device: SimulatedCuda) -> None:
    """From one prompt, then for two requests of different lengths."""
    rows = HiddenRows(64, 32, target.dtype, target.device, LAYERS)
    target.keep_rows(rows)
    torch.manual_seed(1)
    module = device.put(Eagle3Module(CONFIG, Eagle3Head(Path(), {}, LAYERS, 32, 100), 100).eval())
    head = DraftHead(module, target, LayerShape((1, 16), (1, 16), None), 2, 32)
    proposer, compared = HeadProposer(head, rows, 32), Compared(target)
    requests = [Request(str(i), list(PROMPTS[i])) for i in (0, 2)]
    counts = [len(request.token_ids) for request in requests]
    compared.graphed.forward([SequenceChunk(PROMPTS[i], 0, 0, TABLES[i]) for i in (0, 2)], compared.kvs[0])
    proposer.take(known_of(requests, [0, 0], counts, counts, is_prompt=True))
    for request in requests:
        request.token_ids.append(7)
    (first, second) = proposer.propose(requests, [4, 2])
    assert len(first) == 4 and len(second) == 2
    assert proposer.propose(requests, [4, 2]) == [[], []]  # no step has run since
