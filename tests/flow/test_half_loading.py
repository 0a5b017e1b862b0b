"""Each worker reads only its half of a checkpoint, whole and unchanged; models that cannot be served are
refused by name before a weight is read; and the shipped checkpoint obeys the law with all its media."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from cluster.errors import ConfigError, UnsupportedError
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel
from cluster.model.loading import AbsentHalf, Half, load_half
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.request import Prompt
from tests.flow.test_families import Split, admit, decode, generate, memory, prefill
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES, TinyCase, TinyRequest

NEMOTRON = sorted({"nemotron_h_omni"} & set(MEDIA_FAMILIES))  # not in every release of transformers
DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"


@pytest.mark.parametrize(
    "name",
    ["qwen2_5_omni", "qwen3_vl", "llava_onevision", "gemma3", "qwen2_audio", "idefics3", *NEMOTRON],
)
def test_halves_of_a_saved_checkpoint_are_complete_and_equal_the_whole(name: str, tmp_path: Path) -> None:
    case = MEDIA_FAMILIES[name]()
    case.model.save_pretrained(tmp_path)
    expected = [generate(case, request) for request in case.requests]
    encoder = EncoderModel.load(tmp_path, dtype=torch.float32)
    whole = EncoderModel.from_model(case.model)
    for modality, item in [pair for request in case.requests for pair in request.items]:
        ours, theirs = (half.encode(modality, [item])[0] for half in (encoder, whole))
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)  # a loaded one has native kernels
    language = LanguageModel.load(tmp_path, dtype=torch.float32)
    assert language.fingerprint == encoder.fingerprint
    halves = Split(case, expected, encoder, language)
    kv, sequences = memory(language), admit(halves)
    prefill(language, kv, sequences, 16)
    assert decode(language, kv, sequences) == expected


@pytest.mark.parametrize("name", ["qwen2_5_omni", "gemma3"])
def test_a_half_holds_no_weight_of_the_other(name: str, tmp_path: Path) -> None:
    model = MEDIA_FAMILIES[name]().model
    model.save_pretrained(tmp_path)
    held = {}
    for half in Half:
        loaded = load_half(tmp_path, half, dtype=torch.float32, device="cpu")
        assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
        assert any(isinstance(module, AbsentHalf) for module in loaded.modules())
        held[half] = {key for key, _ in loaded.named_parameters()}
    assert not held[Half.ENCODER] & held[Half.LANGUAGE]
    assert held[Half.ENCODER] | held[Half.LANGUAGE] == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize(("name", "whole"), [("qwen2_5_omni", "Qwen2_5Omni"), ("qwen3_omni", "Qwen3OmniMoe")])
def test_the_thinker_is_found_inside_an_omni_checkpoint(name: str, whole: str, tmp_path: Path) -> None:
    case = MEDIA_FAMILIES[name]()
    case.model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {f"thinker.{key}": tensor for key, tensor in weights.items()}
    save_file({**renamed, "talker.weight": torch.zeros(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    config = getattr(hf, f"{whole}Config")(thinker_config=case.model.config.to_dict())
    config.architectures = [f"{whole}ForConditionalGeneration"]
    config.save_pretrained(tmp_path)
    expected = [generate(case, request) for request in case.requests]
    encoder = EncoderModel.load(tmp_path, dtype=torch.float32)
    language = LanguageModel.load(tmp_path, dtype=torch.float32)
    kv, sequences = memory(language), admit(Split(case, expected, encoder, language))
    prefill(language, kv, sequences, 16)
    assert decode(language, kv, sequences) == expected


def test_a_checkpoint_without_a_weight_of_its_half_is_refused(tmp_path: Path) -> None:
    model = TEXT_FAMILIES["llama"]().model
    state = {key: tensor for key, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in key}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ConfigError, match=r"lacks.*layers\.1\.mlp\.up_proj"):
        LanguageModel.load(tmp_path, dtype=torch.float32)


_SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (
            hf.Gemma4TextConfig(**_SMALL, use_bidirectional_attention="all"),
            "Gemma4ForCausalLM",
            "gemma4_text.*both directions",
        ),
        (hf.MambaConfig(vocab_size=64), "MambaForCausalLM", "mamba"),
        (hf.JambaConfig(**_SMALL), "JambaForCausalLM", "jamba.*ignore the state"),
        (hf.BloomConfig(vocab_size=64), "BloomForCausalLM", "bloom.*attention interface"),
        (hf.T5Config(vocab_size=64), "T5ForConditionalGeneration", "t5.*encoder-decoder"),
        (hf.PaliGemmaConfig(), "PaliGemmaForConditionalGeneration", "paligemma.*in both directions"),
        (hf.BertConfig(vocab_size=64), "BertForMaskedLM", "bert"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_served_is_refused_by_name(
    config: hf.PreTrainedConfig, architecture: str, reason: str, tmp_path: Path
) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        LanguageModel.load(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (hf.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2), "gpt2.*no backbone named 'model'"),
        (hf.GPTNeoXConfig(**_SMALL, intermediate_size=64), "gpt_neox.*no backbone named 'model'"),
        (
            hf.NemotronConfig(**_SMALL, num_key_value_heads=2, intermediate_size=64),
            "nemotron.*no arguments on to attention",
        ),
    ],
)
def test_a_backbone_that_cannot_be_driven_is_refused_by_name(
    config: hf.PreTrainedConfig, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        LanguageModel.from_model(hf.AutoModelForCausalLM.from_config(config))


def test_a_text_model_has_no_encoder_half(tmp_path: Path) -> None:
    TEXT_FAMILIES["llama"]().model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no media encoder"):
        EncoderModel.load(tmp_path, dtype=torch.float32)


class _DoubledLogits(hf.LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        assert output.logits is not None
        output.logits = output.logits * 2
        return output


def test_an_unknown_rule_after_the_head_is_refused() -> None:
    config: Any = TEXT_FAMILIES["llama"]().model.config
    with pytest.raises(ConfigError, match=r"llama.*cluster does not know"):
        LanguageModel.from_model(_DoubledLogits(config))


def test_a_prompt_that_ends_in_a_media_item_is_refused() -> None:
    language = LanguageModel.from_model(MEDIA_FAMILIES["qwen2_vl"]().model)
    image = PlacedMedia(Modality.IMAGE, "x", ((1, 4),), MediaGeometry(4, grid_thw=(1, 2, 8)))
    with pytest.raises(UnsupportedError, match="end with text"):
        language.positions(Prompt((5, *[390] * 4), (image,)))


def test_a_prompt_in_which_one_clip_is_heard_and_another_is_not_is_refused() -> None:
    language = LanguageModel.from_model(MEDIA_FAMILIES["qwen2_5_omni"]().model)
    video = MediaGeometry(4, grid_thw=(1, 4, 4), second_per_grid=1.0)
    media = (
        PlacedMedia(Modality.VIDEO, "heard", ((1, 4),), video),
        PlacedMedia(Modality.AUDIO, "its sound", ((5, 2),), MediaGeometry(2, num_mel_frames=8)),
        PlacedMedia(Modality.VIDEO, "silent", ((9, 4),), video),
    )
    with pytest.raises(UnsupportedError, match="either all clips"):
        language.positions(Prompt((5, *[391] * 4, 392, 392, 6, 6, *[391] * 4, 7), media))


# ------------------------------------------------------------------------------------------- the shipped
# checkpoint


def _demo_request(processor: Any, parts: list[dict], question: str) -> TinyRequest:
    """One prompt through the real processor; items are cut out of its joint tensors."""
    message = {"role": "user", "content": [*parts, {"type": "text", "text": question}]}
    settings = json.loads((DEMO / "mm_processor_kwargs.json").read_text())
    inputs = processor.apply_chat_template(
        [message],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **settings,
    )
    ids = inputs["input_ids"][0].tolist()
    token_ids = placeholder_ids()
    request = TinyRequest(token_ids=ids, generate_kwargs={k: torch.as_tensor(v) for k, v in inputs.items()})
    del request.generate_kwargs["input_ids"], request.generate_kwargs["attention_mask"]
    for part in parts:
        _add_item(request, inputs, Modality(part["type"]), token_ids[Modality(part["type"])])
    return request


def placeholder_ids() -> dict[Modality, int]:
    config = json.loads((DEMO / "config.json").read_text())
    return {modality: config[f"{modality}_token_index"] for modality in Modality}


def _add_item(request: TinyRequest, inputs: dict, modality: Modality, token_id: int) -> None:
    offset = request.token_ids.index(token_id)
    count = request.token_ids.count(token_id)  # one item of each modality per prompt here
    match modality:
        case Modality.IMAGE:
            item = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
            geometry = MediaGeometry(count, grid_thw=tuple(item["image_grid_thw"][0].tolist()))
        case Modality.VIDEO:
            item = {key: inputs[key] for key in ("pixel_values_videos", "video_grid_thw")}
            seconds = float(torch.as_tensor(inputs["video_second_per_grid"])[0])
            grid = tuple(item["video_grid_thw"][0].tolist())
            geometry = MediaGeometry(count, grid_thw=grid, second_per_grid=seconds)
        case Modality.AUDIO:
            item = {key: inputs[key] for key in ("input_features", "feature_attention_mask")}
            geometry = MediaGeometry(count, num_mel_frames=int(item["feature_attention_mask"].sum()))
    request.placed.append(PlacedMedia(modality, str(modality), ((offset, count),), geometry))
    request.items.append((modality, item))


def test_the_demo_checkpoint_in_halves_equals_generate_with_image_video_and_audio() -> None:
    processor = hf.AutoProcessor.from_pretrained(DEMO)
    rng = np.random.default_rng(3)
    image = {"type": "image", "image": rng.integers(0, 255, (64, 64, 3), dtype=np.uint8)}
    video = {"type": "video", "video": rng.integers(0, 255, (8, 64, 64, 3), dtype=np.uint8)}
    audio = {"type": "audio", "audio": rng.normal(0, 0.1, 20_000).astype(np.float32)}
    requests = [
        _demo_request(processor, [image, video, audio], "What is this?"),
        _demo_request(processor, [audio], "Which word?"),
        _demo_request(processor, [], "Count to five."),
    ]
    model = hf.AutoModelForMultimodalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    case = TinyCase(model, requests)
    expected = [generate(case, request) for request in requests]
    encoder = EncoderModel.load(DEMO, dtype=torch.float32)
    language = LanguageModel.load(DEMO, dtype=torch.float32)
    assert encoder.fingerprint == language.fingerprint
    assert language.eos_token_ids == (1014,)
    for size in (7, 16, 10_000):
        kv, sequences = memory(language), admit(Split(case, expected, encoder, language))
        prefill(language, kv, sequences, size)
        assert decode(language, kv, sequences) == expected


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, value: float, dtype: torch.dtype
) -> None:
    model = TEXT_FAMILIES["llama"]().model
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"not finite: model\.layers\.1\.mlp\.up_proj\.weight"):
        LanguageModel.load(tmp_path, dtype=dtype)


def test_a_file_of_weights_that_is_cut_short_is_named(tmp_path: Path) -> None:
    TEXT_FAMILIES["llama"]().model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ConfigError, match=r"model\.safetensors .* is no whole safetensors file"):
        LanguageModel.load(tmp_path, dtype=torch.float32)
