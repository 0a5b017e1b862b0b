"""LoRA adapters of models some of whose layers keep a state: mixers, too, are adapted as PEFT adapts them, in
prompts, answers, and prompts that go on from a snapshot of the same adapter."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from cluster.config.adapters import read_adapters
from cluster.config.settings import PrefillArgs
from tests.fakes.slow_params import often
from tests.flow.hybrid_models import CONFIGS, save_hybrid
from tests.flow.local_cluster import local_cluster
from tests.flow.test_windows import window_args
from tests.flow.text_models import answers, draw_prompts, generated_by

NUM_TOKENS = 8
FORMS: dict[str, Any] = {
    "qwen3_5_text": {"all": ".*proj.*", "mixers": r".*(in_proj_qkv|in_proj_b|in_proj_z|out_proj)"},
    "lfm2": {"all": r".*(_proj|w\d)", "mixers": ".*conv.(in|out)_proj"},
    # PEFT refuses out_proj of mixers of this kind
    "falcon_h1": {"all": ".*(q|k|v|o|gate|up|down|in)_proj", "mixers": ".*in_proj"},
}


def save_adapters(
    folder: Path, forms: Mapping[str, str], prompts: list[tuple[int, ...]], num_tokens: int = NUM_TOKENS
) -> dict[str, list[list[int]]]:
    """Adapters of the model in `folder`, one for each pattern of modules, and what the plain model and each
    answers, by name."""
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    expected = {"": generated_by(model, prompts, num_tokens)}
    for seed, (kind, targets) in enumerate(forms.items()):
        torch.manual_seed(seed)
        config = LoraConfig(target_modules=targets, r=4 * (seed + 1), init_lora_weights=False)
        adapted: Any = get_peft_model(model, config)
        for key, parameter in adapted.named_parameters():
            if "lora_" in key:
                torch.nn.init.normal_(parameter, std=0.1)
        adapted.save_pretrained(folder / kind)
        expected[kind] = generated_by(adapted.eval(), prompts, num_tokens)
        model = adapted.unload()
    return expected


@pytest.mark.parametrize("name", often(CONFIGS, ["qwen3_5_text", "lfm2"]))
async def test_answers_of_adapted_mixers_equal_peft(name: str, tmp_path: Path) -> None:
    """Twice the same requests, all at once: cold, then from snapshots, which one adapter's prompts share with
    no other's."""
    folder, prompts = save_hybrid(tmp_path, name), draw_prompts((5, 37, 40))
    expected = save_adapters(folder, FORMS[name], prompts)
    assert len({str(each) for each in expected.values()}) == 3
    folders = {kind: str(folder / kind) for kind in FORMS[name]}
    digests = {adapter.name: adapter.digest for adapter in read_adapters(folders, 16)}
    args = window_args(folder, kv_blocks=4000).model_copy(
        update={
            "adapters": folders,
            "prefill": PrefillArgs(max_batch_tokens=24, kv_blocks=4000),
        }
    )
    async with local_cluster(args, (0, 1, 1)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        for _ in range(2):
            got = await asyncio.gather(
                *(
                    answers(cluster, prompt, NUM_TOKENS, adapter=digests.get(kind, ""))
                    for kind in expected
                    for prompt in prompts
                )
            )
            assert got == [[answer] for each in expected.values() for answer in each]
