"""Steps with LoRA adapters as CUDA graphs, on a simulated GPU: which adapter a token has is an input of the
recorded step like its id."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import transformers as hf
from torch import Tensor

from cluster.config.adapters import read_adapters, room_for
from cluster.kvcache.memory import BlockMemory
from cluster.model.adapter_staging import AdapterStaging
from cluster.model.adapters import AdapterSlots
from cluster.model.cuda.graphs import GraphedModel
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import probed_parts
from cluster.model.slot_matrices import SlotMatrices, Update
from cluster.model.step_adapters import StepAdapters
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.recorded_attention import RecordedAttention
from tests.flow.adapter_folders import ATTENTION, MLP, save_adapter
from tests.flow.tiny_models import TEXT_FAMILIES
from tests.unit.cuda.recorded_and_plain import NUM_BLOCKS, PROMPTS, SIZES, TABLES, Compared


def whole() -> hf.PreTrainedModel:
    return TEXT_FAMILIES["qwen3"]().model.eval()


def adapted_model(device: SimulatedCuda, folder: Path) -> tuple[LanguageModel, AdapterSlots]:
    model = whole()
    folders = {
        "all": save_adapter(model, folder / "all", targets=ATTENTION + MLP, r=8),
        "some": save_adapter(model, folder / "some", seed=1, targets=("q_proj", "down_proj"), r=4),
    }
    adapters = read_adapters({name: str(path) for name, path in folders.items()}, 8)
    parts = probed_parts(device.put(model), 16, "auto")
    slots = AdapterSlots(
        parts.text, replace(room_for(adapters), is_open=True), torch.device("cuda"), torch.float32
    )
    assert all(m.down.device.type == "cuda" for m in parts.text.modules() if isinstance(m, SlotMatrices))
    model = LanguageModel(replace(parts, adapters=slots, attention=RecordedAttention()))
    for slot, adapter in enumerate(adapters, 1):
        model.write_adapter(slot, model.read_adapter(adapter))
        model.set_adapter(slot, adapter.digest)
    return model, slots


VIEWS = ("view", "slice", "split", "getitem")


def prompts(adapters: list[int]) -> list[SequenceChunk]:
    return [
        SequenceChunk(PROMPTS[i], 0, 0, TABLES[i], adapter=adapter)
        for i, adapter in zip((1, 2), adapters, strict=True)
    ]


def test_replayed_steps_have_the_adapters_of_their_tokens(device: SimulatedCuda, tmp_path: Path) -> None:
    compared = Compared(adapted_model(device, tmp_path)[0])
    seen = [compared.forward(prompts(adapters)) for adapters in ([0, 0], [1, 2], [2, 0], [0, 1])]
    first = torch.stack([rows[0] for rows in seen])
    assert torch.equal(first[0], first[3])  # the first prompt had none, in the company of another's
    assert all((first[0] - first[i]).abs().max() > 0.1 for i in (1, 2))
    assert (first[1] - first[2]).abs().max() > 0.1
    assert compared.num_forwards == 0
    compared.check_kv()


def test_replayed_answers_have_the_adapters_of_their_sequences(device: SimulatedCuda, tmp_path: Path) -> None:
    compared = Compared(adapted_model(device, tmp_path)[0])
    compared.forward(prompts([1, 2]))
    answers = ([9, 10], [3, 11], [0, 0], TABLES[1:3])
    found = [compared.decode(*answers, adapters) for adapters in ([1, 2], [], [0, 2])]
    assert (found[0][0] - found[1][0]).abs().max() > 0.1
    assert torch.equal(found[1][0], found[2][0]) and torch.equal(found[0][1], found[2][1])
    one = compared.decode([9], [3], [0], TABLES[1:2], [1])  # padding has none
    assert torch.equal(one[0], found[0][0])


def test_steps_without_adapters_are_recorded_as_those_of_a_model_without_room(
    device: SimulatedCuda, tmp_path: Path
) -> None:
    """All sizes, each with as many launches; which recording serves follows from the step's tokens."""
    without_room = LanguageModel(
        replace(probed_parts(device.put(whole()), 16, "auto"), attention=RecordedAttention())
    )
    num_launches: list[list[int]] = []
    replayed: list[int] = []

    def capture(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        device.operators.clear()
        work()
        number = len(num_launches[-1])
        num_launches[-1].append(len(device.operators))
        return lambda: (replayed.append(number), work())[1]

    for model in (without_room, adapted_model(device, tmp_path)[0]):
        num_launches.append([])
        kv = BlockMemory(model.kv_layout, NUM_BLOCKS + 1, "cuda")
        graphed = GraphedModel(model, kv, SIZES, capture)
        graphed.warm_up()
    plain, (without, adapted) = num_launches[0], (num_launches[1][::2], num_launches[1][1::2])
    assert len(plain) == 3 and without == plain
    assert all(more > least for more, least in zip(adapted, plain, strict=True))

    found = []
    for adapters in ([0, 0], [0, 2]):
        graphed.forward(prompts(adapters), kv)
        found.append(graphed.decode([9, 10], [3, 11], [0, 0], TABLES[1:3], kv, adapters).cpu().clone())
    graphed.decode([9, 10], [3, 11], [0, 0], TABLES[1:3], kv)
    assert [number % 2 for number in replayed] == [0, 0, 1, 1, 0]
    assert torch.equal(found[0][0], found[1][0]) and not torch.equal(found[0][1], found[1][1])


def test_recorded_steps_have_an_adapter_that_came_later(device: SimulatedCuda, tmp_path: Path) -> None:
    """It is written beside the steps: the host waits once, for its own copies, and there are few of them."""
    model, slots = adapted_model(device, tmp_path)
    compared = Compared(model)
    first, other = (compared.forward(prompts([slot, 0])) for slot in (1, 2))
    (some,) = read_adapters({"some": str(tmp_path / "some")}, 8)
    updates = model.read_adapter(some)

    def written(slot: int) -> tuple[int, int]:
        """How often the host waits, and what is launched and copied."""
        num_syncs, steps = device.num_syncs, torch.cuda.Event()
        device.operators.clear()
        steps.record()  # what the steps have enqueued
        model.write_adapter(slot, updates)
        assert not steps.query()
        launches = [name for name in device.operators if not any(view in name for view in VIEWS)]
        return device.num_syncs - num_syncs, len(launches)

    one_by_one = written(2)
    assert min(one_by_one) >= 2 * len(updates)
    slots.stage_writes()
    # beside the copy of the matrices: ranks sent and distributed, matrices distributed, what is behind them
    assert written(1) == (1, 4)
    model.set_adapter(1, some.digest)
    now = compared.forward(prompts([1, 0]))
    assert compared.num_forwards == 0
    assert torch.equal(now, other) and (now[0] - first[0]).abs().max() > 0.1
    assert model.adapter_slots == {some.digest: 1}


def test_a_large_adapter_is_sent_in_parts(device: SimulatedCuda) -> None:
    """Into the second slot, of products of several linears; what the slot had is gone."""
    step = StepAdapters(3, 8)
    linears = [("q", 0, 40), ("v", 60, 80)]
    stores, plain = (
        [
            SlotMatrices(linears, 24, 80, step, place, torch.float32),
            SlotMatrices([("out", 0, 24)], 80, 24, step, place, torch.float32),
        ]
        for place in (torch.device("cuda"), torch.device("cpu"))
    )
    staging = AdapterStaging(torch.device("cuda"), torch.float32, max(store.largest for store in stores), 0)
    generator = torch.Generator().manual_seed(1)
    for rank, names in ((8, ("q", "v", "out")), (4, ("v", "out")), (5, ("q", "v"))):
        sizes = {"q": (24, 40), "v": (24, 20), "out": (80, 24)}
        updates = {
            name: Update(
                torch.randn(rank, sizes[name][0], generator=generator),
                torch.randn(sizes[name][1], rank, generator=generator),
            )
            for name in names
        }
        before = device.num_syncs
        staging.write(2, stores, updates)
        assert device.num_syncs > before + 1
        for store, expected in zip(stores, plain, strict=True):
            expected.write_slot(2, updates)
            for name, numbers in expected.named_buffers():
                assert torch.equal(store.get_buffer(name).cpu(), numbers), name
