"""Every text type with experts, made tiny: two ranks, with parts of experts and with whole ones, answer like
one process, or the type is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.config.families import MEDIA_FAMILIES
from cluster.errors import ConfigError
from cluster.model.language import LanguageModel
from tests.flow.test_tensor_parallel import BLOCK_SIZE, WHOLE, Answers, answers, answers_of_ranks, memory
from tests.flow.test_text_survey import check_by_name, default_config, model_class, tiny_config
from tests.flow.tiny_models import randomized

pytestmark = pytest.mark.slow
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
NOT_WHOLE, NOT_SHARED = (
    "no experts that ranks could have whole",
    "keeps states beside its KV that ranks cannot",
)
# its files have q, k and v in one weight, which transformers gives to ranks before it cuts it
UNCUT = "transformers cannot distribute model type 'sarvam_moe' to 2 ranks"
REFUSED = {
    "jetmoe": "has no `tp_plan`",
    f"jetmoe{WHOLE}": NOT_WHOLE,
    "lara_mini": NOT_SHARED,
    f"lara_mini{WHOLE}": NOT_SHARED,
    f"llama4_text{WHOLE}": NOT_WHOLE,
    f"longcat_flash{WHOLE}": NOT_WHOLE,
    "sarvam_moe": UNCUT,
    f"sarvam_moe{WHOLE}": UNCUT,
}


def names_with_experts() -> list[str]:
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) & set(CONFIG_MAPPING) - set(MEDIA_FAMILIES))
    return [name for name in names if any(hasattr(CONFIG_MAPPING[name], key) for key in NUM_EXPERTS)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Answers]]:
    """All types that are served on one rank, and what one process answers."""
    made = {}
    for name in names_with_experts():
        folder = tmp_path_factory.mktemp("model") / name
        try:
            check_by_name(name, default_config(name))
            torch.manual_seed(0)
            model = randomized(model_class(name)(tiny_config(name)))
            if not any("experts" in part for part, _ in model.named_modules()):
                continue
            model.save_pretrained(folder)
            language = LanguageModel.from_model(model, block_size=BLOCK_SIZE)
        except ConfigError:
            continue
        made[name] = (folder, answers(language, language, memory(language)))
    return made


@pytest.fixture(scope="module")
def of_ranks(folders, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    paths = {f"{name}{way}": folder for name, (folder, _) in folders.items() for way in ("", WHOLE)}
    return answers_of_ranks(paths, tmp_path_factory.mktemp("group") / "meeting")


def test_ranks_answer_like_one_process(folders, of_ranks) -> None:
    assert len(folders) > 25
    wrong = {}
    for name, found in of_ranks.items():
        if name in REFUSED or isinstance(found, str):
            if REFUSED.get(name, "no reason") not in found:
                wrong[name] = found
            continue
        tokens, logits = folders[name.removesuffix(WHOLE)][1]
        if found[0] != tokens or not torch.allclose(found[1], logits, rtol=1e-4, atol=1e-4):
            wrong[name] = "other numbers"
    assert not wrong and len(of_ranks) == 2 * len(folders)
