"""Steps of a runner on a simulated GPU whose next forward is enqueued before the tokens are read: from the
tokens on the device, recorded or not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch
from pytest import approx

from cluster.engine.ahead import may_run_ahead
from cluster.engine.runner import LanguageRunner
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguageRequest, PromptWork
from cluster.engine.timing import Stopwatch
from cluster.model.cuda.draw import to_device
from cluster.types.logprobs import TokenLogprobs
from cluster.types.request import (
    NUM_PLACES,
    GenerateRequest,
    LogitChanges,
    Prompt,
    SamplingParams,
    StopParams,
)
from tests.fakes.cuda_device import SimulatedCuda
from tests.flow.hybrid_models import CONFIGS
from tests.unit.cuda.recorded_and_plain import NUM_BLOCKS, PROMPTS, SIZES, TABLES, Compared
from tests.unit.cuda.test_recorded_states import language as hybrid
from tests.unit.cuda.test_recorded_steps import FEATURES, text_model

NUM_STEPS = 6
SAMPLING = [
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=1.1, seed=4),
]


def test_numbers_are_sent_without_waiting(device: SimulatedCuda) -> None:
    before = device.num_syncs
    sent = to_device([(1, -2), (3, 1 << 40)], torch.device("cuda"))
    assert device.num_syncs == before and sent.cpu().tolist() == [[1, -2], [3, 1 << 40]]


def test_workers_run_ahead_on_a_gpu_only() -> None:
    """In flows: tests/flow/test_ahead.py."""
    assert may_run_ahead(torch.device("cuda", 0)) and not may_run_ahead(torch.device("cpu"))


def answering(
    runner: LanguageRunner, row: int, sampling: SamplingParams | None = None, state_blocks: int = 0
) -> LanguageRequest:
    """A request whose prompt is computed and whose first token is known. `sampling`: with changes of logits,
    and with log-probabilities."""
    asked = GenerateRequest(f"r{row}", Prompt(tuple(PROMPTS[row])), (SAMPLING[row],), StopParams(99))
    if sampling is not None:
        changes = LogitChanges(((4, 1.5),), presence_penalty=0.5)
        asked = msgspec.structs.replace(asked, sampling=(sampling,), changes=changes, num_logprobs=row)
    request = LanguageRequest(asked, 1, 1.0, 0.0, Stopwatch(0.0), computes=True, sends=False)
    sequence = TokenSequence(f"r{row}/0", asked.prompt, block_table=TABLES[row])
    first = NUM_BLOCKS + row * NUM_PLACES * state_blocks
    sequence.hold_states(range(first, first + NUM_PLACES * state_blocks))
    request.add_prompt(sequence)
    runner.run([PromptWork(request, sequence, len(PROMPTS[row]))], lambda layer, ready: None)
    sequence.computed(len(PROMPTS[row]))
    (choice,) = request.choices
    request.hand_over(choice)
    choice.append(20 + row)
    return request


def step(runner: LanguageRunner, requests: Sequence[LanguageRequest], goes_on: Sequence[int]) -> list[object]:
    """Returns the token of each request, and its log-probabilities."""
    then = [requests[row].choices[0] for row in goes_on]
    results = runner.run(requests, lambda layer, ready: None, then)
    tokens = [result.tokens[0][0] for result in results]
    for request, token_id in zip(requests, tokens, strict=True):
        request.choices[0].append(token_id)
        request.choices[0].sequences[0].computed(1)
    return [(result.tokens, result.logprobs) for result in results]


@pytest.mark.parametrize("name", [None, "qwen3_5_text"])
@pytest.mark.parametrize("is_recorded", [False, True])
def test_tokens_are_those_of_steps_that_wait(
    is_recorded: bool, name: str | None, device: SimulatedCuda
) -> None:
    """One forward ahead leaves a row out, one is dropped, and one has more rows than are drawn from."""
    model = text_model(device) if name is None else hybrid(device, CONFIGS[name])
    compared = Compared(model, SIZES, NUM_BLOCKS + 3 * NUM_PLACES * model.state_blocks)
    steps = compared.graphed if is_recorded else compared.model
    found = []
    for is_ahead in (False, True):
        runner = LanguageRunner(compared.model, steps, compared.kvs[0], FEATURES)
        requests = [answering(runner, row, SAMPLING[row], model.state_blocks) for row in range(3)]
        tokens = []
        for number in range(NUM_STEPS):
            goes_on = [0, 2] if number == 2 else [0, 1, 2]
            batch = requests[::2] if number == 4 else requests
            tokens.append(step(runner, batch, [0, 1] if len(batch) == 2 else goes_on if is_ahead else ()))
        found.append(tokens)
    assert is_same(found[0], found[1]), found


def is_same(one: object, other: object) -> bool:
    """Numbers may differ in their last bits: a CPU's library multiplies two rows otherwise than three."""
    if isinstance(one, TokenLogprobs) and isinstance(other, TokenLogprobs):
        return one.top_ids == other.top_ids and [one.drawn, *one.top] == approx(
            [other.drawn, *other.top], abs=1e-5
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return one == other


@pytest.mark.parametrize("sampling", [None, SamplingParams()])
def test_the_host_waits_for_the_tokens_and_not_for_the_forward_behind_them(
    sampling: SamplingParams | None, device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Compared(text_model(device))
    runner = LanguageRunner(compared.model, compared.graphed, compared.kvs[0], FEATURES)
    requests = [answering(runner, row, sampling) for row in range(3)]
    step(runner, requests, [0, 1, 2])
    happened: list[str] = []
    decode, sync = compared.graphed.decode, device.sync

    def noted(*args):
        logits = decode(*args)
        happened.append("forward")
        return logits

    monkeypatch.setattr(compared.graphed, "decode", noted)
    monkeypatch.setattr(device, "sync", lambda why: happened.append(why) or sync(why))
    step(runner, requests, [0, 1, 2])
    one = "the host waits for an event"
    at = happened.index("forward")
    if sampling is None:  # drawn by torch here, which copies temperatures and noise
        assert happened[at:] == ["forward", one]
    else:  # for the previous step's inputs, which have long been copied; for tokens, and log-probabilities
        assert happened == [one, "forward", one, one]


def test_states_add_no_wait_and_no_copy(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their places are a part of the one copy of a recorded step's inputs."""
    told: list[list[str]] = []
    for model in (text_model(device), hybrid(device, CONFIGS["qwen3_5_text"])):
        compared = Compared(model, SIZES, NUM_BLOCKS + 3 * NUM_PLACES * model.state_blocks)
        runner = LanguageRunner(model, compared.graphed, compared.kvs[0], FEATURES)
        requests = [answering(runner, row, None, model.state_blocks) for row in range(3)]
        step(runner, requests, [0, 1, 2])
        happened: list[str] = []
        decode, sync, crosses = compared.graphed.decode, device.sync, device.crosses
        with monkeypatch.context() as patched:
            for owner, name, function in (
                (compared.graphed, "decode", decode), (device, "sync", sync), (device, "crosses", crosses)
            ):  # fmt: skip
                patched.setattr(
                    owner, name, lambda *args, f=function, n=name, to=happened: to.append(n) or f(*args)
                )
            step(runner, requests, [0, 1, 2])
        told.append(happened)
    assert told[0] == told[1] and told[0].count("decode") == 1
    behind = told[0][told[0].index("decode") :]
    assert behind.count("crosses") == 1, behind
