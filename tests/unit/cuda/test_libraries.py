"""What is called in other projects exists there under these names, and which attention is taken when a worker
starts."""

from __future__ import annotations

import inspect
import logging
import sys
import types
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from cluster.kvcache.memory import MemoryLayout
from cluster.model.attention import AttentionShape, LayerAttention
from cluster.model.attention_flash import FlashAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.cuda import choice, decode_attention
from cluster.model.cuda.libraries import Flash2, Flash3, Flash4, StepLengths, TorchVarlen, installed
from cluster.model.kv_format import kv_segments
from tests.fakes.cuda_device import SimulatedCuda

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


def check_calls(library, out: torch.Tensor, max_query: int) -> None:
    some = torch.zeros(3, dtype=torch.int32)
    lengths = StepLengths(some, some, some, some[:, None], max_query, 4)
    layer = LayerAttention(0.5, sliding_window=3, softcap=1.0 if library.has_softcap else None)
    assert library.rows(out, out, out, lengths, layer) is out
    if library.page_multiple is not None:
        assert library.paged(out, out, out, lengths, layer) is not None


@pytest.mark.parametrize("max_query", [1, 2])
@pytest.mark.parametrize(("library", "names"), [(Flash2, FLASH_2), (Flash3, FLASH_3), (Flash4, FLASH_4)])
def test_every_argument_exists_in_the_library(library, names, max_query: int) -> None:
    out = torch.zeros(2, 4, 8)
    check_calls(library(strict_module(names, (out, None) if library in PAIR else out)), out, max_query)


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
    check_calls(TorchVarlen(SimpleNamespace(varlen_attn=call)), out, 2)
    assert [each.get("enable_gqa") for each in given] == [None if missing else True]


def test_flash_attn_4_alone_makes_no_flash_attn_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its wheel has `flash_attn/cute` and no `flash_attn/__init__.py`: importing `flash_attn` works and gives
    nothing."""
    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_varlen_func = lambda: None  # type: ignore[attr-defined]
    for name, module in (("flash_attn", types.ModuleType("flash_attn")), ("flash_attn.cute", cute)):
        monkeypatch.setitem(sys.modules, name, module)
    assert [name for name, _ in installed()] == ["flash_attn.cute", "torch.nn.attention.varlen"]


class Wrong(TorchVarlen):
    """Forgets the newest key."""

    def __init__(self):
        pass

    def rows(self, query, key, value, lengths, layer):
        return torch.zeros_like(query)


class Broken(Wrong):
    def rows(self, query, key, value, lengths, layer):
        raise RuntimeError("no kernel image is available")


class Plain(Wrong):
    """What plain softmax gives; `rows` of a decode step after a gather."""

    def rows(self, query, key, value, lengths, layer):
        device = SimulatedCuda.active
        assert device is not None
        return device.kernel(_plain, query, key, value, lengths.query_starts, lengths.context_starts, layer)


def _plain(query, key, value, query_starts, context_starts, layer):
    from tests.gpu.cases import dense

    parts = []
    for row in range(len(query_starts) - 1):
        keys = slice(context_starts[row], context_starts[row + 1])
        parts.append(dense(layer, query[query_starts[row] : query_starts[row + 1]], key[keys], value[keys]))
    return torch.cat(parts).to(query.dtype)


SHAPE = AttentionShape(
    MemoryLayout(kv_segments([(2, 16)] * 2, 16, torch.bfloat16)), 16, 4, LayerAttention(0.25)
)


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "DECODES", (((30, 1), (7, 1)), ((60, 1),)))
    monkeypatch.setattr(choice, "CHUNK", ((20, 9), (0, 5)))


def test_a_library_is_taken_only_if_it_computes_the_right_numbers(small_steps, monkeypatch, caplog) -> None:
    monkeypatch.setattr(decode_attention, "is_available", lambda: False)
    fallback = TorchAttention()
    with SimulatedCuda(), caplog.at_level(logging.INFO):
        given = [("wrong", Wrong()), ("broken", Broken()), ("right", Plain())]
        backend = choice.choose(torch.device("cuda"), torch.bfloat16, SHAPE, fallback, lambda: given)
        assert isinstance(backend, FlashAttention)
        assert isinstance(backend._prompts, Plain) and backend._answers is backend._prompts
        assert (
            choice.choose(torch.device("cuda"), torch.bfloat16, SHAPE, fallback, lambda: given[:2])
            is fallback
        )
    for what in ("prompts", "answers"):
        assert f"wrong is left out for {what}: its results are wrong by 100.0%" in caplog.text
        assert f"broken is left out for {what}: no kernel image is available" in caplog.text
        assert f"right is the fastest of 1 for {what}" in caplog.text
        assert f"plain torch computes {what}" in caplog.text


class Slow(Plain):
    """Reads pages."""

    page_multiple = 1

    def __init__(self, decode_s: float, prompt_s: float):
        self.decode_s, self.prompt_s = decode_s, prompt_s

    def paged(self, query, key, value, lengths, layer):
        keys, values = (
            torch.cat(
                [blocks[table.long()].flatten(0, 1)[:count] for table, count in self._sequences(lengths)]
            )
            for blocks in (key, value)
        )
        return self.rows(query, keys, values, lengths, layer)

    @staticmethod
    def _sequences(lengths):
        return zip(lengths.tables, lengths.contexts.tolist(), strict=True)


@pytest.mark.parametrize("decode_s", [0.0, 1.0])
def test_prompts_and_answers_are_chosen_apart(decode_s: float, small_steps, monkeypatch) -> None:
    """Here the times are given: a library that decodes slowly still serves prompts."""
    slow = Slow(decode_s, prompt_s=0.1)

    def seconds(step, backend, expected) -> float:
        step.attend(backend)
        is_prompt = len(step._query) > 2
        serves = backend._prompts if is_prompt else backend._answers
        return 0.5 if serves is None else serves.prompt_s if is_prompt else serves.decode_s

    monkeypatch.setattr(choice._Step, "seconds", seconds)
    monkeypatch.setattr(decode_attention, "is_available", lambda: True)
    monkeypatch.setattr(decode_attention, "paged_decode", lambda query, *_: query)
    with SimulatedCuda():
        backend = choice.choose(
            torch.device("cuda"), torch.bfloat16, SHAPE, TorchAttention(), lambda: [("slow", slow)]
        )
    assert isinstance(backend, FlashAttention) and backend._prompts is slow
    assert backend._answers is (None if decode_s else slow)
