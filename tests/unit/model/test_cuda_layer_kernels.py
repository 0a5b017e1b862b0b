"""The kernels between a layer's products, in Triton's interpreter, against transformers' own modules. The
interpreter has to be asked for: TRITON_INTERPRET=1."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.cuda.layer_calls import (
    ActivationKind,
    GateActivation,
    Norm,
    NormForm,
    Rope,
    Rotation,
    Table,
    add,
    add_norm,
    gate,
    rope_write,
    total,
    write_rows,
)
from cluster.model.cuda.products import CANDIDATES, ProductCut, product, product_of_few
from cluster.model.kv_format import KvCacheDtype, LayerCache, QuantisedRows, kv_segments, layer_cache

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
        reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
    ),
    pytest.mark.usefixtures("seeded"),
]
EPSILON = 1e-6
NORMS = {
    "llama": NormForm.ROUNDED,
    "qwen3": NormForm.ROUNDED,
    "gemma2": NormForm.PLUS_ONE,
    "gemma3": NormForm.PLUS_ONE,
    "gpt_oss": NormForm.FLOAT,
    "gemma4": NormForm.FLOAT,
}
CLASSES = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gpt_oss": "GptOss",
    "gemma4": "Gemma4",
}
# float16: one unit in the last place of numbers up to 4, where sums in another order round otherwise
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3}


def modeling(family: str) -> ModuleType:
    return import_module(f"transformers.models.{family}.modeling_{family}")


def rms_norm(name: str, width: int, dtype: torch.dtype) -> tuple[nn.Module, Norm]:
    """A module of that family with random weights, and the same norm as the kernels take it."""
    module = getattr(modeling(name), f"{CLASSES[name]}RMSNorm")(width, eps=EPSILON)
    module.weight.data = torch.randn(width).mul(0.5).add(1).to(dtype)
    return module, Norm(module.weight.data, EPSILON, NORMS[name])


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_norms_equal_those_of_the_families(name: str, dtype: torch.dtype) -> None:
    module, norm = rms_norm(name, 40, dtype)
    x = torch.randn(3, 40, dtype=dtype)
    before = x.clone()
    assert_close(add_norm(x, None, norm), module(x))
    assert torch.equal(x, before)


def test_a_norm_without_weight_only_divides() -> None:
    x = torch.randn(3, 40)
    module = modeling("gemma4").Gemma4RMSNorm(40, EPSILON, with_scale=False)
    assert_close(add_norm(x, None, Norm(None, EPSILON)), module(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_shares", [1, 3])
@pytest.mark.parametrize("scale", [None, 0.22])
def test_the_residual_has_the_bits_of_the_modules(dtype: torch.dtype, num_shares: int, scale) -> None:
    module, norm = rms_norm("llama", 24, dtype)
    residual, shares = torch.randn(2, 24).to(dtype), torch.randn(num_shares, 2, 24)
    if num_shares == 1:
        shares = shares.to(dtype)
    product = shares[0].float()
    for share in shares[1:]:
        product = product + share
    added = product.to(dtype) if scale is None else product.to(dtype) * scale
    expected = residual + added
    out = add_norm(residual, shares, norm, scale=scale)
    assert torch.equal(residual, expected)
    assert_close(out, module(expected))


def test_the_last_product_is_normed_before_it_is_added() -> None:
    """Gemma 2's layers have both norms, OLMo 2's only that after."""
    (pre, pre_norm), (post, post_norm) = (rms_norm("gemma2", 40, torch.float32) for _ in range(2))
    residual, product = torch.randn(3, 40), torch.randn(3, 40)
    alone, expected = residual.clone(), residual + post(product)
    assert_close(add_norm(residual, product[None], pre_norm, post=post_norm), pre(expected))
    assert_close(residual, expected)
    add(alone, product[None], post=post_norm)
    assert torch.equal(alone, residual)


def kv_cache(
    heads: int, width: int, value_width: int, dtype: torch.dtype, kv_cache_dtype: KvCacheDtype = "auto"
) -> LayerCache:
    """Six blocks of four rows that hold 7."""
    segments = kv_segments([(heads, width), (heads, value_width)], 4, dtype, kv_cache_dtype)
    memory = BlockMemory(MemoryLayout(segments), 6, "cpu")
    for segment in memory.segments:
        segment.fill_(7)
    return layer_cache(memory, 0)


def bits_of(cache: LayerCache) -> list[Tensor]:
    stores: tuple[Any, Any] = (cache.key, cache.value)
    return [
        part.clone()
        for store in stores
        for part in ((store.codes, store.scales) if isinstance(store, QuantisedRows) else (store.data,))
    ]


def tables(num_tokens: int, width: int, table: Table, rotation: Rotation, dtype: torch.dtype):
    """cos and sin as the rotary module of such a family gives them."""
    angles = torch.rand(num_tokens, width // 2) * 7
    if table is Table.FULL:
        is_split = rotation is Rotation.HALVES
        angles = torch.cat([angles, angles], -1) if is_split else angles.repeat_interleave(2, -1)
    elif table is Table.PAIRED:
        angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


ROPES = {
    "llama": (Rope(16), 16),
    "phi3": (Rope(12), 20),
    "cohere": (Rope(16, Rotation.PAIRS), 16),
    "glm4": (Rope(8, Rotation.PAIRS, Table.PAIRED), 24),
    "gpt_oss": (Rope(16, table=Table.HALF), 16),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ROPES)
def test_rotations_equal_those_of_the_families(name: str, dtype: torch.dtype) -> None:
    rope, width = ROPES[name]
    query, key, value = (torch.randn(5, heads, width).to(dtype) for heads in (6, 2, 2))
    cos, sin = tables(5, rope.rotary_width, rope.table, rope.rotation, dtype)
    slots = torch.tensor([3, 9, 0, 22, 17], dtype=torch.int32)
    cache, expected = kv_cache(2, width, width, dtype), kv_cache(2, width, width, dtype)
    merged = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    out = rope_write(merged[None], cos, sin, slots, cache, 6, rope)
    turned = modeling(name).apply_rotary_pos_emb(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos[None], sin[None]
    )
    query, key = (rows[0].transpose(0, 1) for rows in turned)
    expected.write(slots.long(), key, value)
    pairs = [(out, query), *zip(bits_of(cache), bits_of(expected), strict=True)]
    for actual, right in pairs:
        if dtype == torch.float32:
            assert torch.equal(actual, right)
        else:  # the modules round both products, too
            assert_close(actual, right)


@pytest.mark.parametrize("norms_after", [False, True])
@pytest.mark.parametrize("form", ["qwen3", "gemma3"])
def test_heads_are_normed_before_or_after_they_turn(norms_after: bool, form: str) -> None:
    (query_module, query_norm), (key_module, key_norm) = (rms_norm(form, 16, torch.float32) for _ in range(2))
    query, key, value = (torch.randn(3, heads, 16) for heads in (5, 1, 1))
    cos, sin = tables(3, 16, Table.FULL, Rotation.HALVES, torch.float32)
    cache, slots = kv_cache(1, 16, 16, torch.float32), torch.tensor([4, 5, 6])
    merged = torch.cat([part.flatten(1) for part in (query, key, value)], -1)
    rope = Rope(16, query_norm=query_norm, key_norm=key_norm, norms_after=norms_after)
    out = rope_write(merged[None], cos, sin, slots, cache, 5, rope)
    if not norms_after:
        query, key = query_module(query), key_module(key)
    query, key = modeling("llama").apply_rotary_pos_emb(query, key, cos, sin)
    if norms_after:
        query, key = query_module(query), key_module(key)
    assert_close(out, query)
    assert_close(cache.key.rows(slots, torch.float32), key)
    assert torch.equal(cache.value.rows(slots, torch.float32), value)


@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (80, 80), (96, 24), (192, 128)])
def test_int8_rows_get_the_codes_and_scales_of_the_cache_itself(width: int, value_width: int) -> None:
    """Layers without a rotation, so that nothing else can differ; shares of a product are summed first."""
    parts = [torch.randn(4, heads, size) for heads, size in ((3, width), (3, width), (3, value_width))]
    for part in parts:
        part[1], part[2], part[3] = 0, part[2] * 1e-7, part[3] * 1e4
    cache, expected = (kv_cache(3, width, value_width, torch.float32, "int8") for _ in range(2))
    slots = torch.tensor([23, 2, 3, 8])
    merged = torch.cat([part.flatten(1) for part in parts], -1)
    other = torch.randn_like(merged)
    shares = torch.stack([merged, other])
    query, key, value = (part.unflatten(1, (3, -1)) for part in (merged + other).split(
        [3 * width, 3 * width, 3 * value_width], -1))  # fmt: skip
    out = rope_write(shares, None, None, slots, cache, 3, Rope(0))
    expected.write(slots, key, value)
    assert torch.equal(out, query)
    for actual, right in zip(bits_of(cache), bits_of(expected), strict=True):
        assert torch.equal(actual, right)


@pytest.mark.parametrize(("width", "value_width"), [(16, 16), (80, 80), (192, 128)])
@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype"), [(torch.float32, "auto"), (torch.float16, "auto"), (torch.float32, "int8")]
)
def test_rows_of_modules_are_written_as_by_the_cache_itself(
    width: int, value_width: int, dtype: torch.dtype, kv_cache_dtype: KvCacheDtype
) -> None:
    """Heads first, as modules give them; of other strides, too. Other slots stay as they are."""
    key, value = (torch.randn(5, 4, size, dtype=dtype).transpose(0, 1) for size in (width, value_width))
    for rows in (key, value):
        rows[1], rows[2], rows[3] = 0, rows[2] * 1e-7, rows[3] * 1e4
    cache, expected = (kv_cache(5, width, value_width, dtype, kv_cache_dtype) for _ in range(2))
    slots = torch.tensor([23, 2, 3, 8])
    write_rows(key, value.transpose(1, 2).contiguous().transpose(1, 2), slots, cache)
    expected.write(slots, key, value)
    for actual, right in zip(bits_of(cache), bits_of(expected), strict=True):
        assert torch.equal(actual, right)


def without_down(module: nn.Module) -> Any:
    """An MLP that returns what its projection down would get."""
    module.down_proj = nn.Identity()
    return module


def mlp(name: str) -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 12, "intermediate_size": 20}
    if name == "gemma":
        return modeling(name).GemmaMLP(hf.GemmaConfig(**sizes))
    if name == "deepseek_v4":
        config = SimpleNamespace(**sizes, mlp_bias=False, hidden_act="silu", swiglu_limit=0.4)
        return modeling(name).DeepseekV4MLP(config)
    return modeling("llama").LlamaMLP(hf.LlamaConfig(**sizes, num_attention_heads=2, hidden_act=name))


MLPS = {
    "silu": GateActivation(),
    "gemma": GateActivation(ActivationKind.GELU_TANH),
    "gelu": GateActivation(ActivationKind.GELU),
    "deepseek_v4": GateActivation(limit=0.4),
    "quick_gelu": GateActivation(alpha=1.702),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", MLPS)
def test_gates_equal_those_of_the_families(name: str, dtype: torch.dtype) -> None:
    module, x = without_down(mlp(name)).to(dtype), torch.randn(3, 12).to(dtype)
    merged = torch.cat([module.gate_proj(x), module.up_proj(x)], -1)
    assert_close(gate(merged[None], MLPS[name], dtype), module(x))


def test_shares_are_summed_in_order_and_rounded_once() -> None:
    """For the sum over ranks."""
    shares = torch.randn(3, 5, 1500)
    out = total(shares, torch.float16)
    assert torch.equal(out, (shares[0] + shares[1] + shares[2]).half()[None])
    assert total(out, torch.float16) is out


def test_the_clamped_gate_of_gpt_oss() -> None:
    gates, ups = torch.randn(3, 20) * 4, torch.randn(3, 20) * 4
    interleaved = torch.stack([gates, ups], -1).flatten(-2)
    expected = modeling("gpt_oss").GptOssExperts._apply_gate(
        SimpleNamespace(alpha=1.702, limit=7.0), interleaved
    )
    activation = GateActivation(limit=7.0, alpha=1.702, offset=1.0)
    assert_close(gate(torch.cat([gates, ups], -1)[None], activation, torch.float32), expected)


def test_shares_of_a_product_are_summed_first() -> None:
    shares = torch.randn(2, 3, 40)
    gates, ups = shares.sum(0).split(20, -1)
    assert_close(gate(shares, GateActivation(), torch.float32), nn.functional.silu(gates) * ups)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("num_outputs", "width"), [(70, 96), (300, 2500), (2100, 5000)])
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17])
def test_a_product_of_few_tokens_is_that_of_torch(num_tokens: int, num_outputs, width, has_bias) -> None:
    """Alone or as one of several, cut along its inner dimension or not."""
    x, weight = torch.randn(num_tokens, width), torch.randn(num_outputs, width) * width**-0.5
    bias = torch.randn(num_outputs).half() if has_bias else None
    expected = nn.functional.linear(
        x.half().float(), weight.half().float(), None if bias is None else bias.float()
    )
    for is_whole in (False, True):
        shares = product(x.half(), weight.half(), bias, is_whole=is_whole)
        is_cut = num_tokens <= 16 and width > 2048 and not is_whole
        assert shares.shape[1:] == (num_tokens, num_outputs) and (len(shares) > 1) == is_cut
        assert shares.dtype == (torch.float32 if is_cut else torch.float16)
        found = shares.float().sum(0)
        assert float((found - expected).norm() / expected.norm()) < (1e-5 if is_cut else 1e-3)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("cut", CANDIDATES[64], ids=str)
def test_our_product_takes_more_tokens_than_it_serves(cut: ProductCut, is_whole, has_bias) -> None:
    """Where a measurement finds it faster."""
    for num_tokens, num_outputs, width in ((17, 150, 300), (cut.tokens, 70, 260)):
        x, weight = (
            torch.randn(num_tokens, width).half(),
            (torch.randn(num_outputs, width) * width**-0.5).half(),
        )
        bias = torch.randn(num_outputs).half() if has_bias else None
        shares = product_of_few(x, weight, bias, cut, is_whole=is_whole)
        assert (len(shares) > 1) != is_whole
        found, expected = shares.float().sum(0), nn.functional.linear(x, weight, bias).float()
        assert float((found - expected).norm() / expected.norm()) < 1e-3
        alone = product_of_few(x[5:6], weight, bias, cut, is_whole=is_whole)
        assert torch.equal(alone, shares[:, 5:6])
