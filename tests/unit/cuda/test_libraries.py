"""What is called in other projects exists there under these names, and which attention is taken when a worker
starts."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from cluster.kvcache.memory import MemoryLayout
from cluster.model import attention_cuda
from cluster.model.attention import AttentionShape, LayerAttention
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda import choice, paged_attention
from cluster.model.cuda.libraries import Flash2, Flash3, Flash4, StepLengths, TorchVarlen, installed
from cluster.model.kv_format import kv_segments
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.plain_attention import PlainAttention
from tests.unit.model.attention_cases import dense_sequence

# Of the releases' source: flash-attn 2.8 and its hopper/flash_attn_interface.py, flash-attn-4 4.0.0b36.
FLASH_2 = {
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs block_table",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad block_table softmax_scale causal "
    "window_size softcap rotary_interleaved alibi_slopes num_splits "
    "return_softmax_lse",
}
FLASH_3 = {
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q "
    "seqused_k softmax_scale causal qv q_descale k_descale v_descale "
    "window_size attention_chunk softcap num_splits pack_gqa deterministic "
    "sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new "
    "max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
    "softmax_scale causal window_size attention_chunk softcap "
    "rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
}
FLASH_4 = {
    "flash_attn_varlen_func": "q k v qv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "min_seqlen_k seqused_q seqused_k gather_kv_indices page_table "
    "softmax_scale causal window_size learnable_sink softcap num_splits "
    "pack_gqa deterministic score_mod score_mod_bwd mask_mod "
    "block_sparse_tensors aux_tensors aux_scalars return_lse "
    "scheduler_metadata seqlen_k_per_split disable_scheduler_metadata "
    "gather_bwd_recompute_p gather_bwd_token_chunk",
}
PAIR = (Flash4,)  # these return (out, lse)


def strict_module(names: dict[str, str], result: object) -> SimpleNamespace:
    """Its functions bind their arguments to these parameters and compute nothing."""

    def function(parameters: str):
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in parameters.split()])

        def call(*args, **kwargs):
            signature.bind_partial(*args, **kwargs)
            return result

        return call

    return SimpleNamespace(**{name: function(parameters) for name, parameters in names.items()})


def check_calls(library, out: torch.Tensor) -> None:
    some = torch.zeros(3, dtype=torch.int32)
    lengths = StepLengths(some, some, some, some[:, None], 2, 4)
    layer = LayerAttention(0.5, sliding_window=3)
    assert library.rows(out, out, out, lengths, layer) is out
    if library.page_multiple is not None:
        assert library.paged(out, out, out, lengths, layer) is not None


@pytest.mark.parametrize(("library", "names"), [(Flash2, FLASH_2), (Flash3, FLASH_3), (Flash4, FLASH_4)])
def test_every_argument_exists_in_the_library(library, names) -> None:
    out = torch.zeros(2, 4, 8)
    check_calls(library(strict_module(names, (out, None) if library in PAIR else out)), out)


@pytest.mark.parametrize("missing", [(), ("enable_gqa",)], ids=["installed", "2.11"])
def test_every_argument_exists_in_torchs_own_function(missing: tuple[str, ...]) -> None:
    """torch 2.11's function has no `enable_gqa`; without the keyword, later ones refuse fewer KV heads."""
    installed_one, out, given = inspect.signature(varlen_attn), torch.zeros(2, 4, 8), []
    signature = installed_one.replace(
        parameters=[each for name, each in installed_one.parameters.items() if name not in missing]
    )

    def call(*args, **kwargs):
        given.append(signature.bind(*args, **kwargs).arguments)
        return out

    call.__signature__ = signature  # type: ignore[attr-defined]
    check_calls(TorchVarlen(SimpleNamespace(varlen_attn=call)), out)
    assert [each.get("enable_gqa") for each in given] == [None if missing else True]


def test_flash_attn_4_alone_makes_no_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel has `flash_attn/cute` and no `flash_attn/__init__.py`: importing `flash_attn` works and gives
    nothing."""
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = lambda: None  # type: ignore[attr-defined]
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    assert [name for name, _ in installed()] == ["flash_attn.cute", "torch.nn.attention.varlen"]


class Plain(TorchVarlen):
    """What plain softmax gives."""

    def __init__(self):
        pass

    def rows(self, query, key, value, lengths, layer):
        device = SimulatedCuda.active
        assert device is not None
        return device.kernel(_plain, query, key, value, lengths.query_starts, lengths.context_starts, layer)


class Wrong(Plain):
    def rows(self, query, key, value, lengths, layer):
        return torch.zeros_like(query)


class Broken(Plain):
    def rows(self, query, key, value, lengths, layer):
        raise RuntimeError("no kernel image is available")


def _plain(query, key, value, query_starts, context_starts, layer):
    parts = []
    for row in range(len(query_starts) - 1):
        keys = slice(context_starts[row], context_starts[row + 1])
        parts.append(
            dense_sequence(layer, query[query_starts[row] : query_starts[row + 1]], key[keys], value[keys])
        )
    return torch.cat(parts).to(query.dtype)


BF16 = torch.bfloat16
SHAPE = AttentionShape(MemoryLayout(kv_segments([(2, 16)] * 2, 16, BF16)), 16, 4, LayerAttention(0.25))


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainAttention]:
    """All chunks of the trial are long."""
    monkeypatch.setattr(attention_cuda, "LONG_STEP", 16)
    with SimulatedCuda() as device:
        yield PlainAttention(device, monkeypatch)


def chosen(libraries, dtype: torch.dtype = BF16, shape: AttentionShape = SHAPE):
    fallback = TorchAttention()
    backend = choice.choose(torch.device("cuda"), dtype, shape, fallback, lambda: libraries)
    return None if backend is fallback else backend


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[object, float]:
    """In place of measured times: seconds by library; None: ours."""
    seconds: dict[object, float] = {}
    checked = choice.TrialStep.seconds

    def given(step, backend: CudaAttention) -> float:
        checked(step, backend)
        return seconds[backend.library]

    monkeypatch.setattr(choice.TrialStep, "seconds", given)
    return seconds


@pytest.mark.parametrize(("library_s", "is_taken"), [(0.5, True), (2.0, False)])
def test_the_fastest_that_computes_the_right_numbers_serves_long_chunks(
    library_s: float, is_taken: bool, ours, times, caplog
) -> None:
    right = Plain()
    times.update({None: 1.0, right: library_s})
    with caplog.at_level(logging.INFO):
        backend = chosen([("wrong", Wrong()), ("broken", Broken()), ("right", right)])
    assert isinstance(backend, CudaAttention) and backend.library is (right if is_taken else None)
    assert "wrong: left out for long prompt chunks: its results are wrong by 100.0%" in caplog.text
    assert "broken: left out for long prompt chunks: no kernel image is available" in caplog.text
    assert "our kernels: 1000000.0 and 1000000.0 us for answers" in caplog.text
    name = "right" if is_taken else "our kernels"
    assert f"long prompt chunks by {name}, the fastest of 2" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (torch.float32, replace(SHAPE, layout=MemoryLayout(kv_segments([(2, 16)] * 2, 16, torch.float32)))),
        (BF16, replace(SHAPE, layout=MemoryLayout(kv_segments([(2, 16)] * 2, 16, BF16, "int8")))),
        (BF16, replace(SHAPE, layer=LayerAttention(0.25, softcap=2.0))),
    ],
    ids=["float32", "INT8", "caps"],
)
def test_libraries_are_not_tried_for_what_they_never_serve(dtype, shape, ours) -> None:
    backend = chosen([("broken", None)], dtype, shape)
    assert isinstance(backend, CudaAttention) and backend.library is None


@pytest.mark.parametrize("is_prompt", [True, False])
def test_without_right_numbers_by_our_kernels_plain_torch_serves(
    is_prompt, ours: PlainAttention, monkeypatch, caplog
) -> None:
    def wrong(query, cache, layer, step, *others):
        out = ours.attend(query, cache, layer, step, *others)
        return out * 0 if step.is_decode != is_prompt else out

    monkeypatch.setattr(paged_attention, "attend", wrong)
    assert chosen([("right", Plain())]) is None
    what = "long prompt chunks" if is_prompt else "answers"
    assert f"our kernels: left out for {what}: its results are wrong by 100.0%" in caplog.text
    assert "plain torch computes it" in caplog.text


def test_without_triton_plain_torch_serves(ours, monkeypatch) -> None:
    monkeypatch.setattr(choice, "has_triton", lambda: False)
    assert chosen([("right", Plain())]) is None
