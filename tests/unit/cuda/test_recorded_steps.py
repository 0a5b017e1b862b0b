"""Steps of any kind as CUDA graphs, on a simulated GPU: a replay gives what the model gives unrecorded. In a
recording, a read on the host, a copy between the memories or a wait is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.engine.features import FeatureStore
from cluster.engine.runner import LanguageRunner
from cluster.engine.sequence import TokenSequence
from cluster.engine.speculation import DraftModelProposer
from cluster.engine.state import LanguageRequest, PromptWork
from cluster.engine.timing import Stopwatch
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention import PagedBatch
from cluster.model.cuda import graphs
from cluster.model.cuda.graphs import (
    GRAPH_BYTES,
    MIXED_TOKENS,
    GraphedModel,
    RecordedSizes,
    Recording,
    recording_of,
)
from cluster.model.cuda.step_inputs import StepSizes, answers_of
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from cluster.model.logprobs import PromptScores
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.fakes.slow_params import often
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES, TinyCase
from tests.gpu.cases import check_recorded_steps
from tests.unit.cuda.recorded_and_plain import NUM_BLOCKS, PROMPTS, SIZES, TABLES, Compared
from tests.unit.engine.drafting import Request as DraftedRequest


def language(
    device: SimulatedCuda,
    whole: hf.PreTrainedModel,
    kv_cache_dtype: Any = "auto",
    attention: RecordedAttention | None = None,
    decoder: Callable[[torch.nn.Module], Any] = lambda head: None,
) -> LanguageModel:
    parts = probed_parts(device.put(whole.eval()), 16, kv_cache_dtype)
    attention = attention or RecordedAttention()
    return LanguageModel(replace(parts, attention=attention, decoder=decoder(parts.head)))


def text_model(
    device: SimulatedCuda, kv_cache_dtype="auto", max_model_len: int = 96, **parts: Any
) -> LanguageModel:
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=max_model_len,
        initializer_range=0.15, eos_token_id=None,
    )  # fmt: skip
    return language(device, hf.Qwen3ForCausalLM(config), kv_cache_dtype, **parts)


def mixed_steps() -> Iterator[list[SequenceChunk]]:
    """Prompts side by side; the rest of one beside an answer and drafts, of which one prompt goes on."""
    first = [SequenceChunk(PROMPTS[i], 0, 0, TABLES[i]) for i in (1, 2)]
    yield [*first, SequenceChunk(PROMPTS[0][:10], 0, 0, TABLES[0], num_logits=0)]
    answer = SequenceChunk([7], 3, 3, TABLES[1])
    drafts = SequenceChunk([7, 8, 9], 11, 11, TABLES[2], num_logits=3)
    yield [answer, drafts, SequenceChunk(PROMPTS[0][10:18], 10, 10, TABLES[0], num_logits=0)]
    yield [SequenceChunk([3, 4], 12, 12, TABLES[2], num_logits=2)]  # drafts alone
    yield [SequenceChunk(PROMPTS[0][18:], 18, 18, TABLES[0])]


ANSWERS = ([9, 10, 11], [20, 4, 14], [0, 0, 0], TABLES[:3])
TEXTS = ("gemma3_window", "gpt_oss_sinks_window", "gemma4_layer_inputs", "gemma2_softcap_window")


@pytest.mark.parametrize("name", often(TEXTS, TEXTS[:3]))
def test_a_replayed_mixed_step_equals_the_unrecorded_one(name: str, device: SimulatedCuda) -> None:
    compared = Compared(language(device, TEXT_FAMILIES[name]().model))
    for chunks in mixed_steps():
        compared.forward(chunks)
    compared.decode(*ANSWERS)
    compared.check_kv()
    assert compared.num_forwards == 0


def test_a_replayed_step_writes_and_reads_quantised_kv(device: SimulatedCuda) -> None:
    compared = Compared(text_model(device, "int8"))
    for chunks in mixed_steps():
        compared.forward(chunks)
    assert compared.num_forwards == 0


MEDIA_SIZES = RecordedSizes([answers_of(2)], [StepSizes(128, 4, 4)])


def media_chunks(model: LanguageModel, case: TinyCase) -> list[SequenceChunk]:
    """The whole prompts, with random embeddings."""
    generator, chunks = torch.Generator().manual_seed(0), []
    for table, request in zip(TABLES, case.requests, strict=False):
        prompt: Prompt = request.prompt
        ranges = [(start, count) for item in prompt.media for start, count in item.ranges]
        features = tuple(
            FeatureSlice(start, torch.randn(count, model.feature_width, generator=generator))
            for start, count in ranges
        )
        spans = tuple((start, start + count) for start, count in ranges) if model.chunk_cut_spans else ()
        positions = model.positions(prompt).position_ids
        chunks.append(SequenceChunk(prompt.token_ids, positions, 0, table, features, spans))
    return chunks


# two-way spans, in all layers and in those with a window; three axes; read as zero; inputs of layers
MEDIA = ("gemma3", "gemma4", "qwen2_5_vl", "kimi_k25", "gemma4_small")


@pytest.mark.parametrize("name", often(MEDIA, ("gemma3", "qwen2_5_vl")))
def test_media_are_placed_before_the_replay(name: str, device: SimulatedCuda) -> None:
    case = MEDIA_FAMILIES[name]()
    model = language(device, case.model)
    compared = Compared(model, MEDIA_SIZES)
    chunks = media_chunks(model, case)
    compared.forward([*chunks[:1], SequenceChunk([5, 6, 7], 0, 0, TABLES[3])])
    compared.forward([*chunks[1:2], SequenceChunk([8], 3, 3, TABLES[3])])
    compared.check_kv()
    assert compared.num_forwards == 0


def test_steps_are_not_recorded_if_one_layer_needs_the_host(device: SimulatedCuda) -> None:
    model = language(device, TEXT_FAMILIES["gemma4_layer_inputs"]().model)
    kv = BlockMemory(model.kv_layout, 1, "cuda")
    assert model.can_capture(kv)
    with mock.patch.object(RecordedAttention, "can_capture", lambda _, cache: cache.key.row_shape[1] < 32):
        assert not model.can_capture(kv)


def test_what_is_tried_on_a_gpu_holds_on_the_simulated_one(device: SimulatedCuda) -> None:
    model = text_model(device, max_model_len=256)
    check_recorded_steps(model, num_steps=2, tolerance=1e-4)


def test_what_earlier_steps_left_changes_no_bit_of_a_step(device: SimulatedCuda) -> None:
    """Padding is what the step before has left in the buffers, or zeros."""
    model = text_model(device)
    prompts, mixed, *_ = mixed_steps()
    fresh, used = Compared(model), Compared(model)
    long = [SequenceChunk(list(range(5, 36)), 0, 0, TABLES[3], num_logits=9)]
    for compared in (fresh, used):
        compared.forward(prompts)
    used.forward(long)
    assert torch.equal(fresh.forward(mixed), used.forward(mixed))
    used.forward(long)
    logits = [each.graphed.decode(*ANSWERS, each.kvs[0]).cpu() for each in (fresh, used)]
    assert torch.equal(*logits)


def test_a_step_is_one_copy_and_waits_for_none_but_the_last(device: SimulatedCuda, monkeypatch) -> None:
    compared = Compared(text_model(device))
    prompts, mixed, *_ = mixed_steps()
    kv = compared.kvs[0]
    compared.graphed.forward(prompts, kv)
    copies: list[int] = []
    crosses = device.crosses
    monkeypatch.setattr(
        device, "crosses", lambda asynchronous: copies.append(asynchronous) or crosses(asynchronous)
    )
    for step in (
        lambda: compared.graphed.forward(mixed, kv),
        lambda: compared.graphed.decode([9, 10], [40, 4], [0, 0], TABLES[:2], kv),
    ):
        copies.clear()
        before = device.num_syncs
        step()
        assert copies == [True]
        assert device.num_syncs - before == 1  # for the previous step's inputs, which have long been copied


def test_all_sizes_share_their_logits(device: SimulatedCuda) -> None:
    compared = Compared(text_model(device))
    with torch.inference_mode():
        replayed: list[Any] = [replay() for replay in compared.replays]
    assert len(replayed) == len(SIZES.answers) + len(SIZES.mixed)
    assert len({each.held.untyped_storage().data_ptr() for each in replayed}) == 1


class Decoder:
    """Implements `WholeDecoder`: the logits of a token are its embedding's, twice."""

    kernels_s = None

    def __init__(self, head: torch.nn.Module) -> None:
        self._head = head
        self.seen: list[tuple[torch.Size, torch.Size, int, bool]] = []

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        self.seen.append((embeds.shape, positions.shape, len(wanted), batch.device is not None))
        embeds.add_(embeds)
        return self._head(embeds[0, wanted]).float()


def test_recorded_steps_run_in_the_whole_decoder(device: SimulatedCuda) -> None:
    decoders: list[Decoder] = []
    model = text_model(device, decoder=lambda head: decoders.append(Decoder(head)) or decoders[0])
    (decoder,) = decoders
    compared = Compared(model)
    mixed = {((1, n, 32), (1, n), wanted, True) for n, wanted in ((8, 8), (32, 12))}
    assert {*decoder.seen} == mixed | {((1, 4, 32), (1, 4), 4, True)}
    for chunks in mixed_steps():
        compared.forward(chunks)
    compared.decode(*ANSWERS)
    assert compared.num_forwards == 0


FALLBACKS = {
    "scores": [SequenceChunk([1, 2, 3], 0, 0, TABLES[0], scores=PromptScores([0], [2], 1))],
    "broken positions": [SequenceChunk([1, 2, 3], torch.tensor([0, 0.5, 1]), 0, TABLES[0])],
    "positions of more axes": [SequenceChunk([1, 2], torch.zeros(3, 2, dtype=torch.int64), 0, TABLES[0])],
    "tokens": [SequenceChunk([1] * 33, 0, 0, TABLES[0])],
    "sequences": [SequenceChunk([1], 0, 0, TABLES[0], num_logits=0)] * 9,
    "wanted tokens": [SequenceChunk([1] * 13, 0, 0, TABLES[0], num_logits=13)],
}


def test_other_steps_run_unrecorded(device: SimulatedCuda) -> None:
    compared = Compared(text_model(device))
    model, kv, given = compared.model, compared.kvs[0], []
    model.forward = lambda *args: given.append(args)  # type: ignore[method-assign]
    for reason, chunks in FALLBACKS.items():
        compared.graphed.forward(chunks, kv)
        assert given.pop() == (chunks, kv, None), reason
    assert given == []


def test_a_step_whose_layers_report_runs_unrecorded(device: SimulatedCuda) -> None:
    compared = Compared(text_model(device))
    seen: list[int] = []
    compared.graphed.forward(
        [SequenceChunk([1, 2], 0, 0, TABLES[0])], compared.kvs[0], lambda i, ready=None, /: seen.append(i)
    )
    assert seen == list(range(compared.model.num_layers))


def test_a_step_with_more_partial_results_than_a_recorded_one_has_room_for_runs_unrecorded(
    device: SimulatedCuda,
) -> None:
    """Contexts of more than 256 tokens have two for each new token."""
    model, table = text_model(device, max_model_len=600), list(range(20))
    sizes = RecordedSizes([answers_of(2)], [StepSizes(8, 2, 2)])
    with mock.patch.object(graphs, "RECORDED_PLACES", 3):
        compared = Compared(model, sizes)
        for contexts, is_replayed in (([300, 20], True), ([20, 20], True), ([300, 300], False)):
            chunks = [SequenceChunk([5], length, length, table) for length in contexts]
            with mock.patch.object(model, "decode", wraps=model.decode) as decode:
                compared.decode([5, 6], contexts, [0, 0], [table, table])
            with mock.patch.object(model, "forward", wraps=model.forward) as forward:
                compared.forward(chunks)
            # the model that is compared with calls both, once
            assert decode.call_count == forward.call_count == 2 - is_replayed


def test_features_of_deeper_layers_run_unrecorded(device: SimulatedCuda) -> None:
    case = MEDIA_FAMILIES["qwen3_vl"]()
    model = language(device, case.model)
    compared = Compared(model, MEDIA_SIZES)
    compared.forward(media_chunks(model, case)[:1])
    assert compared.num_forwards == 1
    compared.forward([SequenceChunk([1, 2, 3], 0, 0, TABLES[1])])
    assert compared.num_forwards == 1


class Answering(RecordedAttention):
    """Steps with prompts ask the host for their sizes."""

    def attend(self, batch, *args) -> Tensor:
        if not batch.is_decode:
            max(batch.query_lens)
        return super().attend(batch, *args)


class Reading(RecordedAttention):
    """Steps with prompts read the device."""

    def attend(self, batch, *args) -> Tensor:
        if not batch.is_decode and batch.device is not None:
            batch.device.starts.tolist()
        return super().attend(batch, *args)


@pytest.mark.parametrize(("attention", "why"), [(Answering, "sizes"), (Reading, "synchronizing")])
def test_answers_stay_recorded_if_mixed_steps_cannot_be(attention, why, device, caplog) -> None:
    compared = Compared(text_model(device, attention=attention()))
    assert "steps with prompts are not recorded: " in caplog.text and why in caplog.text
    assert not compared.graphed.records_mixed and len(compared.replays) == len(SIZES.answers)
    for chunks in mixed_steps():
        compared.forward(chunks)
    assert compared.num_forwards == 4
    compared.decode(*ANSWERS)


def test_sizes_are_those_that_steps_can_have() -> None:
    def of(*limits: int) -> tuple[list[int], list[tuple[int, int, int]]]:
        sizes = RecordedSizes.up_to(*limits)
        mixed = [(each.num_tokens, each.num_rows, each.num_wanted) for each in sizes.mixed]
        return [each.num_rows for each in sizes.answers], mixed

    assert of(256, 0) == ([1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256], [])
    answers, mixed = of(64, 2048)
    assert answers == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert mixed == [(16, 16, 16), (32, 32, 32), (64, 64, 64), *((n, 80, 80) for n in MIXED_TOKENS[3:])]
    assert of(3, 20)[1] == [(16, 16, 16), (32, 19, 19)]
    assert of(3, 0, 4)[1] == [(16, 16, 16)]  # verified drafts alone
    assert of(64, 0, 4)[1][-1] == (320, 80, 320)


def test_padding_is_a_quarter_at_most_and_7_percent_on_average() -> None:
    """Of steps of 257 to 2,048 tokens, each as often as its logarithm is equally spread."""
    counts = np.arange(257, MIXED_TOKENS[-1] + 1)
    sizes = np.array(MIXED_TOKENS)
    padding = sizes[np.searchsorted(sizes, counts)] / counts - 1
    assert padding.max() <= 0.25 and np.average(padding, weights=1 / counts) <= 0.07


def test_the_memory_of_graphs_is_measured_on_the_largest_ones(device: SimulatedCuda, monkeypatch) -> None:
    """And freed again, before the KV is allocated."""
    model = text_model(device)
    reserved = [1 << 20]
    recorded: list[RecordedSizes] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: reserved[0])

    class Growing(GraphedModel):
        def __init__(self, model: Any, kv: BlockMemory, sizes: RecordedSizes, *rest: Any):
            super().__init__(model, kv, sizes, *rest)
            recorded.append(sizes)

        def warm_up(self) -> None:
            reserved[0] += 5 << 20
            super().warm_up()

    monkeypatch.setattr(graphs, "GraphedModel", Growing)
    recording = recording_of(model, SIZES)
    assert recording is not None and recording.sizes == SIZES
    assert recorded == [RecordedSizes(SIZES.answers[-1:], SIZES.mixed[-1:])]
    assert recording.num_bytes == (5 << 20) + 3 * GRAPH_BYTES


FEATURES = cast(FeatureStore, None)  # there are no media


def prompt_work(prompt: Sequence[int], table: list[int], *, sends: bool = False) -> PromptWork:
    asked = GenerateRequest("r", Prompt(tuple(prompt)), (SamplingParams(),), StopParams(2))
    request = LanguageRequest(asked, 1, 1.0, 0.0, Stopwatch(0.0), computes=True, sends=sends)
    sequence = TokenSequence("r/0", asked.prompt, block_table=table)
    request.add_prompt(sequence)
    return PromptWork(request, sequence, len(prompt))


@pytest.mark.parametrize("sends", [False, True])
def test_a_workers_step_is_recorded_if_it_sends_no_kv(sends: bool, device: SimulatedCuda) -> None:
    compared = Compared(text_model(device))
    layers: list[int] = []
    runner = LanguageRunner(compared.model, compared.graphed, compared.kvs[0], FEATURES)
    runner.run([prompt_work(PROMPTS[0], TABLES[0], sends=sends)], lambda layer, ready: layers.append(layer))
    assert layers == ([0, 1] if sends else [])


def test_the_logits_of_a_prompt_outlive_later_steps(device: SimulatedCuda) -> None:
    """They wait for the other prompts of their request."""
    compared = Compared(text_model(device))
    runner = LanguageRunner(compared.model, compared.graphed, compared.kvs[0], FEATURES)
    (first,) = runner.run([prompt_work(PROMPTS[0], TABLES[0])], lambda layer, ready: None)
    assert first.logits is not None
    before = first.logits.cpu()
    runner.run([prompt_work(PROMPTS[2], TABLES[2])], lambda layer, ready: None)
    assert torch.equal(first.logits.cpu(), before)


def test_a_draft_models_steps_are_recorded(device: SimulatedCuda) -> None:
    model = text_model(device)
    requests = [DraftedRequest(str(i), list(prompt)) for i, prompt in enumerate(PROMPTS)]
    plain = DraftModelProposer(model, model, NUM_BLOCKS).propose(requests, [2, 3, 1])
    recorded = DraftModelProposer(model, model, NUM_BLOCKS, recording=Recording(SIZES, 0, 1))
    model.forward = model.decode = None  # type: ignore[assignment, method-assign]
    assert recorded.propose(requests[:2], [2, 3]) == plain[:2]  # 23 tokens, then two at once
    assert recorded.propose(requests, [2, 3, 1]) == plain
    assert [len(guess) for guess in plain] == [2, 3, 1]
