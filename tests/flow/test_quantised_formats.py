"""Every format of quantised weights that is served: each weight is the number that its codes stand for, bit
by bit, and both halves answer as `generate` of the whole plain model does. What a format does not explain is
refused by name."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.config.checkpoint import check_weights, weight_files
from cluster.errors import ConfigError
from cluster.model.cpu.library import load
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.dequantising import plain_tensors
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel
from cluster.model.loading import Half, fingerprint, load_half
from tests.fakes.slow_params import often
from tests.flow.quantised_folders import Checkpoint, fuzzed, is_linear, plain, whole_omni
from tests.flow.quantised_formats import FORMS, in_form
from tests.flow.test_families import Split, admit, decode, generate, memory, prefill
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES, TinyCase, TinyRequest

CASES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}
NEMOTRON = sorted({"nemotron_h_omni"} & set(MEDIA_FAMILIES))  # not in every release of transformers
FAMILIES = ("llama", "qwen2", "qwen3_moe", "qwen2_5_omni", "qwen2_5_vl", *NEMOTRON)
# By layout of the codes, and by where zeros and scales lie.
DIFFERENT = (
    "fp8 in blocks that are not filled", "compressed fp8 by rows", "modelopt fp8", "W4A16",
    "W4A16 with zeros", "AWQ", "GPTQ with zeros", "NVFP4",
)  # fmt: skip
each_form = pytest.mark.parametrize("form", FORMS)
each_form_often = pytest.mark.parametrize("form", often(FORMS, DIFFERENT))


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    return {name: plain(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


def is_text_linear(name: str) -> bool:
    towers = ("visual", "audio_tower", "vision_model", "sound_encoder")
    return is_linear(name) and not any(tower in name for tower in towers)


def language_half(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return dict(load_half(folder, Half.LANGUAGE, dtype=dtype, device="cpu").named_parameters())


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_what_its_codes_stand_for(form: str, dtype, originals, tmp_path: Path) -> None:
    stored, expected = in_form(originals["llama"], FORMS[form], is_linear)
    found = language_half(stored.save(tmp_path), dtype)
    assert set(found) == set(expected.tensors)
    for name, parameter in found.items():
        assert parameter.dtype is dtype and torch.equal(parameter, expected.tensors[name].to(dtype)), name
    num_parameters = sum(tensor.numel() for tensor in expected.tensors.values())
    assert check_weights(tmp_path).num_parameters == num_parameters


def check_answers(case: TinyCase, stored: Checkpoint, expected: Checkpoint, folder: Path) -> None:
    """The law of the house, with `expected` as the whole plain model."""
    reference = expected.model_class.from_pretrained(expected.save(folder / "plain"), dtype=torch.float32)
    case = TinyCase(reference.eval(), case.requests or [TinyRequest().text(29, seed=3)])
    answers = [generate(case, request) for request in case.requests]
    stored.save(folder / "stored")
    language = LanguageModel.load(folder / "stored", dtype=torch.float32)
    has_media = any(request.placed for request in case.requests)
    encoder = EncoderModel.load(folder / "stored", dtype=torch.float32) if has_media else None
    assert encoder is None or encoder.fingerprint == language.fingerprint
    kv, sequences = memory(language), admit(Split(case, answers, encoder, language))
    prefill(language, kv, sequences, 16)
    assert decode(language, kv, sequences) == answers


@each_form_often
def test_greedy_tokens_equal_generate(form: str, originals, tmp_path: Path) -> None:
    check_answers(CASES["qwen2"](), *in_form(originals["qwen2"], FORMS[form], is_linear), tmp_path)


@pytest.mark.parametrize(
    "form", often(["compressed fp8 by rows", "W4A16 with zeros", "AWQ", "GPTQ", "NVFP4"], ["AWQ", "NVFP4"])
)
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_5_vl", *NEMOTRON])
def test_experts_and_both_halves_of_a_media_model_equal_generate(
    form: str, family: str, originals, tmp_path: Path
) -> None:
    stored, expected = in_form(originals[family], FORMS[form], is_text_linear)
    check_answers(CASES[family](), stored, expected, tmp_path)


def test_a_quantised_tower_equals_generate(originals, tmp_path: Path) -> None:
    stored, expected = in_form(originals["qwen2_5_vl"], FORMS["W4A16"], is_linear)
    assert any("visual" in name and name.endswith("_packed") for name in stored.tensors)
    check_answers(CASES["qwen2_5_vl"](), stored, expected, tmp_path)


@pytest.mark.parametrize("form", ["modelopt fp8", "AWQ"])
def test_the_part_of_a_whole_omni_is_dequantised(form: str, originals, tmp_path: Path) -> None:
    part, expected = in_form(originals["qwen2_5_omni"], FORMS[form], is_text_linear)
    entry = part.config.pop("quantization_config")
    stored = whole_omni(part, "qwen2_5_omni")
    if form == "AWQ":
        stored.config["quantization_config"] = entry
    else:  # an older export
        stored.other_files["hf_quant_config.json"] = {"quantization": {"quant_algo": "FP8"}}
    stored.save(tmp_path / "stored"), expected.save(tmp_path / "plain")
    for half in Half:
        found, wanted = (
            load_half(tmp_path / folder, half, dtype=torch.float32, device="cpu").state_dict()
            for folder in ("stored", "plain")
        )
        assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    "form", ["W4A16", "AWQ", "GPTQ with zeros", "fp8 in blocks that are not filled", "compressed NVFP4"]
)
def test_any_slice_of_a_weight_is_the_slice_of_the_whole(form: str, originals, tmp_path: Path) -> None:
    """A rank's share need not begin at a word, a group or a block."""
    stored, expected = in_form(originals["llama"], FORMS[form], is_linear)
    quantisation = check_weights(stored.save(tmp_path)).quantisation
    assert quantisation is not None
    name = "model.layers.1.mlp.down_proj.weight"
    with plain_tensors(weight_files(tmp_path), quantisation, torch.float32) as tensors:
        whole = expected.tensors[name]
        assert tensors[name].get_shape() == list(whole.shape) and torch.equal(tensors[name][...], whole)
        for rows, columns in [
            (slice(3, 21), slice(0, 96)),
            (slice(32, 64), slice(48, 96)),
            (slice(5, 6), slice(7)),
        ]:
            assert torch.equal(tensors[name][rows, columns], whole[rows, columns])
    assert not tensors


def test_modules_that_were_left_plain_are_loaded_as_they_are(originals, tmp_path: Path) -> None:
    """Whatever the list of the entry says: names, or patterns."""
    form = FORMS["W4A16"]
    stored, expected = in_form(
        originals["llama"], form, lambda name: is_linear(name) and "layers.1" not in name
    )
    stored.config["quantization_config"] = {**form.entry, "ignore": ["re:.*layers\\.1\\..*", "lm_head"]}
    found = language_half(stored.save(tmp_path))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.tensors.items())


def test_scales_of_the_kv_are_noted_and_not_used(originals, tmp_path: Path, caplog) -> None:
    stored, expected = in_form(originals["llama"], FORMS["modelopt fp8"], is_linear)
    for layer in range(3):
        for leaf in "kv":
            name = f"model.layers.{layer}.self_attn.{leaf}_proj.{leaf}_scale"
            stored.tensors[name] = torch.tensor(0.5)
    with caplog.at_level(logging.INFO, "cluster.model.loading"):
        found = language_half(stored.save(tmp_path))
    assert set(found) == set(expected.tensors)
    assert "27 scales of activations or KV are not used" in caplog.text


def test_every_format_has_a_fingerprint_of_its_own(originals, tmp_path: Path) -> None:
    found = set()
    for number, form in enumerate(FORMS.values()):
        folder = tmp_path / str(number)
        in_form(originals["llama"], form, is_linear)[0].save(folder)
        half = load_half(folder, Half.LANGUAGE, dtype=torch.float32, device="cpu")
        found.add(fingerprint(half.config, torch.float32))
    assert len(found) == len(FORMS)


@pytest.mark.skipif(load() is None, reason="no native kernels for this CPU, or no compiler")
@pytest.mark.parametrize("form", ["W4A16", "GPTQ"])
@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_packed_weights_are_made_of_them_and_mapped(
    form: str, weight_dtype, originals, tmp_path: Path
) -> None:
    """As of the plain folder: the same tokens, and nothing is dequantised the second time."""
    stored, expected = in_form(originals["llama"], FORMS[form], is_linear)
    cache = WeightCache(tmp_path / "cache", 1 << 30)
    case = TinyCase(CASES["llama"]().model, [TinyRequest().text(29, seed=3)])
    stored.save(tmp_path / "stored"), expected.save(tmp_path / "plain")
    answers, fingerprints = [], set()
    for folder, weight_cache in (("plain", None), ("stored", None), ("stored", cache), ("stored", cache)):
        language = LanguageModel.load(
            tmp_path / folder, dtype=torch.float32, weight_dtype=weight_dtype, weight_cache=weight_cache
        )
        kv, sequences = memory(language), admit(Split(case, [], None, language))
        prefill(language, kv, sequences, 16)
        answers.append(decode(language, kv, sequences))
        fingerprints.add(language.fingerprint)
    assert list((tmp_path / "cache").glob("*.weights"))
    assert all(answer == answers[0] for answer in answers) and len(fingerprints) == 2


# ---------------------------------------------------------------------------------------------------- what is
# refused by its values


def check_refused(checkpoint: Checkpoint, folder: Path, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        language_half(checkpoint.save(folder))
    assert "unquantised checkpoint" in str(error.value) and "\n" not in str(error.value)


@each_form_often
def test_inverted_scales_are_refused_by_name(form: str, originals, tmp_path: Path) -> None:
    stored, _ = in_form(originals["llama"], FORMS[form], is_linear)
    ending = (".weight_scale_inv", ".weight_scale", ".scales", ".weight_scale_2", ".weight_global_scale")
    name = next(name for name in reversed(stored.tensors) if name.endswith(ending))
    scales = stored.tensors[name]
    is_exponent = scales.dtype == torch.uint8
    stored.tensors[name] = 254 - scales if is_exponent else 1 / scales
    check_refused(stored, tmp_path, f"{name} gives weights of about .* inverted")
    if not is_exponent:
        stored.tensors[name] = -scales
        check_refused(stored, tmp_path, f"{name} gives weights of about -")


def changed_tensor(form: str, ending: str, change: Callable, originals) -> Checkpoint:
    stored, _ = in_form(originals["llama"], FORMS[form], is_linear)
    name = next(name for name in stored.tensors if name.endswith(ending))
    stored.tensors[name] = change(stored.tensors[name].clone())
    return stored


@pytest.mark.parametrize(
    ("form", "ending", "change", "reason"),
    [
        ("W4A16", "_shape", lambda shape: shape - 1, r"weight_shape is not \[\d+, \d+\]"),
        ("GPTQ", "g_idx", lambda index: index.flip(0), r"g_idx does not count .* \(desc_act\)"),
        ("GPTQ", "qzeros", lambda zeros: zeros + 1, "qzeros is not symmetric"),
        ("GPTQ with zeros", "qzeros", lambda zeros: zeros | 15, "zero points that GPTQ cannot hold"),
    ],
)
def test_values_that_contradict_the_format_are_refused(
    form: str, ending: str, change: Callable, reason: str, originals, tmp_path: Path
) -> None:
    check_refused(changed_tensor(form, ending, change, originals), tmp_path, reason)


def test_awq_whose_activations_are_scaled_too_is_refused(originals, tmp_path: Path) -> None:
    """Some families have a scale between an activation and a linear: `mlp.act.scales`."""
    stored, _ = in_form(originals["llama"], FORMS["AWQ"], is_linear)
    stored.tensors["model.layers.0.mlp.act.scales"] = torch.ones(96, dtype=torch.float16)
    check_refused(stored, tmp_path, r"mlp\.act\.scales .* not 4 bit AWQ .*act\.qweight is missing")


def test_nvfp4_whose_activations_are_scaled_too_is_refused(originals, tmp_path: Path) -> None:
    """modelopt's NVFP4_AWQ, whatever its entry says."""
    stored, _ = in_form(originals["llama"], FORMS["NVFP4"], is_linear)
    name = "model.layers.0.mlp.down_proj.pre_quant_scale"
    stored.tensors[name] = torch.ones(96)
    check_refused(stored, tmp_path / "scale", rf"{name} .* not modelopt NVFP4")
    del stored.tensors[name]
    stored.config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}
    check_refused(stored, tmp_path / "entry", "modelopt NVFP4_AWQ")


# ---------------------------------------------------------------------------------------------------- any
# change

_DTYPES = (
    torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32, torch.int64,
)  # fmt: skip
_ENDINGS = (".scale", ".weight_scale", ".scales", ".weight_scale_inv", ".qscale", ".weight", ".qweight")
# The two versions of GPTQ cannot be told apart: the entry decides what a zero point means.
FUZZED = tuple(name for name in FORMS if name != "GPTQ v2 with zeros")
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["dtype", "rename", "drop", "cut", "entry", "move"]),
        st.integers(0, 200),
        st.integers(0, 40),
    ),
    min_size=1,
    max_size=2,
)


def changed(stored: Checkpoint, changes: list[tuple[str, int, int]]) -> Checkpoint:
    """No scale becomes another number."""
    stored = stored.copied()
    for what, first, second in changes:
        parts = [name for name in stored.tensors if is_linear(name.rpartition(".")[0] + ".weight")]
        name = parts[first % len(parts)]
        tensor = stored.tensors[name]
        if what == "dtype":
            stored.tensors[name] = tensor.to(_DTYPES[second % len(_DTYPES)])
        elif what == "rename":
            new = name.rpartition(".")[0] + _ENDINGS[second % len(_ENDINGS)]
            stored.tensors.setdefault(new, stored.tensors.pop(name))
        elif what == "drop":
            del stored.tensors[name]
        elif what == "cut":
            stored.tensors[name] = tensor[: len(tensor) // 2] if tensor.ndim else tensor.reshape(1, 1, 1)
        elif what == "entry":
            stored.config["quantization_config"] = FORMS[FUZZED[second % len(FUZZED)]].entry
        elif (entry := stored.config.pop("quantization_config", None)) and second % 2:
            stored.config["text_config"] = {"quantization_config": entry}
    return stored


@pytest.fixture(scope="module")
def made(originals) -> Callable[[str], tuple[Checkpoint, Checkpoint]]:
    return functools.cache(lambda form: in_form(originals["llama"], FORMS[form], is_linear))


def check_change(form: str, changes: list[tuple[str, int, int]], made: Callable, folder: Path) -> None:
    stored, expected = made(form)
    try:
        found = language_half(changed(stored, changes).save(folder))
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    assert all(torch.equal(parameter, expected.tensors[name]) for name, parameter in found.items())


@example(form="AWQ", changes=[("move", 0, 0)])
@example(form="W4A16", changes=[("move", 0, 1)])
@example(form="compressed fp8, static", changes=[("rename", 1, 3)])
@given(form=st.sampled_from(FUZZED), changes=CHANGES)
@fuzzed(30)
def test_a_changed_checkpoint_is_refused_or_exact(form: str, changes: list, made, tmp_path: Path) -> None:
    check_change(form, changes, made, tmp_path)


@pytest.mark.slow
@given(form=st.sampled_from(FUZZED), changes=CHANGES)
@fuzzed(600)
def test_many_changed_checkpoints_are_refused_or_exact(form: str, changes: list, made, tmp_path) -> None:
    check_change(form, changes, made, tmp_path)
