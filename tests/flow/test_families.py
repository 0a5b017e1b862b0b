"""The law of the house for the model layer: the encoder half and the language half together give `generate`'s
tokens, for every family, chunk size, packing and cache state. Plus: half loading, refusals, and the
checkpoint that is shipped."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from cluster.engine.runner import LanguageRunner
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest, PromptWork
from cluster.engine.tables import uncut_spans
from cluster.engine.timing import Stopwatch
from cluster.errors import InternalError
from cluster.kvcache.memory import BlockMemory
from cluster.model.encoder import EncoderModel
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.fakes.slow_params import often
from tests.flow.state_pair import StatePair
from tests.flow.tiny_media_models import HYBRIDS, MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES, TinyCase, TinyRequest

NUM_TOKENS = 12
BLOCK_SIZE = 16
FAMILIES = [*TEXT_FAMILIES, *MEDIA_FAMILIES]
# By what is kept of a token and how it is read: windows, capped scores, sinks, latent heads, scaled queries,
# KV of other layers, positions in several dimensions, deep stacks, spans in both directions.
KEPT = (
    "llama", "mistral_window", "gemma2_softcap_window", "gemma3_window", "gpt_oss_sinks_window",
    "deepseek_v3_mla", "mistral4_mla", "gemma4_layer_inputs", "llama4_chunks",
    "qwen2_vl", "qwen3_vl", "qwen3_omni", "hunyuan_vl", "kimi_k25",
    "muse_glimmer", "gemma3", "gemma4", "step3p7",
)  # fmt: skip
# states are not moved by the tests below: tests/flow/test_hybrids.py
of_those_kept_differently = pytest.mark.parametrize(
    "family", often([name for name in FAMILIES if name not in HYBRIDS], KEPT), indirect=True, scope="module"
)


@dataclass
class Split:
    """A tiny model in two halves, and what the whole of it generated."""

    case: TinyCase
    expected: list[list[int]]  # per request
    encoder: EncoderModel | None
    language: LanguageModel
    text: TinyRequest | None = None  # with its answer
    expected_text: list[int] = field(default_factory=list)


@dataclass
class Sequence:
    """One request on its way through prefill and decode."""

    request: TinyRequest
    features: list[Tensor]  # per media item
    positions: Tensor
    delta: int
    table: list[int]
    spans: tuple[tuple[int, int], ...]
    states: StatePair
    context_len: int = 0
    tokens: list[int] = field(default_factory=list)
    adapter: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.token_ids)

    def chunk(self, size: int) -> SequenceChunk:
        """The next `size` tokens, or a few more where the family forbids to cut a span."""
        start, end = self.context_len, min(self.context_len + size, self.num_prompt_tokens)
        end = max([end, *(b for a, b in self.spans if a < end < b)])
        slices = []
        for item, rows in zip(self.request.placed, self.features, strict=True):
            for token, row, count in item.pieces(start, end):
                slices.append(FeatureSlice(token - start, rows[row : row + count]))
        positions = self.positions[..., start:end]
        return SequenceChunk(
            self.request.token_ids[start:end], positions, start, self.table, tuple(slices), self.spans,
            adapter=self.adapter, states=self.states.of(end - start),
        )  # fmt: skip

    def answer_chunk(self) -> SequenceChunk:
        """The last token."""
        at = self.context_len
        return SequenceChunk(self.tokens[-1:], at + self.delta, at, self.table, states=self.states.of(1))


def generate(case: TinyCase, request: TinyRequest, num_tokens: int = NUM_TOKENS) -> list[int]:
    ids = torch.tensor([request.token_ids])
    kwargs = {key: value.clone() for key, value in request.generate_kwargs.items()}
    model: Any = case.model
    with torch.no_grad():
        out = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            **kwargs,
        )
    return out[0, ids.shape[1] :].tolist()


def split(case: TinyCase) -> Split:
    expected = [generate(case, request) for request in case.requests]
    has_media = any(request.placed for request in case.requests)
    encoder = EncoderModel.from_model(case.model) if has_media else None
    text = TinyRequest().text(53, seed=9)
    expected_text = generate(case, text)
    language = LanguageModel.from_model(case.model, block_size=BLOCK_SIZE)
    return Split(case, expected, encoder, language, text, expected_text)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[Split]:
    builder = TEXT_FAMILIES.get(request.param) or MEDIA_FAMILIES[request.param]
    yield split(builder())


def memory(language: LanguageModel, num_blocks: int = 256) -> BlockMemory:
    """Behind `num_blocks` there is room for the states of twelve sequences."""
    kv = BlockMemory(language.kv_layout, num_blocks + 24 * language.state_blocks)
    for segment in kv.segments:
        segment.fill_(1e4)  # a row that is read before it is written, or not masked, must show
    return kv


def admit(halves: Split, first_block: int = 0) -> list[Sequence]:
    """All requests of the case, encoded, with blocks for prompt and answer."""
    sequences, next_block = [], first_block
    for request in halves.case.requests:
        features = [
            halves.encoder.encode(modality, [item])[0] for modality, item in request.items if halves.encoder
        ]
        positions = halves.language.positions(request.prompt)
        num_blocks = -(-(len(request.token_ids) + NUM_TOKENS) // BLOCK_SIZE)
        table = list(range(next_block, next_block + num_blocks))[::-1]
        next_block += num_blocks
        spans = uncut_spans(halves.language, request.prompt)
        states = StatePair(halves.language, 256 + 2 * len(sequences) * halves.language.state_blocks)
        ids, delta = positions.position_ids, positions.delta
        sequences.append(Sequence(request, features, ids, delta, table, spans, states))
    return sequences


def prefill(language: LanguageModel, kv: BlockMemory, sequences: list[Sequence], size: int) -> None:
    """Packed steps: each one takes the next chunk of every sequence that is not done."""
    while pending := [s for s in sequences if s.context_len < s.num_prompt_tokens]:
        chunks = [s.chunk(size) for s in pending]
        drawn = language.forward(chunks, kv).argmax(-1).tolist()
        for sequence, chunk, token in zip(pending, chunks, drawn, strict=True):
            sequence.context_len += len(chunk.token_ids)
            if sequence.context_len == sequence.num_prompt_tokens:
                sequence.tokens = [token]


def decode(language: LanguageModel, kv: BlockMemory, sequences: list[Sequence]) -> list[list[int]]:
    for _ in range(NUM_TOKENS - 1):
        if language.state_blocks:
            logits = language.forward([s.answer_chunk() for s in sequences], kv)
        else:
            logits = language.decode(
                [s.tokens[-1] for s in sequences],
                [s.context_len for s in sequences],
                [s.delta for s in sequences],
                [s.table for s in sequences],
                kv,
                [s.adapter for s in sequences],
            )
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.context_len += 1
            sequence.tokens.append(token)
    return [s.tokens for s in sequences]


@pytest.mark.parametrize("size", often([7, BLOCK_SIZE, 10_000], [7]))  # whole prompts: the next test
def test_packed_chunked_prefill_and_batched_decode_equal_generate(family: Split, size: int) -> None:
    kv = memory(family.language)
    sequences = admit(family)
    prefill(family.language, kv, sequences, size)
    assert decode(family.language, kv, sequences) == family.expected


@of_those_kept_differently
def test_a_prompt_on_cached_blocks_of_another_equals_generate(family: Split) -> None:
    kv = memory(family.language)
    owners, heirs = admit(family), admit(family, first_block=128)
    prefill(family.language, kv, owners, 10_000)
    for owner, heir in zip(owners, heirs, strict=True):
        num_shared = (owner.num_prompt_tokens - 1) // BLOCK_SIZE
        heir.table[:num_shared] = owner.table[:num_shared]
        heir.context_len = num_shared * BLOCK_SIZE
    prefill(family.language, kv, heirs, 10_000)
    assert decode(family.language, kv, heirs) == family.expected


@of_those_kept_differently
def test_kv_copied_to_other_blocks_of_a_second_memory_equals_generate(family: Split) -> None:
    source, target = memory(family.language), memory(family.language)
    sequences = admit(family)
    prefill(family.language, source, sequences, 10_000)
    for sequence in sequences:
        moved = [255 - block for block in sequence.table]
        for here, there in zip(source.segments, target.segments, strict=True):
            there[moved] = here[sequence.table]
        sequence.table = moved
    assert decode(family.language, target, sequences) == family.expected


@of_those_kept_differently
@pytest.mark.parametrize("size", often([7, BLOCK_SIZE, 53], [7]))
def test_a_text_that_decode_computes_in_stretches_equals_generate(family: Split, size: int) -> None:
    """Without a word about positions or spans from prefill."""
    assert family.text is not None
    kv, token_ids, table = memory(family.language), family.text.token_ids, [9, 4, 7, 2, 5]
    asked = GenerateRequest("r", Prompt(tuple(token_ids)), (SamplingParams(),), StopParams(NUM_TOKENS))
    request = LanguageRequest(asked, 1, 1.0, 0.0, Stopwatch(0.0), computes=False, sends=False)
    no_features: Any = None
    runner = LanguageRunner(family.language, family.language, kv, no_features)
    end = TokenSequence("r/0", asked.prompt, block_table=table)
    request.add_prompt(end)
    while end.num_missing_tokens:
        work = PromptWork(request, end, min(size, end.num_missing_tokens))
        (result,) = runner.run([work], lambda layer_idx, ready: None)
        end.computed(work.num_tokens, result.logits)
    (first,) = runner.first_tokens([request])
    states = StatePair(family.language, 256)
    sequence = Sequence(
        family.text, [], torch.empty(0), 0, table, (), states, len(token_ids), [*first.token_ids]
    )
    assert decode(family.language, kv, [sequence]) == [family.expected_text]


def test_each_layer_reports_once_after_its_kv_is_written(family: Split) -> None:
    kv, seen = memory(family.language), []
    sequence = admit(family)[-1]
    rows = slice(0, 1)

    def on_layer(layer_idx: int) -> None:
        written = kv.segments[2 * layer_idx + 1][sequence.table[0], rows]
        seen.append((layer_idx, bool((written != 1e4).all())))

    family.language.forward([sequence.chunk(10_000)], kv, on_layer)
    assert seen == [(i, True) for i in range(family.language.num_layers)]


@pytest.mark.parametrize("family", MEDIA_FAMILIES, indirect=True, scope="module")
def test_media_encoded_together_equal_media_encoded_alone(family: Split) -> None:
    encoder = family.encoder
    assert encoder is not None
    for modality in encoder.modalities:
        items = [item for request in family.case.requests for kind, item in request.items if kind is modality]
        together = encoder.encode(modality, items)
        for item, rows in zip(items, together, strict=True):
            alone = encoder.encode(modality, [item])[0]
            assert alone.shape[1] == encoder.feature_width
            torch.testing.assert_close(rows, alone, rtol=0, atol=1e-5)


def test_a_chunk_that_ends_inside_a_two_way_span_is_an_error() -> None:
    halves = split(MEDIA_FAMILIES["gemma3"]())
    sequence = admit(halves)[0]
    chunk = sequence.chunk(10_000)
    assert isinstance(chunk.position_ids, Tensor)
    cut = chunk.bidirectional_spans[0][0] + 3
    broken = SequenceChunk(
        chunk.token_ids[:cut], chunk.position_ids[:cut], 0, chunk.block_table, (), chunk.bidirectional_spans
    )
    with pytest.raises(InternalError, match="inside a media span"):
        halves.language.forward([broken], memory(halves.language))
