"""LoRA adapters in the language half: every row has what its own adapter adds, in any company, so tokens
equal those of PEFT's own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers.models.llama.modeling_llama import LlamaMLP

from cluster.config.adapters import AdapterRoom, read_adapters, room_for
from cluster.config.families import family_of_type
from cluster.errors import ConfigError
from cluster.model.cpu.library import load
from cluster.model.cpu.modules import WeightDtype
from cluster.model.cpu.weight_cache import WeightCache
from cluster.model.encoder import EncoderModel
from cluster.model.language import LanguageModel
from cluster.model.sharding import divided_oddly
from tests.fakes.slow_params import often
from tests.flow.adapter_folders import ADAPTERS, ATTENTION, adapters_of, save_adapter
from tests.flow.test_families import Sequence, Split, admit, decode, generate, memory, prefill
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import TEXT_FAMILIES, TinyCase

CASES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}
FAMILIES = (
    "llama", "qwen2", "qwen3", "phi3_window", "gemma2_softcap_window", "gpt_oss_sinks_window", "qwen3_moe",
    "deepseek_v3_mla", "qwen2_5_vl", "qwen3_vl",
)  # fmt: skip


class Adapted:
    """A family with three adapters, and what the whole model generates with each and without."""

    def __init__(
        self, name: str, folder: Path, dtype: torch.dtype = torch.float32, weight_dtype: WeightDtype = "auto",
        room: AdapterRoom | None = None, weight_cache: WeightCache | None = None,
        adapters: Mapping[str, Mapping[str, Any]] = ADAPTERS,
    ):  # fmt: skip
        """room: None: for its adapters, which it has from the start."""
        case = CASES[name]()
        case.requests = case.requests[:2]
        case.model.save_pretrained(folder / "model")
        expected = [generate(case, request) for request in case.requests]
        family = family_of_type(case.model.config.model_type)
        text_module = family.text_module if family.modalities else None
        folders, answers = adapters_of(case, folder, text_module, adapters)
        self.adapters = read_adapters(folders, max_rank=16)
        room = room or room_for(self.adapters)
        self.language = LanguageModel.load(
            folder / "model", dtype=dtype, weight_dtype=weight_dtype, adapters=room, weight_cache=weight_cache
        )
        has_media = any(request.placed for request in case.requests)
        encoder = EncoderModel.load(folder / "model", dtype=torch.float32) if has_media else None
        self.answers = [expected, *(answers[adapter.name] for adapter in self.adapters)]  # by slot
        self._split = Split(case, expected, encoder, self.language)

    @property
    def case(self) -> TinyCase:
        return self._split.case

    def sequences(self, slots: list[int]) -> tuple[list[Sequence], list[list[int]]]:
        """All requests once for each slot, and their answers."""
        sequences: list[Sequence] = []
        expected = []
        for slot in slots:
            own = admit(self._split, sum(len(sequence.table) for sequence in sequences))
            for sequence in own:
                sequence.adapter = slot
            sequences += own
            expected += self.answers[slot]
        return sequences, expected


@pytest.fixture(scope="module")
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(request.param, tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("adapted", often(FAMILIES, ["llama", "qwen2_5_vl"]), indirect=True, scope="module")
class TestTokens:
    def test_in_one_step_every_sequence_has_its_own_adapter(self, adapted: Adapted) -> None:
        assert len({str(answers) for answers in adapted.answers}) == 4  # each adapter changes them
        kv = memory(adapted.language)
        sequences, expected = adapted.sequences([0, 1, 2, 3, 1])
        prefill(adapted.language, kv, sequences, 16)
        assert decode(adapted.language, kv, sequences) == expected

    @pytest.mark.parametrize(("slot", "size"), [(0, 7), (2, 7), (1, 10_000)])
    def test_alone_in_chunks_of_another_size(self, adapted: Adapted, slot: int, size: int) -> None:
        kv = memory(adapted.language)
        sequences, expected = adapted.sequences([slot])
        prefill(adapted.language, kv, sequences, size)
        assert decode(adapted.language, kv, sequences) == expected


def test_eight_adapters_in_one_step_give_what_each_gives_alone(tmp_path: Path) -> None:
    eight = {str(number): ADAPTERS["all"] for number in range(8)}
    adapted = Adapted("qwen3", tmp_path, adapters=eight)
    assert len({str(answers) for answers in adapted.answers}) == 9
    sequences, expected = adapted.sequences([*range(9)])
    kv = memory(adapted.language)
    prefill(adapted.language, kv, sequences, 16)
    assert decode(adapted.language, kv, sequences) == expected  # of PEFT's model with that adapter alone


@pytest.mark.parametrize("name", often(FAMILIES, ["llama"]))
def test_adapters_that_come_later_take_the_places_of_others(name: str, tmp_path: Path) -> None:
    """Also in a model whose packed weights are mapped: there no linear can be run before it is replaced."""
    cache, room = WeightCache(tmp_path / "cache", 1 << 30), AdapterRoom(3, 17, is_open=True)
    adapted = Adapted(name, tmp_path, room=room, weight_cache=cache)
    mapped = LanguageModel.load(tmp_path / "model", dtype=torch.float32, adapters=room, weight_cache=cache)
    for language in (adapted.language, mapped):
        updates = [language.read_adapter(adapter) for adapter in adapted.adapters]
        for order in ((2, 0, 1), (1, 2, 0), (0, 1, 2)):
            for slot, which in enumerate(order, 1):
                language.write_adapter(slot, updates[which])
                language.set_adapter(slot, adapted.adapters[which].digest)
        slots = {adapter.digest: slot for slot, adapter in enumerate(adapted.adapters, 1)}
        assert language.adapter_slots == slots
        kv = memory(language)
        sequences, expected = adapted.sequences([0, 1, 2, 3, 1])
        prefill(language, kv, sequences, 16)
        assert decode(language, kv, sequences) == expected
        if name == "llama" and load() is not None:
            assert language.kernels_s is not None  # the whole model ran in one native call


@pytest.mark.skipif(load() is None, reason="no native kernels on this machine")
@pytest.mark.parametrize(
    ("name", "dtype", "weight_dtype"),
    [
        ("llama", torch.float32, "auto"), ("qwen2", torch.bfloat16, "auto"), ("qwen3", torch.float32, "int8"),
    ],
)  # fmt: skip
def test_native_layers_have_adapters_and_a_row_does_not_depend_on_its_company(
    name: str, dtype: torch.dtype, weight_dtype: WeightDtype, tmp_path: Path
) -> None:
    adapted = Adapted(name, tmp_path, dtype, weight_dtype)
    language = adapted.language

    def logits(slots: list[int]) -> list[Tensor]:
        kv = memory(language)
        sequences, _ = adapted.sequences(slots)
        chunks = [sequence.chunk(10_000) for sequence in sequences]
        return [*language.forward(chunks, kv)]

    alone = [row for slot in range(4) for row in logits([slot])]
    assert language.kernels_s is not None  # the whole model ran in one native call
    assert all(map(torch.equal, logits([0, 1, 2, 3]), alone))
    assert len({tuple(row.tolist()) for row in alone}) == len(alone)


def tiny(folder: Path, name: str = "llama") -> TinyCase:
    case = CASES[name]()
    case.model.save_pretrained(folder / "model")
    return case


def refusal(folder: Path, adapter: Path) -> str:
    with pytest.raises(ConfigError) as error:
        adapters = read_adapters({"mine": str(adapter)}, 16)
        LanguageModel.load(folder / "model", dtype=torch.float32, adapters=room_for(adapters))
    return error.value.message


def change(adapter: Path, new: Callable[[str, Tensor], Tensor]) -> None:
    file = adapter / "adapter_model.safetensors"
    save_file({name: new(name, tensor).contiguous() for name, tensor in load_file(file).items()}, file)


def test_an_adapter_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    case = tiny(tmp_path)
    adapter = save_adapter(case.model, tmp_path / "a", targets=("down_proj",), r=4)
    change(adapter, lambda name, tensor: tensor[:, :32] if "lora_A" in name else tensor)
    assert "'mine'" in (told := refusal(tmp_path, adapter)) and "belongs to another model" in told


def test_an_adapter_of_the_encoder_is_refused_by_name(tmp_path: Path) -> None:
    case = tiny(tmp_path, "qwen2_5_vl")
    adapter = save_adapter(case.model, tmp_path / "a", "visual", targets=("proj",), r=4)
    assert "visual" in (told := refusal(tmp_path, adapter)) and "encoders" in told


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    case = tiny(tmp_path)
    adapter = save_adapter(case.model, tmp_path / "a", targets=ATTENTION, r=4)
    change(adapter, lambda _, tensor: tensor.index_fill(0, torch.tensor([1]), torch.inf))
    assert "not finite" in refusal(tmp_path, adapter)


def test_a_linear_that_the_model_does_not_call_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models read the weight of a linear: what an adapter adds would be left out."""
    case = tiny(tmp_path)
    adapter = save_adapter(case.model, tmp_path / "a", targets=("up_proj",), r=4)

    def forward(mlp: LlamaMLP, x: Tensor) -> Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * linear(x, mlp.up_proj.weight))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    assert "layers.0.mlp.up_proj" in (told := refusal(tmp_path, adapter)) and "does not call" in told


def test_a_linear_that_ranks_divide_in_parts_of_pieces_has_no_room(tmp_path: Path) -> None:
    model = tiny(tmp_path).model
    up = model.model.layers[0].mlp.up_proj
    assert not divided_oddly(model, [up])
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.up_proj": "packed_colwise"}
    assert divided_oddly(model, [up]) == [up]
