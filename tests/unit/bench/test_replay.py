"""A recorded run in the simulator: what it is made of, and that it takes exactly as long as its curves say
where no request waits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.router.__main__ import main
from bench.router.overheads import Overheads, measure
from bench.router.recording import NUM_PREPARE_THREADS, Recording, read
from bench.router.replay import NUM_RUNS, Replayed, as_placed, known_from, replay, replayed_curves, table
from cluster.types.curves import Curve, ServiceCurves
from cluster.types.media import Modality

PREFILL, ENCODE, DECODE = [0.010, 2e-4, 0.0], [0.005, 1e-3, 0.0], [0.030, 5e-4, 0.0]
PREPARE = [0.002, 0.0, 0.0]
LINK_S = 0.003
TEXT_TOKENS, ROWS = 100, 40
ITEM_START, ITEM_TOKENS = 4, 20  # two rows are pooled into one
IMAGE_TOKENS = 60  # of the prompt with an image


def seconds(curve: list[float], units: int) -> float:
    return curve[0] + curve[1] * units


def curves(role: str) -> dict[str, Any]:
    return {
        "encode": {"encode": {"image": ENCODE}, "max_step_units": 4096},
        "prefill": {"prefill": PREFILL, "max_step_units": 2048},
        "decode": {"decode": DECODE},
    }[role]


def measured(role: str) -> dict[str, Any]:
    links = {"": [LINK_S, 1e18]}
    return curves(role) | ({"prepare": {"image": PREPARE}} if role == "encode" else {}) | {"links": links}


def cluster_line() -> dict[str, Any]:
    limits = {"encode": (0, 8, 1 << 26), "prefill": (512, 0, 0), "decode": (512, 64, 0)}
    workers = [
        {"replica_id": f"{role}-0", "role": role, "num_blocks": limits[role][0], "max_batch": limits[role][1],
         "cache_bytes": limits[role][2], "curves": curves(role)}
        for role in ("encode", "prefill", "decode")
    ]  # fmt: skip
    return {
        "type": "cluster", "block_size": 16, "num_layers": 2, "kv_bytes_per_token": 64, "feature_bytes_per_row": 1 << 16,
        "step_target_s": 0.5, "scheduling": {"aging_s": 5.0, "tokens_per_s": 2000.0, "text_share": 0.3}, "workers": workers,
    }  # fmt: skip


def block_line(number: int, repetition: int, slowdowns: dict[str, float]) -> dict[str, Any]:
    return {
        "type": "block", "block": number, "phase": "calm", "policy": "joint", "repetition": repetition, "slowdowns": slowdowns,
        "measured": {f"{role}-0": measured(role) for role in ("encode", "prefill", "decode")},
    }  # fmt: skip


def request_line(block: int, number: int, at_s: float, with_image: bool, placed_s: float) -> dict[str, Any]:
    """Timelines say that prefill needs 4 ms more than its curve, an encoder call 2 ms, an item's ways 1 ms, a
    message 0.5 ms."""
    tokens = IMAGE_TOKENS if with_image else TEXT_TOKENS
    item = {"hash": f"image {block}.{number}", "modality": "image", "rows": ROWS, "start": ITEM_START,
            "end": ITEM_START + ITEM_TOKENS}  # fmt: skip
    account = {"item": 0, "cached": False, "prepare": 2.5, "queue": 0.5, "encode": 1e3 * seconds(ENCODE, ROWS) + 1.5,
               "target": 0.5, "transfer": 1e3 * LINK_S}  # fmt: skip
    actual = {
        "prefill_blocks": 0.5,
        "prefill_queue": 1.5,
        "prefill": 1e3 * seconds(PREFILL, tokens) + 2,
        "delivery": 1.0,
    }
    placement = {"encoders": ["encode-0"] if with_image else [], "prefill": "prefill-0", "decode": "decode-0"}
    return {
        "type": "request", "block": block, "request": number, "at_s": at_s, "kind": "any", "prompt_tokens": tokens,
        "output_tokens": 2, "block_hashes": [f"{block:08x}{number:04x}{i:04x}" for i in range(tokens // 16)],
        "items": [item] if with_image else [], "ttft_s": placed_s + 0.01, "placed_s": placed_s, "predicted_s": None,
        "ledger": {"actual_ms": actual, "placement": placement, "items_ms": [account] if with_image else []},
    }  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Two repetitions of a text and a prompt with an image, far apart; prefill is three times as slow in the
    second."""
    lines = [cluster_line()]
    for number, slowdowns in enumerate(({}, {"prefill-0": 3.0})):
        lines.append(block_line(number, number, slowdowns))
        lines += [request_line(number, 0, 0.5, False, 0.05), request_line(number, 1, 5.0, True, 0.10)]
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def recording(path: Path) -> Recording:
    return read(path)


def test_a_recording_has_the_requests_of_each_block_at_their_instants(recording: Recording) -> None:
    first, second = recording.blocks
    assert [each.request.arrived_at for each in second.requests] == [0.5, 5.0]
    assert [each.request.num_prompt_tokens for each in second.requests] == [TEXT_TOKENS, IMAGE_TOKENS]
    assert first.requests[0].placed_at == pytest.approx(0.51)
    item = first.requests[1].request.media[0]
    assert (item.num_rows, item.start, item.end) == (ROWS, ITEM_START, ITEM_START + ITEM_TOKENS)
    assert recording.model.block_size == 16
    assert {worker.replica_id for worker in recording.workers} == {"encode-0", "prefill-0", "decode-0"}


def test_what_is_no_recording_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"type": "block"}\n')
    with pytest.raises(ValueError, match="cluster"):
        read(file)
    assert main(["replay", str(file)]) == 1
    assert "cluster" in capsys.readouterr().err


@pytest.mark.parametrize(("repetition", "slowdown"), [(0, 1.0), (1, 3.0)])
def test_without_overheads_a_request_alone_takes_what_the_curves_say(
    recording: Recording, repetition: int, slowdown: float
) -> None:
    text, image = (e for e in replay(recording, Overheads()) if e.block.repetition == repetition)
    assert text.ttft_s == pytest.approx(slowdown * seconds(PREFILL, TEXT_TOKENS))
    encoded_s = PREPARE[0] + seconds(ENCODE, ROWS) + LINK_S
    prompt_s = slowdown * seconds(PREFILL, IMAGE_TOKENS)  # so little text before the image waits for it
    assert image.ttft_s == pytest.approx(encoded_s + prompt_s, rel=1e-6)


def test_overheads_are_counted_once_for_each_message_call_and_item(recording: Recording) -> None:
    plain, more = replay(recording, Overheads()), replay(recording, Overheads(1e-3, 2e-3, 4e-3, 8e-3, 16e-3))
    differences = [slow.ttft_s - fast.ttft_s for fast, slow in zip(plain, more, strict=True)]
    text, image = 2e-3 + 8e-3, 2e-3 + 2e-3 + 4e-3 + 8e-3
    assert differences == pytest.approx([text, image] * 2)


def test_overheads_are_measured_against_the_curves_of_the_blocks_that_are_given(recording: Recording) -> None:
    overheads = measure(recording, recording.blocks[:1])
    assert overheads.message_s == pytest.approx(5e-4)
    assert overheads.prefill_s == pytest.approx(4e-3)
    assert (overheads.encode_s, overheads.item_s) == pytest.approx((2e-3, 1e-3))
    assert overheads.decode_s == 0.0  # as measured, it is as emulated
    slow = measure(recording, recording.blocks[1:])
    assert slow.prefill_s == pytest.approx(4e-3 - 2 * seconds(PREFILL, TEXT_TOKENS))
    with pytest.raises(ValueError, match="no request"):
        measure(recording, [])


def test_prefill_is_measured_on_requests_that_had_a_worker_for_themselves(recording: Recording) -> None:
    block = recording.blocks[0]
    text = block.requests[0]
    waited = replace(text, stages=dict(text.stages) | {"prefill_queue": 0.5}, ttft_s=0.6)
    beside = replace(text, placed_at=text.placed_at + 0.1)
    crowded = replace(block, requests=[text, waited, replace(waited, placed_at=0.6), beside])
    assert measure(recording, [crowded]).prefill_s == 0.0
    assert measure(recording, [replace(block, requests=[text])]).prefill_s == pytest.approx(4e-3)


def test_slowdowns_concern_calls_of_the_model_alone() -> None:
    emulated = ServiceCurves(encode={Modality.IMAGE: Curve(1.0, 0.1)}, prefill=Curve(2.0, 0.2, 0.02))
    told = ServiceCurves(prepare={Modality.IMAGE: Curve(0.5, 0.0)}, max_step_units=7)
    found = replayed_curves(emulated, told, 3.0, Overheads(encode_s=0.25, prefill_s=0.5))
    encode, prefill = found.encode[Modality.IMAGE], found.prefill
    assert (encode.fixed_s, encode.per_unit_s) == (3.25, pytest.approx(0.3))
    assert prefill is not None
    assert (prefill.fixed_s, prefill.per_unit_s) == (6.5, pytest.approx(0.6))
    assert prefill.per_pair_s == 0.06
    assert found.prepare == told.prepare and found.max_step_units == 7
    assert found.links[""].seconds(1e9) == 0.0


def test_the_table_says_which_percentiles_are_far_off(recording: Recording) -> None:
    block = recording.blocks[1]
    replayed = [
        Replayed(block, each, 1.1 * each.ttft_s, predicted_s=0.88 * each.ttft_s) for each in block.requests
    ]
    header, _, row, everything = table(replayed)
    assert header.count("ratio") == 2
    assert (
        row.startswith("| calm | joint | 2 |") and row.count("| 1.10 |") == 2 and row.endswith("|  | 20.0% |")
    )
    assert everything.startswith("| all | joint | 2 |")
    far = [
        Replayed(block, each, each.ttft_s * factor)
        for each, factor in zip(block.requests, (0.5, 1.0), strict=True)
    ]
    assert table(far)[2].endswith("| p50 |  |")


def test_the_command_compares_what_nothing_was_measured_on(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = path.with_name("records.jsonl")
    assert main(["replay", str(path), "--out", str(records)]) == 0
    printed = capsys.readouterr().out
    assert "| calm | joint | 2 |" in printed and "prefill 4.00" in printed
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["request"] for line in lines] == ["1.0", "1.1"] * NUM_RUNS
    assert [line["seed"] for line in lines] == [seed for seed in range(NUM_RUNS) for _ in range(2)]
    assert {line["live_s"] for line in lines} == {0.05, 0.10}
    assert all(line["predicted_s"] > 0 for line in lines)
    expected_s = 3 * seconds(PREFILL, TEXT_TOKENS) + 4e-3 + 1e-3
    texts = [line["simulated_s"] for line in lines[::2]]
    assert len(set(texts)) == NUM_RUNS and texts == pytest.approx([expected_s] * NUM_RUNS, rel=0.15)


def test_recorded_placements_are_followed_from_the_instants_at_which_they_were_made(
    recording: Recording,
) -> None:
    block = recording.blocks[0]
    text = block.requests[0]
    local = replace(text, prefill="decode-0")
    decode = replace(
        recording.workers[2], curves=ServiceCurves(prefill=Curve(0.02, 1e-4), decode=Curve(0.03, 0.0))
    )
    told = {**block.measured, "decode-0": msgspec.structs.replace(decode.curves, max_step_units=1024)}
    for each, prefill_s in ((text, seconds(PREFILL, TEXT_TOKENS)), (local, 0.02 + 1e-4 * TEXT_TOKENS)):
        changed = replace(
            recording,
            workers=[*recording.workers[:2], decode],
            blocks=[replace(block, requests=[each], measured=told)],
        )
        (replayed,) = replay(changed, Overheads(), has_recorded_placements=True)
        assert replayed.ttft_s == pytest.approx(prefill_s)
        assert as_placed(changed).blocks[0].requests[0].request.arrived_at == each.placed_at


def test_doors_begin_a_block_with_what_was_measured_before_unless_speeds_have_changed(
    recording: Recording,
) -> None:
    first, slow = recording.blocks
    again = replace(slow, policy="round_robin")
    assert known_from(first, None) is first
    assert known_from(slow, first) is slow
    assert known_from(again, slow) is slow


def test_what_workers_do_not_tell_is_what_the_services_have() -> None:
    from encoder_service import service

    assert service.NUM_PREPARE_THREADS == NUM_PREPARE_THREADS
