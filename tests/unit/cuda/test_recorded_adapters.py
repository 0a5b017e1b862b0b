"""Steps with LoRA adapters as CUDA graphs, on a simulated GPU: which adapter a token has is an input of the
recorded step like its id."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from cluster.config.adapters import read_adapters, room_for
from cluster.model.adapters import AdapterSlots, SlotMatrices
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.flow.adapter_folders import ATTENTION, MLP, save_adapter
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.cuda.recorded_and_plain import PROMPTS, TABLES, Compared


def adapted_model(device: SimulatedCuda, folder: Path) -> LanguageModel:
    whole = TEXT_FAMILIES["qwen3"]().model.eval()
    folders = {
        "all": save_adapter(whole, folder / "all", targets=ATTENTION + MLP, r=8),
        "some": save_adapter(whole, folder / "some", seed=1, targets=("q_proj", "down_proj"), r=4),
    }
    adapters = read_adapters({name: str(path) for name, path in folders.items()}, 8)
    parts = probed_parts(device.put(whole), 16, "auto")
    slots = AdapterSlots(parts.text, room_for(adapters), torch.device("cuda"), torch.float32)
    assert all(m.down.device.type == "cuda" for m in parts.text.modules() if isinstance(m, SlotMatrices))
    model = LanguageModel(replace(parts, adapters=slots, attention=RecordedAttention()))
    for slot, adapter in enumerate(adapters, 1):
        model.set_adapter(slot, model.prepare_adapter(adapter))
    return model


def prompts(adapters: list[int]) -> list[SequenceChunk]:
    return [
        SequenceChunk(PROMPTS[i], 0, 0, TABLES[i], adapter=adapter)
        for i, adapter in zip((1, 2), adapters, strict=True)
    ]


def test_replayed_steps_have_the_adapters_of_their_tokens(device: SimulatedCuda, tmp_path: Path) -> None:
    compared = Compared(adapted_model(device, tmp_path))
    seen = [compared.forward(prompts(adapters)) for adapters in ([0, 0], [1, 2], [2, 0], [0, 1])]
    first = torch.stack([rows[0] for rows in seen])
    assert torch.equal(first[0], first[3])  # the first prompt had none, in the company of another's
    assert all((first[0] - first[i]).abs().max() > 0.1 for i in (1, 2))
    assert (first[1] - first[2]).abs().max() > 0.1
    assert compared.num_forwards == 0
    compared.check_kv()


def test_replayed_answers_have_the_adapters_of_their_sequences(device: SimulatedCuda, tmp_path: Path) -> None:
    compared = Compared(adapted_model(device, tmp_path))
    compared.forward(prompts([1, 2]))
    answers = ([9, 10], [3, 11], [0, 0], TABLES[1:3])
    found = [compared.decode(*answers, adapters) for adapters in ([1, 2], [], [0, 2])]
    assert (found[0][0] - found[1][0]).abs().max() > 0.1
    assert torch.equal(found[1][0], found[2][0]) and torch.equal(found[0][1], found[2][1])
    one = compared.decode([9], [3], [0], TABLES[1:2], [1])  # padding has none
    assert torch.equal(one[0], found[0][0])


def test_recorded_steps_have_an_adapter_that_came_later(device: SimulatedCuda, tmp_path: Path) -> None:
    model = adapted_model(device, tmp_path)
    compared = Compared(model)
    first, other = (compared.forward(prompts([slot, 0])) for slot in (1, 2))
    (some,) = read_adapters({"some": str(tmp_path / "some")}, 8)
    compared.graphed.set_adapter(1, model.prepare_adapter(some))
    now = compared.forward(prompts([1, 0]))
    assert compared.num_forwards == 0
    assert torch.equal(now, other) and (now[0] - first[0]).abs().max() > 0.1
    assert model.adapter_slots == {some.digest: 1}
