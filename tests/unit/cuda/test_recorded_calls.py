"""Recorded encoder calls: which forms are recorded, when, and what they give. On a simulated GPU, which
refuses what a recording refuses; of every family, on the CPU, with a capture that runs its work again."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from cluster.engine import forward
from cluster.engine.state import WorkResult
from cluster.model.cuda import recorded_calls
from cluster.model.cuda.capture import Replay, capture_cuda, wait_for_recording
from cluster.model.cuda.constants import Constants, NotRecordableError
from cluster.model.cuda.packed_towers import optimise_packed_attention
from cluster.model.cuda.recorded_calls import MAX_PLAIN_CALLS, RecordedCalls
from cluster.model.encoder import EncoderModel
from cluster.types.media import Modality
from cluster.worker.blame import Blame
from tests.fakes.cuda_device import CudaTensor
from tests.fakes.slow_params import often
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.unit.cuda.test_packed_attention import by_torch

Item = Mapping[str, Tensor]
DROPPING = ("idefics3", "smolvlm")  # drop tiles that are black
MASKED = ("aria", "moss_transcribe_diarize")  # have more integers than a form may have
# packed, with windows and with interpolated positions; tiles; sizes and masks of blocks; sound under a mask, in
# windows, and in windows that are padded
ON_DEVICE = (
    "qwen2_5_vl", "qwen3_vl", "gemma3", "mistral3", "qwen2_audio", "qwen3_asr", "qwen3_omni", "idefics3"
)  # fmt: skip
CPU = torch.device("cpu")


def again(work: Callable[[], Tensor]) -> Replay:
    """In place of a capture: runs the work at every replay, into the same tensor."""
    out = work()
    return lambda: out.copy_(work())


def items_of(name: str) -> tuple[Any, dict[Modality, Item]]:
    case = MEDIA_FAMILIES[name]()
    return case.model, {modality: some[0] for modality, some in case.items().items()}


def with_others(item: Item) -> list[Item]:
    """The item, and one of the same form."""
    return [
        item, {key: 1 - value if value.is_floating_point() else value for key, value in item.items()}
    ]  # fmt: skip


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_replay_launches_nothing_else_and_gives_the_rows(name, device, caplog) -> None:
    caplog.set_level(logging.INFO)
    model, items = items_of(name)
    encoder = EncoderModel.from_model(device.put(model))
    optimise_packed_attention(model, lambda *each: device.kernel(by_torch, *each))
    for modality, item in items.items():
        pair = with_others({key: CudaTensor(value) for key, value in item.items()})
        expected = [encoder.encode(modality, [each])[0].cpu() for each in pair]
        encoder.record(capture_cuda(is_alone=False))
        encoder.encode(modality, pair[:1])
        assert not encoder.record_next()
        encoder.encode(modality, pair[:1])
        assert encoder.record_next() and not encoder.record_next()
        device.operators.clear()
        num_syncs = device.num_syncs
        actual = [encoder.encode(modality, [each])[0] for each in pair]
        if name not in DROPPING:
            assert len(device.operators) < 20
            assert device.num_syncs - num_syncs <= 2  # the integers of a form are read
        for rows, own in zip(actual, expected, strict=True):
            assert torch.equal(rows.cpu(), own)
    assert ("is not recorded: aten.index.Tensor reads the device" in caplog.text) == (name in DROPPING)
    assert "any more" not in caplog.text


@pytest.mark.parametrize("name", often(MEDIA_FAMILIES, ("qwen3_omni", "llava_next", "gemma4_small")))
def test_constants_of_every_family_serve_another_item(name: str, caplog, monkeypatch) -> None:
    monkeypatch.setattr(recorded_calls, "MAX_ROWS", 4096)
    caplog.set_level(logging.INFO)
    model, items = items_of(name)
    encoder = EncoderModel.from_model(model)
    for modality, item in items.items():
        pair = with_others(item)
        expected = [encoder.encode(modality, [each, each]) for each in pair]
        encoder.record(again)
        for _ in range(2):
            encoder.encode(modality, [pair[0]] * 2)
        assert encoder.record_next() == (name not in MASKED)
        for each, own in zip(pair, expected, strict=True):
            for rows, alone in zip(encoder.encode(modality, [each, each]), own, strict=True):
                torch.testing.assert_close(rows, alone, rtol=1e-5, atol=1e-5)
    assert ("not recorded" in caplog.text) == (name in (*DROPPING, *MASKED)), caplog.text


class Calls:
    """Counts calls of a tower that doubles what it is given."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, _modality: Modality, items: Sequence[Item]) -> list[Tensor]:
        self.num_calls += 1
        return [item["pixels"] * 2 + item["grid"].sum() for item in items]


def item_of(num_rows: int, size: int = 1) -> Item:
    return {"pixels": torch.rand(num_rows, 2), "grid": torch.tensor([[1, size]])}


def encode(calls: RecordedCalls, *items: Item) -> None:
    for rows, item in zip(calls.encode(Modality.IMAGE, items), items, strict=True):
        torch.testing.assert_close(rows, item["pixels"] * 2 + item["grid"].sum())


def test_a_form_is_shapes_and_numbers_and_the_oldest_goes(monkeypatch) -> None:
    monkeypatch.setattr(recorded_calls, "MAX_FORMS", 2)
    num_recorded = 0

    def capture(work: Callable[[], Tensor]) -> Replay:
        nonlocal num_recorded
        num_recorded += 1
        return again(work)

    calls = RecordedCalls(Calls(), CPU, capture)
    forms = [(item_of(3), item_of(4)), (item_of(3, 2), item_of(4)), (item_of(7),)]
    for number, form in enumerate([*forms, forms[0]]):
        for _ in range(2):
            encode(calls, *form)
        assert calls.record_next() and num_recorded == number + 1  # the first has gone when the last comes
        encode(calls, *form)
        assert not calls.record_next()


def test_the_form_that_goes_takes_no_memory_of_the_others(device, monkeypatch) -> None:
    """With a graph torch frees the workspaces of its stream, on which the others were recorded, too."""
    monkeypatch.setattr(recorded_calls, "MAX_FORMS", 2)
    weight = torch.rand(2, 2).to("cuda")

    def run(_modality: Modality, items: Sequence[Item]) -> list[Tensor]:
        return [item["pixels"] @ weight for item in items]

    calls = RecordedCalls(run, torch.device("cuda"), capture_cuda(is_alone=False))
    items = [{"pixels": torch.rand(num_rows, 2).to("cuda")} for num_rows in (3, 4, 5)]
    for item in items:
        for _ in range(2):
            calls.encode(Modality.IMAGE, [item])
        assert calls.record_next()
    for item in items[1:]:  # the first has gone
        assert torch.equal(calls.encode(Modality.IMAGE, [item])[0].cpu(), (item["pixels"] @ weight).cpu())
        assert not calls.record_next()


def test_an_encoder_that_is_never_idle_records_after_some_calls() -> None:
    run = Calls()
    calls = RecordedCalls(run, CPU, lambda work: work().clone)
    for _ in range(MAX_PLAIN_CALLS):
        calls.encode(Modality.IMAGE, [item_of(3)])
    assert run.num_calls == MAX_PLAIN_CALLS
    for _ in range(5):
        calls.encode(Modality.IMAGE, [item_of(3)])
    assert run.num_calls == MAX_PLAIN_CALLS + 2  # watched, recorded
    assert not calls.record_next()


@pytest.mark.parametrize("name", ["MAX_ROWS", "MAX_BYTES", "MAX_INTEGERS"])
def test_large_calls_stay_as_they_are(name: str, monkeypatch) -> None:
    monkeypatch.setattr(recorded_calls, name, 1)
    calls = RecordedCalls(Calls(), CPU, lambda work: pytest.fail("recorded"))
    for _ in range(3):
        encode(calls, item_of(3))
        calls.record_next()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_recording_that_fails_is_tried_once_more(num_failures: int, caplog) -> None:
    caplog.set_level(logging.INFO)
    left = num_failures

    def capture(work: Callable[[], Tensor]) -> Replay:
        nonlocal left
        if left:
            left -= 1
            raise RuntimeError("operation not permitted")
        return again(work)

    run = Calls()
    calls = RecordedCalls(run, CPU, capture)
    for _ in range(2):
        for num_rows in (3, 3):
            encode(calls, item_of(num_rows))
        assert calls.record_next() and not calls.record_next()
    for num_rows in (4, 4, 3):  # another form is recorded in any case
        encode(calls, item_of(num_rows))
    assert calls.record_next() and not calls.record_next() and not left
    text = "an encoder call of image is not recorded: RuntimeError('operation not permitted'), twice"
    assert (text in caplog.text) == (num_failures == 2)


def test_a_call_that_remembers_what_it_made_is_recorded_the_second_time(caplog) -> None:
    caplog.set_level(logging.INFO)
    tables: list[Tensor] = []
    num_calls = 0

    def run(_modality: Modality, items: Sequence[Item]) -> list[Tensor]:
        nonlocal num_calls
        num_calls += 1
        table = tables[0] if tables else torch.arange(2.0)
        if num_calls == 3:  # the one that is watched
            tables.append(table)
        return [item["pixels"] + table * torch.full((2,), 2.0) for item in items]

    calls = RecordedCalls(run, CPU, again)
    item = item_of(3)
    for text, is_there in (("in one run and not in the next", True), ("not recorded", False)):
        for _ in range(2):
            calls.encode(Modality.IMAGE, [item])
        assert calls.record_next() and (text in caplog.text) == is_there
    before = num_calls
    rows = calls.encode(Modality.IMAGE, [item])[0]
    torch.testing.assert_close(rows, item["pixels"] + torch.tensor([0.0, 2.0]))
    assert num_calls == before + 1  # `again` runs it


def test_a_recording_leaves_nothing_behind_if_its_work_fails(device) -> None:
    capture, x, is_enabled = capture_cuda(is_alone=False), CudaTensor(torch.ones(2)), gc.isenabled()
    is_recorded: list[bool] = []

    def work() -> Tensor:
        is_recorded.append(device.capture is not None and not gc.isenabled())
        if len(is_recorded) == 2:
            x[0].item()
        return x * 2

    with pytest.raises(RuntimeError, match="a tensor is read on the host while a graph is recorded"):
        capture(work)
    assert is_recorded == [False, True] and device.capture is None and gc.isenabled() == is_enabled
    num_syncs = device.num_syncs
    replay = capture(work)
    assert torch.equal(replay().cpu(), torch.full((2,), 2.0)) and device.num_syncs == num_syncs + 1


def test_a_thread_without_memory_can_wait_until_nothing_is_recorded(device) -> None:
    """While a graph is recorded, torch does not free what it caches: what fails then may succeed later."""
    seen: list[bool] = []

    def work() -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            seen.append(wait_for_recording(0.0))
        return torch.ones(1, device="cuda")

    for is_alone in (True, False):
        assert wait_for_recording(0.0)
        capture_cuda(is_alone=is_alone)(work)
    assert seen == [False, False] and wait_for_recording(0.0)


@pytest.mark.parametrize(("error", "waits"), [(torch.OutOfMemoryError, True), (ValueError, False)])
def test_a_step_without_memory_is_tried_again_behind_a_recording(error, waits: bool, monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(forward, "wait_for_recording", lambda: order.append("wait"))

    def run(works: Any, on_layer: Any, then: Any) -> list[WorkResult]:
        order.append("run")
        if len(order) == 1:
            raise error
        return [WorkResult([[7]]) for _ in works]

    request: Any = SimpleNamespace(request_id="a", live_choices=[1])
    runner = SimpleNamespace(run=run, drop_ahead=lambda: None)
    planner, ahead = SimpleNamespace(has_runnable=False), mock.Mock()
    ahead.plan.return_value = ()
    model = SimpleNamespace(kv_layout=SimpleNamespace(segments=()), num_layers=1)
    parts: Any = (model, SimpleNamespace(runner=runner), planner, None, Blame(lambda *_: None), None, ahead)
    ((_, result),) = forward.StepForward(*parts).run([request], [], is_all=True)
    assert result.tokens == [[7]] and order == ["run", *["wait"] * waits, "run"]


def taken_over(run: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """What a run with constants gives of other numbers, and what it gives by itself."""
    with torch.inference_mode():
        grid, given, blank = torch.tensor([2, 3]), torch.rand(5, 2), torch.zeros(5, 2)
        constants = Constants([grid], CPU)
        constants.watch(lambda: run(grid, blank))
        return constants.take_over(lambda: run(grid, given)), run(grid, given)


def padded(grid: Tensor, rows: Tensor) -> Tensor:
    out = torch.zeros(9, 2)
    out[grid[0] : int(grid.sum()) + 2] += rows
    return out


def indexed(grid: Tensor, rows: Tensor) -> Tensor:
    out = rows * 2
    out[torch.arange(5) > grid[0]] = 7.0
    return out


def masked(grid: Tensor, rows: Tensor) -> Tensor:
    kept = torch.arange(5) != grid[0]
    parts = rows[kept].split([*(grid - 1).tolist(), 1])
    return torch.cat([part.sum(0, keepdim=True) for part in parts])


def changing(grid: Tensor, rows: Tensor) -> Tensor:
    numbers = torch.full((5, 1), 2.0)
    first = rows * numbers
    numbers[1:] = 3.0
    return first + rows * numbers + torch.repeat_interleave(rows, torch.tensor([1, 0, 2, 0, 2]), dim=0)


def remembering() -> Callable[[Tensor, Tensor], Tensor]:
    """Has a table for each tensor of segments, filled by a launch that torch does not know."""
    tables: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def run(grid: Tensor, rows: Tensor) -> Tensor:
        starts = grid.cumsum(0)
        if starts not in tables:
            tables[starts] = torch.empty(2)
            tables[starts].numpy()[:] = 1.0
        return padded(grid, rows + tables[starts])

    return run


@pytest.mark.parametrize("run", [padded, indexed, masked, changing, remembering()])
def test_memory_that_changes_is_no_constant(run) -> None:
    actual, expected = taken_over(run)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "run",
    [
        lambda grid, rows: rows[: int(rows.sum())],
        lambda grid, rows: rows[rows[:, 0] > 0],
        lambda grid, rows: rows.nonzero(),
    ],
)
def test_reads_of_what_is_computed_are_refused(run) -> None:
    with pytest.raises(NotRecordableError, match="reads the device"):
        taken_over(run)
