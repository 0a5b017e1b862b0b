"""One engine that computes prompts for others and generates answers, stepped by hand."""

from __future__ import annotations

import pytest

from cluster.config.settings import ClusterArgs
from cluster.engine.limits import limits_of, sizes_of
from cluster.types.members import Role
from cluster.types.messages import DecodeGranted, PrefillAdmitted, StartDecode, StartPrefill
from tests.fakes.engines import DOOR, POLICY, TIMEOUT_S, Rig
from tests.fakes.language_runner import answers_in, prompts_in
from tests.fakes.relay import Relay
from tests.fakes.requests import make_request, salted


def tell(rig: Rig, message: StartPrefill | StartDecode) -> None:
    rig.decode.tell(rig.decode.engine.start, DOOR, message, rig.clock.at)
    rig.clock.at += 0.01


def admitted(rig: Rig, kind: type[PrefillAdmitted | DecodeGranted]) -> list[str]:
    return [message.request_id for message in rig.decode.said if isinstance(message, kind)]


def test_prompts_for_other_workers_hold_half_of_the_blocks_and_arrivals_do_not_wait_for_them(
    rig: Rig,
) -> None:
    """Otherwise two workers that send each other prompts could wait for each other."""
    for name in ("first", "second"):  # 4 of 10 blocks each
        tell(rig, StartPrefill(salted(make_request(name, 12)), TIMEOUT_S))
    tell(rig, StartDecode(salted(make_request("arrives", 12)), TIMEOUT_S))
    rig.decode.step()
    assert admitted(rig, PrefillAdmitted) == ["first"] and admitted(rig, DecodeGranted) == ["arrives"]
    rig.decode.tell(rig.decode.engine.cancel, "first")
    rig.decode.step()
    assert admitted(rig, PrefillAdmitted) == ["first", "second"]


def test_a_large_prompt_for_another_worker_gets_more_than_half_if_it_is_alone(rig: Rig) -> None:
    tell(rig, StartPrefill(make_request("large", 35), TIMEOUT_S))
    rig.decode.step()
    assert admitted(rig, PrefillAdmitted) == ["large"]


def test_without_blocks_no_arrival_overtakes_a_prompt_that_waits_for_them(rig: Rig) -> None:
    tell(rig, StartDecode(salted(make_request("holds", 20)), TIMEOUT_S))
    tell(rig, StartDecode(salted(make_request("local", 24)), TIMEOUT_S, prefills=True))
    tell(rig, StartDecode(salted(make_request("small", 3)), TIMEOUT_S))
    rig.decode.step()
    assert admitted(rig, DecodeGranted) == ["holds"]


def test_a_step_holds_answers_and_prompts_and_the_answers_wait_no_longer_for_them(
    rig: Rig, relay: Relay
) -> None:
    runner, steps, limits = rig.runners["decode"], [], []
    run, next_step = runner.run, rig.decode.engine.planner.next_step

    def recorded(works, *rest):
        steps.append((len(answers_in(works)), len(prompts_in(works))))
        return run(works, *rest)

    runner.run = recorded
    rig.decode.engine.planner.next_step = lambda limit_s, room: (
        limits.append(limit_s) or next_step(limit_s, room)
    )
    old = relay.start(make_request("old", 3, max_tokens=12), prefills_locally=True)
    relay.play(2)
    new = relay.start(salted(make_request("new", 14, max_tokens=3)), prefills_locally=True)
    relay.play()
    assert (1, 1) in steps and old.tokens == list(range(50, 62)) and new.tokens == [50, 51, 52]
    assert POLICY.prompt_pause_s in limits


@pytest.mark.parametrize(
    ("role", "prompts", "sequences", "num_blocks"),
    [(Role.PREFILL, 2048, 0, 2048), (Role.DECODE, 1024, 256, 4096), (Role.LANGUAGE, 2048, 256, 6144)],
)
def test_a_role_is_how_much_a_worker_does_of_each_phase(
    role: Role, prompts: int, sequences: int, num_blocks: int
) -> None:
    args = ClusterArgs()
    limits = limits_of(role, args)
    assert (limits.max_prompt_tokens, limits.max_sequences) == (prompts, sequences)
    sizes = sizes_of(role, args, limits, "cpu")
    assert sizes.num_kv_blocks == num_blocks and sizes.feature_bytes == args.prefill.feature_bytes


@pytest.mark.parametrize(
    ("given", "role", "num_blocks"),
    [
        ({}, Role.DECODE, None),
        ({"decode": {"kv_blocks": 64}}, Role.DECODE, 64),
        ({"decode": {"kv_blocks": 64}}, Role.LANGUAGE, None),
        ({"decode": {"kv_blocks": 64}, "prefill": {"kv_blocks": 8}}, Role.LANGUAGE, 72),
    ],
)
def test_on_a_gpu_kv_is_as_large_as_its_memory_allows_unless_blocks_are_given(given, role, num_blocks):
    args = ClusterArgs.model_validate({"language": {"memory_share": 0.5}, **given})
    sizes = sizes_of(role, args, limits_of(role, args), "cuda")
    assert sizes.num_kv_blocks == num_blocks
    assert sizes.memory_share == (0.5 if role is Role.LANGUAGE else 0.9)
