"""Ranks that share a hybrid model: each keeps its share of the states, and a worker of theirs answers like
`generate`. Four ranks, with parts of experts and with whole ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from cluster.config.adapters import AdapterRoom
from cluster.config.settings import PrefillArgs
from cluster.engine.state import PromptWork
from cluster.model.language import LanguageModel
from tests.flow.hybrid_models import save_hybrid
from tests.flow.local_cluster import local_cluster
from tests.flow.test_tensor_parallel import (
    ADAPTED,
    SLOTS,
    WHOLE,
    adapters_in,
    answers_of_ranks,
    memory,
    save,
)
from tests.flow.test_tensor_parallel import BLOCK_SIZE as KV_BLOCK
from tests.flow.test_tensor_parallel import answers as answers_of
from tests.flow.test_text_survey import model_class, tiny_config
from tests.flow.test_windows import window_args
from tests.flow.text_models import answers, draw_prompts, generated
from tests.flow.tiny_models import randomized

slow = pytest.mark.slow  # `test_tensor_parallel` has some in every run
NUM_TOKENS = 24
# Text types with mixers of every kind; those of media: `test_tensor_parallel`
NAMES = (
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "lfm3", "falcon_h1", "nemotron_h",
    "granitemoehybrid", "bamba", "kimi_linear", "olmo_hybrid", "bailing_hybrid",
)  # fmt: skip
_FOUR = {"num_key_value_heads": 4}
_DELTA = {**_FOUR, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
_ONE_GROUP = {**_FOUR, "mamba_n_groups": 1}
# By name: model type, and what is changed so that four ranks have equal numbers of heads
ON_FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    f"qwen3_next{WHOLE}": ("qwen3_next", {**_DELTA, "num_experts": 8}),
    "qwen3_next": ("qwen3_next", {**_DELTA, "num_experts": 6}),
    "small_parts": ("qwen3_5_moe_text", {**_DELTA, "moe_intermediate_size": 40}),
    "groups": ("nemotron_h", {**_FOUR, "n_groups": 4, "mamba_num_heads": 8, "mamba_head_dim": 16}),
    "norm_over_ranks": ("bamba", _ONE_GROUP),
    "norm_before_gate": ("falcon_h1", {**_ONE_GROUP, "mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "norm_after_gate": ("falcon_h1", {**_ONE_GROUP, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    "biases": ("lfm2", {**_FOUR, "conv_bias": True}),
    f"qwen3_moe{WHOLE}": ("qwen3_moe", {**_FOUR, "num_local_experts": 8}),
    f"gpt_oss{WHOLE}": ("gpt_oss", {**_FOUR, "num_local_experts": 8}),
    f"deepseek_v3{WHOLE}": ("deepseek_v3", {"n_routed_experts": 8}),
    f"six_experts{WHOLE}": ("qwen3_moe", {**_FOUR, "num_local_experts": 6}),
    "two_key_heads": ("qwen3_5_text", _FOUR),
    "two_groups": ("falcon_h1", {**_FOUR, "mamba_n_groups": 2}),
    "two_kv_heads": ("qwen3_5_moe_text", {**_DELTA, "num_key_value_heads": 2}),
    "one_kv_head_with_biases": ("lfm3", {"num_key_value_heads": 1, "attention_bias": True}),
    "three_kv_heads": ("lfm3", {"num_attention_heads": 12, "num_key_value_heads": 3}),
}
REFUSED = {
    f"six_experts{WHOLE}": "Cannot evenly shard 6 experts across 4 expert-parallel ranks",
    "small_parts": "strides should be multiple of 16 bytes",
    "two_key_heads": "2 key heads of its mixers cannot be distributed evenly to 4 ranks",
    "two_groups": "2 groups of its mixers cannot be distributed evenly to 4 ranks",
    "three_kv_heads": "3 KV heads cannot be distributed evenly to 4 ranks",
}


def found_by(models: dict[str, tuple[str, dict[str, Any]]], num_ranks: int, folder: Path) -> dict[str, Any]:
    """What differs from one process, or why it was refused."""
    expected, paths = {}, {name: folder / name for name in models}
    for name, (model_type, changes) in models.items():
        torch.manual_seed(0)
        model = randomized(model_class(model_type)(tiny_config(model_type, **changes)))
        model.save_pretrained(paths[name])
        language = LanguageModel.from_model(model, block_size=KV_BLOCK)
        expected[name] = (*answers_of(language, language, memory(language)), language)
    found = {}
    for name, got in answers_of_ranks(paths, folder / "meeting", num_ranks).items():
        tokens, logits, whole = expected[name]
        if isinstance(got, str):
            found[name] = got
        elif got[0] != tokens or not torch.allclose(got[1], logits, rtol=1e-4, atol=1e-4):
            found[name] = "other numbers"
        elif got[3] > 0.7 * whole.weight_bytes:
            found[name] = f"weights: {got[3]} of {whole.weight_bytes} bytes"
    return found


@slow
def test_two_ranks_have_halves_of_every_kind_of_mixer(tmp_path):
    assert found_by({name: (name, {}) for name in NAMES}, 2, tmp_path) == {}


@slow
def test_four_ranks_answer_like_one_process_or_the_model_is_refused_by_name(tmp_path):
    found = found_by(ON_FOUR, 4, tmp_path)
    assert {name: why for name, why in found.items() if REFUSED.get(name, "no reason") not in why} == {}
    assert found.keys() == REFUSED.keys()


@slow
def test_adapters_of_mixers_are_divided_as_the_mixers_are(tmp_path):
    """As one process has them, which `test_hybrid_adapters` compares with PEFT."""
    names = [f"{name}{ADAPTED}" for name in ("lfm2", "falcon_h1")]
    for name in names:
        save(name, tmp_path / name)
    shared = answers_of_ranks({name: tmp_path / name for name in names}, tmp_path / "meeting")
    for name, (tokens, logits, _, weight_bytes, _) in shared.items():
        room = AdapterRoom(2, 16, adapters_in(tmp_path / name), is_open=True)
        language = LanguageModel.load(
            tmp_path / name, dtype=torch.float32, block_size=KV_BLOCK, adapters=room
        )
        expected = answers_of(language, language, memory(language), SLOTS)
        assert tokens == expected[0] != answers_of(language, language, memory(language))[0]
        torch.testing.assert_close(logits, expected[1], rtol=1e-4, atol=1e-4)
        assert weight_bytes < 0.7 * language.weight_bytes
    assert [*shared] == names


async def test_a_worker_of_two_ranks_goes_on_from_snapshots(tmp_path):
    """Prompts with one beginning, in pieces, one after the other; then all at once."""
    folder = save_hybrid(tmp_path, "qwen3_5_text")
    prompts = draw_prompts((1, 5, 24, 37, 90, 33))
    crowd = [prompts[4][:56] + tail for tail in (prompts[3], prompts[2], prompts[5])]
    prefill = PrefillArgs(max_batch_tokens=24, kv_blocks=1000)
    changes = {"tensor_parallel_size": 2, "prefill": prefill}
    args = window_args(folder, kv_blocks=1000).model_copy(update=changes)
    async with local_cluster(args, (0, 0, 0, 1)) as cluster:
        engine = cluster.decodes[0].engine
        num_computed, got, run = [], [], engine.runner.run

        def count(works: Any, *others: Any) -> Any:
            num_computed[-1] += sum(work.num_tokens for work in works if isinstance(work, PromptWork))
            return run(works, *others)

        with patch.object(engine.runner, "run", count):
            for prompt in crowd:
                num_computed.append(0)
                got += await answers(cluster, prompt, NUM_TOKENS)
        assert num_computed == [len(crowd[0]), len(crowd[1]), len(crowd[2]) - 56]
        at_once = await asyncio.gather(
            *(answers(cluster, prompt, NUM_TOKENS, num_choices=2) for prompt in prompts[:4])
        )
    assert got == generated(folder, crowd, NUM_TOKENS)
    assert at_once == [[answer] * 2 for answer in generated(folder, prompts[:4], NUM_TOKENS)]
