"""Decoder layers in one native call against transformers' own over the same paged steps: families, dtypes,
cache formats, and what must stay as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.errors import InternalError
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import ATTENTION_NAME, PagedBatch
from cluster.model.attention_cpu import CpuAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cpu.layer import NativeDecoderLayer
from cluster.model.cpu.layer_search import CpuLayerKernels
from cluster.model.cpu.library import Kernels
from cluster.model.kv_format import KvCacheDtype, kv_segments
from cluster.model.layers.search import replace_layers
from cluster.model.layers.trial import Trial
from tests.unit.model.native_kernels import best_kernels, each_dtype, each_variant, needs_kernels

BLOCK_SIZE, BLOCKS_A_SEQUENCE = 4, 10
STEPS = (  # per sequence: tokens in the cache, new tokens; prefill, a chunk beside decodes, decode
    ((0, 9), (0, 1), (0, 17)),
    ((9, 1), (1, 6), (17, 1)),
    ((10, 1), (7, 1), (18, 1)),
)
_TINY: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0, "head_dim": 16,
}  # fmt: skip
_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
FAMILIES: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**_TINY)),
    "qwen2": lambda: hf.Qwen2Model(hf.Qwen2Config(**_TINY)),
    "qwen3": lambda: hf.Qwen3Model(hf.Qwen3Config(**{**_TINY, "head_dim": 64})),
    "mistral, window": lambda: hf.MistralModel(hf.MistralConfig(**_TINY, sliding_window=7)),
    "qwen2.5-vl": lambda: hf.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VLTextModel(
        hf.models.qwen2_5_vl.configuration_qwen2_5_vl.Qwen2_5_VLTextConfig(**_TINY, rope_parameters=_MROPE)
    ),
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
OTHERS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "norms that add one": lambda: hf.GemmaModel(hf.GemmaConfig(**_TINY)),
    "more norms": lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**_TINY)),
    "experts": lambda: hf.Qwen3MoeModel(hf.Qwen3MoeConfig(**_TINY, **_EXPERTS)),
    "scaled residuals": lambda: hf.GraniteModel(hf.GraniteConfig(**_TINY, residual_multiplier=0.5)),
    "a norm over all heads": lambda: hf.Olmo2Model(hf.Olmo2Config(**_TINY)),
    "parallel branches": lambda: hf.CohereModel(hf.CohereConfig(**_TINY)),
    "pairs of neighbours": lambda: hf.Ernie4_5Model(hf.Ernie4_5Config(**_TINY)),
    "gelu": lambda: hf.LlamaModel(hf.LlamaConfig(**_TINY, hidden_act="gelu")),
}

pytestmark = [needs_kernels, pytest.mark.usefixtures("seeded")]


class Paged:
    """A text model over its own block memory."""

    def __init__(self, text: hf.PreTrainedModel, kernels: Kernels, kv_cache_dtype: KvCacheDtype = "auto"):
        config = text.config
        self.text: Any = text
        self.text.set_attn_implementation(ATTENTION_NAME)
        rows = [(config.num_key_value_heads, config.head_dim)] * 2 * config.num_hidden_layers
        self.layout = MemoryLayout(kv_segments(rows, BLOCK_SIZE, text.dtype, kv_cache_dtype))
        self.kv = BlockMemory(self.layout, 3 * BLOCKS_A_SEQUENCE)
        self.backend = CpuAttention(kernels.cdll, TorchAttention())
        self.layers_written: list[int] = []

    def optimised(self, kernels: Kernels, **options: Any) -> Paged:
        """A copy that runs native layers."""
        other = copy.deepcopy(self.text)
        result = Paged(other, kernels)
        result.layout, result.kv = self.layout, BlockMemory(self.layout, 3 * BLOCKS_A_SEQUENCE)
        replace_layers(other, CpuLayerKernels(kernels, **options), result.trial())
        return result

    def trial(self) -> Trial:
        return Trial(self.text, self.layout, self.backend, self.positions)

    def positions(self, ids: Tensor) -> Tensor:
        """Three different axes where the model has them."""
        if "mrope_section" in self.text.config.rope_parameters:
            return torch.stack([ids, ids // 2, ids % 5])[:, None]
        return ids[None]

    def step(
        self, sizes: Sequence[tuple[int, int]], sequences: Sequence[int] = (0, 1, 2),
        on_layer: Callable[[int], None] | None = None,
    ) -> PagedBatch:  # fmt: skip
        """sizes: (tokens in the cache, new tokens) of some sequences."""
        starts = torch.tensor(sequences) * BLOCKS_A_SEQUENCE
        tables = starts[:, None] + torch.arange(BLOCKS_A_SEQUENCE)
        slots = [
            table[own // BLOCK_SIZE] * BLOCK_SIZE + own % BLOCK_SIZE
            for table, own in zip(tables, indices_of(sizes), strict=True)
        ]
        lens = [sum(size) for size in sizes]
        return PagedBatch(
            self.kv, BLOCK_SIZE, torch.cat(slots), [new for _, new in sizes], lens, tables,
            torch.tensor(lens), [[] for _ in sizes], on_layer,
        )  # fmt: skip

    def step_positions(self, sizes: Sequence[tuple[int, int]]) -> Tensor:
        return self.positions(torch.cat(indices_of(sizes)))

    def run(
        self, sizes: Sequence[tuple[int, int]], x: Tensor, sequences: Sequence[int] = (0, 1, 2)
    ) -> Tensor:
        """x [T, hidden] → [T, hidden]."""
        batch = self.step(sizes, sequences, self.layers_written.append)
        return self.text(
            inputs_embeds=x[None], position_ids=self.step_positions(sizes), use_cache=False,
            paged=(batch, self.backend),
        ).last_hidden_state[0]  # fmt: skip

    @property
    def num_native(self) -> int:
        return sum(type(module) is NativeDecoderLayer for module in self.text.modules())


def indices_of(sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    return [torch.arange(context, context + new) for context, new in sizes]


def tiny(text: Any, dtype: torch.dtype = torch.float32) -> Any:
    for parameter in text.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return text.eval().to(dtype)


def inputs(paged: Paged, count: int) -> Tensor:
    return torch.randn(count, paged.text.config.hidden_size).to(paged.text.dtype)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@each_variant
@each_dtype
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_native_layers_equal_the_modules_in_prefill_chunks_and_decode(
    kernels: Kernels, dtype, kv_cache_dtype, family
):
    modules = Paged(tiny(FAMILIES[family](), dtype), kernels, kv_cache_dtype)
    native = modules.optimised(kernels)
    assert native.num_native == 2
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5 if kv_cache_dtype == "auto" else 1e-3
    for sizes in STEPS:
        x = inputs(modules, sum(new for _, new in sizes))
        actual, expected = native.run(sizes, x), modules.run(sizes, x)
        assert actual.dtype == dtype
        assert relative_error(actual, expected) < tolerance
    for ours, theirs in zip(native.kv.segments, modules.kv.segments, strict=True):
        assert relative_error(ours, theirs) < 2 * tolerance


@pytest.mark.parametrize("kind", OTHERS)
def test_layers_that_compute_something_else_stay(kind):
    modules = Paged(tiny(OTHERS[kind]()), best_kernels)
    native = modules.optimised(best_kernels)
    assert native.num_native == 0
    x = inputs(modules, 27)
    torch.testing.assert_close(native.run(STEPS[0], x), modules.run(STEPS[0], x))


def test_a_layer_that_someone_listens_to_stays():
    text = tiny(FAMILIES["llama"]())
    text.layers[1].mlp.register_forward_hook(lambda *_: None)
    native = Paged(text, best_kernels).optimised(best_kernels)
    assert type(native.text.get_submodule("layers.0")) is NativeDecoderLayer
    assert type(native.text.get_submodule("layers.1")) is type(text.layers[1])


def test_layers_stay_where_the_model_gives_them_another_rotary_embedding():
    text = tiny(FAMILIES["llama"]())
    text.rotary_emb.forward = in_bfloat16(text.rotary_emb.forward)
    assert Paged(text, best_kernels).optimised(best_kernels).num_native == 0


def in_bfloat16(rotary: Callable) -> Callable:
    return lambda x, position_ids: rotary(x.bfloat16(), position_ids)


def test_a_replaced_layer_holds_its_weights_once():
    native = Paged(tiny(FAMILIES["qwen2"]()), best_kernels).optimised(best_kernels)
    assert not list(native.text.layers.parameters())


@each_variant
@each_dtype
@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_a_row_depends_neither_on_its_company_nor_on_the_number_of_threads(
    kernels: Kernels, dtype, weight_dtype
):
    config = hf.Qwen3Config(**{**_TINY, "hidden_size": 256, "intermediate_size": 700, "head_dim": 64})
    native = Paged(tiny(hf.Qwen3Model(config), dtype), kernels).optimised(kernels, weight_dtype=weight_dtype)
    assert native.num_native == 2
    sizes = ((0, 33), (0, 5), (0, 21))
    x = inputs(native, 59)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = native.run(sizes, x)
        torch.set_num_threads(1)
        assert torch.equal(native.run(sizes, x), together)
        pieces = [
            native.run([size], rows, [i])
            for i, (size, rows) in enumerate(zip(sizes, x.split([33, 5, 21]), strict=True))
        ]
        assert torch.equal(torch.cat(pieces), together)
        rows = [native.run([(row, 1)], x[row : row + 1], [0]) for row in range(33)]
        assert torch.equal(torch.cat(rows), together[:33])
    finally:
        torch.set_num_threads(before)


def test_int8_weights_change_results_little_but_are_used():
    modules = Paged(tiny(FAMILIES["qwen2"]()), best_kernels)
    native = modules.optimised(best_kernels, weight_dtype="int8")
    x = inputs(modules, 27)
    assert native.num_native == 2
    assert 1e-4 < relative_error(native.run(STEPS[0], x), modules.run(STEPS[0], x)) < 0.1


def test_each_layer_is_announced_when_it_has_run():
    native = Paged(tiny(FAMILIES["llama"]()), best_kernels).optimised(best_kernels)
    native.run(STEPS[0], inputs(native, 27))
    assert native.layers_written == [0, 1]


def test_a_rotary_embedding_of_another_form_is_refused():
    native = Paged(tiny(FAMILIES["llama"]()), best_kernels).optimised(best_kernels)
    rotary = native.text.rotary_emb
    rotary.forward = in_bfloat16(rotary.forward)
    with pytest.raises(InternalError):
        native.run(STEPS[0], inputs(native, 27))


@pytest.mark.parametrize(
    "x",
    [torch.zeros(26, 64), torch.zeros(27, 62), torch.zeros(27, 64).bfloat16()],
    ids=["rows", "width", "dtype"],
)
def test_inputs_of_another_form_are_refused(x: Tensor):
    native = Paged(tiny(FAMILIES["llama"]()), best_kernels).optimised(best_kernels)
    native.text.rotary_emb.forward = lambda *_, **__: (torch.zeros(1, 27, 16), torch.zeros(1, 27, 16))
    with pytest.raises(InternalError):
        native.run(STEPS[0], x)
