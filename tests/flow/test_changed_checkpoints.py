"""Checkpoints in fp8 blocks of which something was changed at random are refused, or what their tensors stand
for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.errors import ConfigError
from cluster.model.loading import Half, load_half
from tests.flow.quantised_folders import (
    FP8_ENTRY,
    Checkpoint,
    declared,
    dequantised,
    fp8,
    fuzzed,
    part_of,
    plain,
    whole_omni,
)

_DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8,
    torch.uint8, torch.int32,
)  # fmt: skip
_ENDINGS = ("_scale", ".scale", "_scales", "_scale_2", "_inv", "_absmax", "_qscale")
_PLACES = (
    None, "", "thinker_config", "thinker_config.text_config", "thinker_config.vision_config", "talker_config",
)  # fmt: skip
Change = tuple[str, int, int]
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("dtype"), st.integers(0, 400), st.integers(0, len(_DTYPES) - 1)),
        st.tuples(st.just("rename"), st.integers(0, 400), st.integers(0, len(_ENDINGS) - 1)),
        st.tuples(st.just("drop"), st.integers(0, 400), st.just(0)),
        st.tuples(st.just("move"), st.just(0), st.integers(0, len(_PLACES) - 1)),
        st.tuples(st.just("block"), st.integers(1, 40), st.integers(1, 40)),
        st.tuples(st.just("static"), st.just(0), st.just(0)),
    ),
    min_size=1,
    max_size=3,
)


def changed(checkpoint: Checkpoint, changes: list[Change]) -> Checkpoint:
    """`checkpoint`: with its entry at the top."""
    checkpoint = checkpoint.copied()
    entry = checkpoint.config["quantization_config"]
    for what, first, second in changes:
        scales = [name for name in checkpoint.tensors if name.endswith("_scale_inv")]
        names = list(checkpoint.tensors)
        name = names[first % len(names)]
        if what == "dtype":
            checkpoint.tensors[name] = checkpoint.tensors[name].to(_DTYPES[second])
        elif what == "rename" and scales:
            name = scales[first % len(scales)]
            stem = name.removesuffix("_scale_inv")
            new = (stem.removesuffix(".weight") if _ENDINGS[second].startswith(".") else stem) + _ENDINGS[
                second
            ]
            checkpoint.tensors[new] = checkpoint.tensors.pop(name)
        elif what == "drop" and scales:
            del checkpoint.tensors[scales[first % len(scales)]]
        elif what == "block":
            entry["weight_block_size"] = [first, second]
        elif what == "static":
            entry["activation_scheme"] = "static"
        elif what == "move":
            checkpoint.config.pop("quantization_config", None)
            place = _PLACES[second]
            if place is not None:
                try:
                    part_of(checkpoint.config, place)["quantization_config"] = entry
                except KeyError:  # a text model has no parts
                    checkpoint.config[place] = {"quantization_config": entry}
    return checkpoint


def check_change(base: Checkpoint, changes: list[Change], folder: Path, halves: tuple[Half, ...]) -> None:
    """Refused, or what the tensors stand for: scales that lost their name stand for nothing."""
    checkpoint = changed(base, changes)
    checkpoint.save(folder / "changed")
    accepted = {}
    for half in halves:
        with suppress(ConfigError):
            accepted[half] = load_half(folder / "changed", half, dtype=torch.float32, device="cpu")
    if not accepted:
        return
    coded = [name for name, tensor in checkpoint.tensors.items() if tensor.itemsize == 1]
    assert all(f"{name}_scale_inv" in checkpoint.tensors for name in coded)
    blocks = [change[1:] for change in changes if change[0] == "block"]
    expected = dequantised(checkpoint, *blocks[-1:])
    expected.config = {key: value for key, value in base.config.items() if key != "quantization_config"}
    expected.save(folder / "plain")
    for half, ours in accepted.items():
        theirs = load_half(folder / "plain", half, dtype=torch.float32, device="cpu")
        for (name, parameter), wanted in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert torch.equal(parameter, wanted), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return declared(fp8(plain("llama", tmp_path_factory.mktemp("llama"))), FP8_ENTRY)


@pytest.fixture(scope="module")
def omni(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    thinker = fp8(plain("qwen2_5_omni", tmp_path_factory.mktemp("omni")))
    return declared(whole_omni(thinker, "qwen2_5_omni"), FP8_ENTRY)


@example(changes=[("rename", 0, 0)])
@example(changes=[("move", 0, 0)])
@example(changes=[("move", 0, 1), ("dtype", 1, 1)])
@given(changes=CHANGES)
@fuzzed(30)
def test_a_changed_checkpoint_is_refused_or_exact(changes: list[Change], llama, tmp_path: Path) -> None:
    check_change(llama, changes, tmp_path, (Half.LANGUAGE,))


@example(changes=[("move", 0, 4)])
@example(changes=[("move", 0, 5)])
@given(changes=CHANGES)
@fuzzed(8)
def test_a_changed_omni_is_refused_or_exact(changes: list[Change], omni, tmp_path: Path) -> None:
    check_change(omni, changes, tmp_path, tuple(Half))


@pytest.mark.slow
@given(changes=CHANGES)
@fuzzed(500)
def test_many_changed_checkpoints_are_refused_or_exact(changes: list[Change], llama, tmp_path: Path) -> None:
    check_change(llama, changes, tmp_path, (Half.LANGUAGE,))


@pytest.mark.slow
@given(changes=CHANGES)
@fuzzed(100)
def test_many_changed_omnis_are_refused_or_exact(changes: list[Change], omni, tmp_path: Path) -> None:
    check_change(omni, changes, tmp_path, tuple(Half))
