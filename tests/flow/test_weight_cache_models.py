"""Models loaded from files of packed weights compute, bit by bit, what models loaded from their checkpoints
compute, and read no tensor of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.cpu.library import load
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel, SequenceChunk
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES

pytestmark = pytest.mark.skipif(load() is None, reason="no native kernels for this CPU, or no compiler")


@pytest.fixture
def cache(tmp_path: Path) -> WeightCache:
    return WeightCache(tmp_path / "cache", 1 << 30)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Tensors that transformers reads from a checkpoint."""
    from transformers import core_model_loading

    found: list[object] = []
    original = core_model_loading._materialize_copy

    def noting(tensor: Tensor, *args: object, **keywords: object) -> Tensor:
        found.append(tensor)
        return original(tensor, *args, **keywords)

    monkeypatch.setattr(core_model_loading, "_materialize_copy", noting)
    return found


def logits(model: LanguageModel) -> Tensor:
    kv = BlockMemory(model.kv_layout, 4)
    ids = [3, 77, 5, 12, 250, 9]
    with torch.inference_mode():
        chunk = SequenceChunk(ids, torch.arange(6), 0, [0])
        first = model.forward([chunk], kv)
        return torch.cat([first, model.decode([4], [6], [0], [[0]], kv)])


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"dtype": torch.float32}),
        ("qwen2", {"dtype": torch.bfloat16}),
        ("qwen3", {"dtype": torch.float32, "weight_dtype": "int8"}),
        ("gemma2_softcap_window", {"dtype": torch.float32}),  # its layers stay, their linears are replaced
        ("mixtral", {"dtype": torch.float32}),
    ],
)
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_mapped_language_model_is_the_one_that_was_packed(
    family: str, options: dict, is_tied: bool, tmp_path: Path, cache: WeightCache, reads: list[object]
):
    model = TEXT_FAMILIES[family]().model
    if is_tied:
        model.config.tie_word_embeddings = True
        model.lm_head.weight = model.get_input_embeddings().weight
    model.save_pretrained(tmp_path)
    plain = LanguageModel.load(tmp_path, **options)
    expected = logits(plain)
    cold = LanguageModel.load(tmp_path, weight_cache=cache, **options)
    reads.clear()
    warm = LanguageModel.load(tmp_path, weight_cache=cache, **options)
    assert reads == []
    # Experts run on torch, whose products differ in the last bit with the alignment of their weights.
    assert torch.allclose(logits(cold), expected, atol=1e-5 if family == "mixtral" else 0, rtol=0)
    assert torch.equal(logits(cold), logits(warm))
    for loaded in (cold, warm):
        assert loaded.weight_bytes == plain.weight_bytes
        assert loaded.kv_layout == plain.kv_layout


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio", "llama4"])
def test_a_mapped_encoder_is_the_one_that_was_packed(
    name: str, tmp_path: Path, cache: WeightCache, reads: list[object]
):
    case = MEDIA_FAMILIES[name]()
    case.model.save_pretrained(tmp_path)
    plain = EncoderModel.load(tmp_path, dtype=torch.float32)
    cold = EncoderModel.load(tmp_path, dtype=torch.float32, weight_cache=cache)
    reads.clear()
    warm = EncoderModel.load(tmp_path, dtype=torch.float32, weight_cache=cache)
    assert reads == []
    for modality, item in [pair for request in case.requests for pair in request.items]:
        (expected,) = plain.encode(modality, [item])
        for loaded in (cold, warm):
            assert torch.equal(loaded.encode(modality, [item])[0], expected)
