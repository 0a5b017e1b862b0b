"""Hybrid models whose layers, with attention or a mixer, run in one native call, over states and paged KV:
against transformers' own modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.cpu.layer import NativeDecoderLayer
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import LanguageParts, load_parts
from cluster.model.sharding import UNDIVIDED
from cluster.model.states import StateSpan
from tests.unit.model.native_kernels import each_dtype, needs_kernels

BLOCKS = 6  # of KV, for each sequence
# Of successive steps: each sequence's new tokens, and how many of them are drafts, which no state takes in.
STEPS = (((21, 0), (5, 0)), ((1, 0), (40, 0)), ((1, 2), (1, 0)), ((1, 0), (1, 0)))
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": None,
    "tie_word_embeddings": True,
}  # fmt: skip
DELTA: dict[str, Any] = {
    **SIZES, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 48,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], hf.PretrainedConfig]] = {
    "Qwen3_5ForCausalLM": lambda: hf.Qwen3_5TextConfig(**DELTA),
    "Lfm2ForCausalLM": lambda: hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv", "conv"]),
}
_each_model = pytest.mark.parametrize("folder", CONFIGS, indirect=True)

pytestmark = needs_kernels


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = getattr(hf, request.param)(CONFIGS[request.param]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("hybrid")
    model.save_pretrained(path)
    return path


def loaded(
    folder: Path, dtype: torch.dtype, cache: WeightCache | None = None, **options: Any
) -> LanguageParts:
    given: dict[str, Any] = {"kv_cache_dtype": "auto", "weight_dtype": "auto", **options}
    return load_parts(
        folder, dtype=dtype, device="cpu", block_size=16, sharding=UNDIVIDED, weight_cache=cache, **given
    )


def run(model: LanguageModel) -> list[Tensor]:
    """The logits of each step: of prompts, of a long one next to an answer, of drafts, of answers alone."""
    size, first, generator = model.state_blocks, 2 * BLOCKS, torch.Generator().manual_seed(1)
    kv = BlockMemory(model.kv_layout, first + 4 * size)
    places = [[range(first + i * size, first + (i + 1) * size) for i in (2 * n, 2 * n + 1)] for n in range(2)]
    tables = [[*range(n * BLOCKS, (n + 1) * BLOCKS)] for n in range(2)]
    contexts, logits = [0, 0], []
    for number, sizes in enumerate(STEPS):
        spans = []
        for (count, drafts), own in zip(sizes, places, strict=True):
            taken = StateSpan(count, own[(number - 1) % 2] if number else (), own[number % 2])
            spans.append((taken, *([StateSpan(drafts, own[number % 2])] if drafts else [])))
        ids = [torch.randint(0, 90, (sum(each),), generator=generator).tolist() for each in sizes]
        if number == len(STEPS) - 1:
            states = [taken for (taken, *_) in spans]
            step = model.decode([own[0] for own in ids], contexts, [0, 0], tables, kv, states=states)
        else:
            chunks = [
                SequenceChunk(own, context, context, table, num_logits=len(own), states=states)
                for own, context, table, states in zip(ids, contexts, tables, spans, strict=True)
            ]
            step = model.forward(chunks, kv)
        logits.append(step)
        contexts = [context + count for context, (count, _) in zip(contexts, sizes, strict=True)]
    return logits


def num_native(parts: LanguageParts) -> int:
    return sum(type(module) is NativeDecoderLayer for module in parts.text.modules())


@_each_model
@each_dtype
def test_a_hybrid_model_runs_in_one_call_and_computes_the_same(folder: Path, dtype: torch.dtype) -> None:
    parts = loaded(folder, dtype)
    assert num_native(parts) == 4
    assert parts.decoder is not None
    assert parts.states is not None and parts.states.forwards == []  # and no weights twice
    own = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected, tolerance = run(LanguageModel.from_model(own)), 1e-4 if dtype is torch.float32 else 5e-2
    for mine, theirs in zip(run(LanguageModel(parts)), expected, strict=True):
        assert (mine - theirs).norm() <= tolerance * theirs.norm()


@_each_model
@pytest.mark.parametrize("option", ["weight_dtype", "kv_cache_dtype"])
def test_int8_runs_so_too(folder: Path, option: str) -> None:
    options: dict[str, Any] = {option: "int8"}
    parts = loaded(folder, torch.float32, **options)
    assert num_native(parts) == 4
    assert parts.decoder is not None
    exact = run(LanguageModel(loaded(folder, torch.float32)))
    for mine, theirs in zip(run(LanguageModel(parts)), exact, strict=True):
        assert 0 < (mine - theirs).norm() <= 0.3 * theirs.norm()


@_each_model
def test_packed_weights_of_a_file_give_the_same_bits(folder: Path, tmp_path: Path) -> None:
    cache = WeightCache(tmp_path / "cache", 1 << 30)
    cold, warm = (loaded(folder, torch.float32, cache) for _ in range(2))
    assert num_native(warm) == num_native(cold) == 4
    pairs = zip(run(LanguageModel(cold)), run(LanguageModel(warm)), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)


def test_layers_whose_experts_stay_keep_their_mixers_kernel(tmp_path: Path) -> None:
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = hf.Qwen3NextConfig(**DELTA, **experts, shared_expert_intermediate_size=32)
    torch.manual_seed(0)
    hf.Qwen3NextForCausalLM(config).save_pretrained(tmp_path)
    parts = loaded(tmp_path, torch.float32)
    assert num_native(parts) == 0
    assert parts.states is not None
    assert [forward.kernel is not None for forward in parts.states.forwards] == [True, True]
    own = hf.Qwen3NextForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for mine, theirs in zip(run(LanguageModel(parts)), run(LanguageModel.from_model(own)), strict=True):
        assert (mine - theirs).norm() <= 1e-4 * theirs.norm()
