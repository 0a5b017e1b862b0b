"""What a model folder says about itself before anything is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.checkpoint import (
    check_checkpoint,
    check_family,
    check_weights,
    kv_row_bytes,
    placeholder_ids,
    read_config,
    takes_media,
)
from cluster.config.families import EncoderForm, PositionForm
from cluster.errors import ConfigError
from cluster.text.defaults import GenerationDefaults, context_length
from cluster.text.tokenizer import TextProcessor
from tests.fakes.model_folders import DEMO_MODEL, NUM_PARAMETERS, text_folder, whole_omni_folder


def test_family_records_need_neither_torch_nor_transformers():
    script = "import sys, cluster.config.families; print({'torch', 'transformers'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


def test_every_form_that_a_family_names_has_its_function():
    from cluster.model.media_calls import CALLS
    from cluster.model.positions import RULES

    assert set(CALLS) == set(EncoderForm) and set(RULES) == set(PositionForm)


def test_of_a_whole_omni_checkpoint_every_reader_sees_the_part_that_is_served(tmp_path):
    folder, demo = whole_omni_folder(tmp_path / "omni"), read_config(DEMO_MODEL)
    config = read_config(folder)
    assert config == demo and takes_media(config)
    assert placeholder_ids(config) == placeholder_ids(demo) != {}
    assert context_length(folder) == context_length(DEMO_MODEL)
    assert GenerationDefaults.load(folder).eos_token_ids == (1014,)
    assert TextProcessor.load(folder).vocab_size == demo["text_config"]["vocab_size"]


def test_a_text_folder_passes_and_takes_no_media(tmp_path):
    config, weights = check_checkpoint(text_folder(tmp_path / "m"))
    assert not takes_media(config) and weights.num_parameters == NUM_PARAMETERS


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"model_type": "paligemma", "vision_config": {}},
            "'paligemma' is not supported: .* both directions",
        ),
        ({"model_type": "newest_vl", "vision_config": {}}, "'newest_vl' is not supported: it is multimodal"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "'t5' is not supported: it is an encoder-decoder"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM' is not a causal"),
    ],
)
def test_a_family_that_cannot_be_served_is_refused_by_name(tmp_path, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        check_family(read_config(text_folder(tmp_path / "m", **changes)))


@pytest.mark.parametrize("text", ["{", "[]", '{"hidden_size": 3}', '{"model_type": "qwen2_5_omni"}'])
def test_a_broken_config_is_named(tmp_path, text):
    folder = text_folder(tmp_path / "m")
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"m/config\.json"):
        read_config(folder)


@pytest.mark.parametrize("content", [b"", b"{", None])
def test_a_tokenizer_that_is_missing_or_broken_is_named(tmp_path, content):
    folder = text_folder(tmp_path / "m")
    (folder / "tokenizer.json").unlink()
    if content is not None:
        (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"m(/tokenizer\.json| has no tokenizer)"):
        check_checkpoint(folder)
    with pytest.raises(ConfigError, match=r"m(/tokenizer\.json| has no tokenizer)"):
        TextProcessor.load(folder)


def test_a_broken_generation_config_is_named(tmp_path):
    folder = text_folder(tmp_path / "m")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        GenerationDefaults.load(folder)


@pytest.mark.parametrize("num_bytes", [0, 4, 40, -1])
def test_weights_that_are_cut_short_are_named(tmp_path, num_bytes):
    file = text_folder(tmp_path / "m") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(ConfigError, match=r"m/model\.safetensors \(\d+ bytes\) is no whole safetensors file"):
        check_weights(tmp_path / "m")


def test_a_missing_shard_is_named(tmp_path):
    folder = text_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"m/two\.safetensors is missing"):
        check_weights(folder)
    del index["weight_map"]["b"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check_weights(folder).num_parameters == NUM_PARAMETERS


def test_a_folder_without_weights_is_refused_and_pickled_ones_are_left_to_transformers(tmp_path):
    folder = text_folder(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has no weights"):
        check_weights(folder)
    (folder / "pytorch_model.bin").touch()
    assert check_weights(folder).num_parameters == 0


def test_a_context_length_that_equals_its_familys_default_may_be_left_out(tmp_path: Path):
    folder = text_folder(tmp_path / "m", model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    config = json.loads((folder / "config.json").read_text())
    del config["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    assert context_length(folder) == 8192


def test_a_limit_of_length_that_equals_its_familys_default_may_be_left_out(tmp_path: Path):
    changes = {"model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"]}
    folder = text_folder(tmp_path / "m", **changes, max_position_embeddings=131_072)
    assert context_length(folder) == 8191  # one less than a chunk: from there on queries are scaled


@pytest.mark.parametrize(
    ("changes", "length"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 128}}, 128),
        ({"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 128}, 128),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, 512),
        ({"rope_parameters": {"rope_type": "dynamic", "original_max_position_embeddings": 128}}, 512),
        ({"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 128}}, None),
        ({"attention_chunk_size": 128}, 128),
        ({"attn_temperature_tuning": True, "floor_scale": 129}, 128),
        ({"attn_temperature_tuning": False, "floor_scale": 129}, None),
        ({}, None),
    ],
)
def test_no_sequence_is_so_long_that_it_would_be_computed_in_another_way(tmp_path, changes, length):
    folder = text_folder(tmp_path / "m", **changes)
    assert context_length(folder) == (length or 512)
    assert context_length(folder, asked=100) == 100
    if length is None:
        assert context_length(folder, asked=4096) == 4096
    else:
        with pytest.raises(ConfigError, match=f"max_model_len is 4096; .* beyond {length} tokens"):
            context_length(folder, asked=4096)


def test_a_tokens_kv_is_counted_only_where_all_layers_store_alike():
    text = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "num_hidden_layers": 3}
    assert kv_row_bytes({"text_config": text}, 2) == 96 * 2
    for other in ("kv_lora_rank", "num_kv_shared_layers", "global_head_dim", "full_attention_interval"):
        assert kv_row_bytes({**text, other: 1}, 2) == 0
    assert kv_row_bytes({**text, "layer_types": ["full_attention", "linear_attention"]}, 2) == 0
    assert kv_row_bytes({**text, "layer_types": ["full_attention", "sliding_attention"]}, 2) == 96 * 2
