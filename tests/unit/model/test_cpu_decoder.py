"""All native layers of a model with its last norm and head in one call: bit by bit what the layers give one
by one, announced layer by layer; and which models are not run so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.model.attention import PagedBatch
from cluster.model.cpu.layer_search import CpuLayerKernels
from cluster.model.cpu.library import Kernels
from cluster.model.layers.search import whole_decoder
from tests.unit.model.native_kernels import best_kernels, each_dtype, each_variant, needs_kernels
from tests.unit.model.test_cpu_layer import (
    _TINY,
    FAMILIES,
    STEPS,
    Paged,
    inputs,
    tiny,
)

VOCABULARY = 131
_MIXED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
MODELS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    **FAMILIES,
    "qwen2, some windows": lambda: hf.Qwen2Model(hf.Qwen2Config(**_TINY, **_MIXED)),
}

pytestmark = [needs_kernels, pytest.mark.usefixtures("seeded")]


@dataclass
class Model:
    """A text model of native layers, its packed head, and the decoder that runs both in one call."""

    paged: Paged
    head: Any
    decoder: Any  # WholeDecoder, or None

    def separately(self, step: PagedBatch, positions: Tensor, x: Tensor, wanted: Tensor) -> Tensor:
        hidden = self.paged.text(
            inputs_embeds=x[None], position_ids=positions, use_cache=False, paged=(step, self.paged.backend)
        ).last_hidden_state[0]
        return self.head(hidden[wanted]).float()

    def in_one_call(self, step: PagedBatch, positions: Tensor, x: Tensor, wanted: Tensor) -> Tensor:
        return self.decoder.logits(x[None].clone(), positions, step, wanted)


def native(text: hf.PreTrainedModel, kernels: Kernels = best_kernels, **options: Any) -> Model:
    """`options`: kv_cache_dtype, weight_dtype."""
    weights = {"weight_dtype": options.get("weight_dtype", "auto")}
    paged = Paged(text, kernels, options.get("kv_cache_dtype", "auto")).optimised(kernels, **weights)
    linear = nn.Linear(text.config.hidden_size, VOCABULARY, bias=False).to(text.dtype).eval()
    ours = CpuLayerKernels(kernels, **weights)
    head = ours.replace_modules(paged.text, linear)
    assert head is not None
    decoder = whole_decoder(paged.text, head, ours, paged.trial())
    return Model(paged, head, decoder)


def check_bits(ours: Model) -> None:
    """In prefill chunks and decode: the logits, and K and V."""
    segments = ours.paged.kv.segments
    for sizes in STEPS:
        positions, wanted = ours.paged.step_positions(sizes), torch.tensor([2, 0])
        x = inputs(ours.paged, positions.shape[-1])
        expected = ours.separately(ours.paged.step(sizes), positions, x, wanted)
        written = [segment.clone() for segment in segments]
        step = ours.paged.step(sizes)
        for segment in segments:
            segment.flatten(0, 1)[step.slots] = 0
        actual = ours.in_one_call(step, positions, x, wanted)
        assert actual.dtype == torch.float32
        assert torch.equal(actual, expected)
        assert all(map(torch.equal, segments, written))


@each_variant
@each_dtype
def test_one_call_gives_the_bits_of_layers_one_by_one(kernels: Kernels, dtype: torch.dtype):
    check_bits(native(tiny(FAMILIES["qwen3"](), dtype), kernels))


@pytest.mark.parametrize("model", MODELS)
def test_so_it_does_for_every_family(model: str):
    check_bits(native(tiny(MODELS[model]())))


@pytest.mark.parametrize(
    "options", [{"kv_cache_dtype": "int8"}, {"weight_dtype": "int8"}], ids=["kv", "weights"]
)
def test_so_it_does_for_coarser_formats(options: dict):
    check_bits(native(tiny(FAMILIES["qwen3"](), torch.bfloat16), **options))


def large_enough_for_two_threads() -> Model:
    config = hf.Qwen3Config(**{**_TINY, "hidden_size": 256, "intermediate_size": 700, "head_dim": 64})
    return native(tiny(hf.Qwen3Model(config)))


def test_the_number_of_threads_changes_no_bit(two_threads):
    ours, sizes = large_enough_for_two_threads(), ((0, 33), (0, 5), (0, 21))
    positions, wanted, x = ours.paged.step_positions(sizes), torch.arange(59), inputs(ours.paged, 59)
    together = ours.in_one_call(ours.paged.step(sizes), positions, x, wanted)
    torch.set_num_threads(1)
    assert torch.equal(ours.in_one_call(ours.paged.step(sizes), positions, x, wanted), together)
    hidden = ours.separately(ours.paged.step(sizes), positions, x, wanted)
    assert torch.equal(hidden, together)


def test_the_cosines_of_a_step_wake_no_other_thread(two_threads):
    ours, sizes, seen = large_enough_for_two_threads(), ((0, 33), (0, 5), (0, 21)), []
    ours.decoder.rotary.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    x = inputs(ours.paged, 59)
    ours.in_one_call(ours.paged.step(sizes), ours.paged.step_positions(sizes), x, torch.arange(59))
    assert (seen, torch.get_num_threads()) == ([1], 2)


def test_a_step_that_wants_no_logits_gives_none():
    ours = native(tiny(FAMILIES["llama"]()))
    step, positions = ours.paged.step(STEPS[0]), ours.paged.step_positions(STEPS[0])
    logits = ours.in_one_call(step, positions, inputs(ours.paged, 27), torch.empty(0, dtype=torch.long))
    assert logits.shape == (0, VOCABULARY)
    assert all(segment.flatten(0, 1)[step.slots].count_nonzero() > 0 for segment in ours.paged.kv.segments)


def test_a_layer_is_announced_when_its_kv_is_written_and_the_next_has_not_begun(two_threads):
    ours, sizes = large_enough_for_two_threads(), ((0, 33), (0, 26))
    seen: list[tuple[int, list[bool]]] = []

    def on_layer(layer_idx: int) -> None:
        rows = [segment.flatten(0, 1)[step.slots] for segment in ours.paged.kv.segments]
        seen.append((layer_idx, [bool((row != 0).any(-1).all()) for row in rows]))

    step = ours.paged.step(sizes, (0, 1), on_layer)
    for segment in ours.paged.kv.segments:
        segment.zero_()
    ours.in_one_call(step, ours.paged.step_positions(sizes), inputs(ours.paged, 59), torch.tensor([0]))
    assert seen == [(0, [True, True, False, False]), (1, [True, True, True, True])]


def test_an_error_while_a_layer_is_announced_ends_the_call(two_threads):
    ours, sizes = large_enough_for_two_threads(), ((0, 33), (0, 26))

    def on_layer(_layer_idx: int) -> None:
        raise KeyError("no such lease")

    step = ours.paged.step(sizes, (0, 1), on_layer)
    for segment in ours.paged.kv.segments:
        segment.zero_()
    with pytest.raises(KeyError, match="no such lease"):
        ours.in_one_call(step, ours.paged.step_positions(sizes), inputs(ours.paged, 59), torch.tensor([0]))
    written = [bool(segment.count_nonzero()) for segment in ours.paged.kv.segments]
    assert written == [True, True, False, False]


def test_a_pause_between_layers_leaves_the_cores_to_others(two_threads):
    ours, sizes, pause_s = large_enough_for_two_threads(), ((0, 33), (0, 26)), 0.2
    busy_s: list[float] = []

    def on_layer(_layer_idx: int) -> None:
        began_s = time.process_time()
        time.sleep(pause_s)
        busy_s.append(time.process_time() - began_s)

    step = ours.paged.step(sizes, (0, 1), on_layer)
    ours.in_one_call(step, ours.paged.step_positions(sizes), inputs(ours.paged, 59), torch.tensor([0]))
    assert max(busy_s) < pause_s / 4


def test_a_model_whose_layers_are_not_all_native_keeps_its_own_forward():
    text = tiny(FAMILIES["llama"]())
    text.layers[1].mlp.register_forward_hook(lambda *_: None)
    assert native(text).decoder is None


def test_a_model_that_computes_between_its_layers_keeps_its_own_forward():
    """Granite's multiplies the embeddings; its layers are plain ones."""
    scaled = native(
        tiny(hf.GraniteModel(hf.GraniteConfig(**_TINY, embedding_multiplier=2.0, attention_multiplier=0.25)))
    )
    assert scaled.paged.num_native == 2
    assert scaled.decoder is None


def test_a_head_that_is_not_native_keeps_the_own_forward():
    ours = native(tiny(FAMILIES["llama"]()))
    kernels = CpuLayerKernels(best_kernels)
    assert whole_decoder(ours.paged.text, nn.Linear(64, VOCABULARY), kernels, ours.paged.trial()) is None
