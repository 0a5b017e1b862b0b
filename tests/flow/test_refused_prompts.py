"""A request of several prompts that comes to nothing leaves nothing at the door: neither a prompt that was
refused, nor those before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.errors import ContextLengthError, RequestError
from router.api.chat.schema import CompletionRequest
from router.api.chat.translate import completion_call
from router.api.protocol import CallContext
from router.calls import CompletionCall, ServedModels
from router.door import Door
from router.prompts.builder import PromptBuilder
from tests.flow.test_law import cluster_args

HANG_S = 60.0
CONTEXT = 64
SHORT, LONG = [5] * 10, [5] * CONTEXT


@pytest.fixture
async def door() -> AsyncIterator[Door]:
    """Without workers: a prompt waits for its first reader."""

    async def call_decode(replica_id: str, request_id: str) -> None:
        raise AssertionError("there is no worker")

    door = Door(cluster_args(64).model_copy(update={"max_model_len": CONTEXT}), call_decode)
    yield door
    assert door.is_idle, "a prompt is still there"
    await door.aclose()


def call_of(door: Door, prompt: Any, **fields: Any) -> CompletionCall:
    request = CompletionRequest.model_validate({"model": "demo", "prompt": prompt, **fields})
    return completion_call(request, CallContext(ServedModels("demo"), door.defaults))


@pytest.mark.parametrize(
    "prompts, fields",
    [
        ([SHORT, SHORT, LONG], {}),
        ([SHORT, LONG, SHORT], {"n": 4, "temperature": 1.0}),
        # fits, but not with its answer
        ([SHORT, [5] * 50], {"max_tokens": 30}),
        ([SHORT, LONG], {"echo": True, "logprobs": 2}),
    ],
)
async def test_a_prompt_that_is_refused_takes_the_others_with_it(door, prompts, fields):
    with pytest.raises(ContextLengthError):
        await door.complete(call_of(door, prompts, **fields))


async def test_prompts_of_which_too_much_would_be_told_are_refused(door):
    """Each log-probability is an entry of the answer, and costs more there than in the request."""
    fields = {"n": 8, "temperature": 1.0, "max_tokens": 1, "echo": True, "logprobs": 20}
    prompts = [[5] * 60] * 64
    choices = await door.complete(call_of(door, prompts, **fields))
    for choice in choices:
        await choice.aclose()
    with pytest.raises(RequestError, match="more than 1048576 log-probabilities") as error:
        await door.complete(call_of(door, prompts, prompt_logprobs=20, **fields))
    assert error.value.param == "prompt"


class Gate:
    """Prompt builders wait before one prompt."""

    def __init__(self, held_idx: int, monkeypatch: pytest.MonkeyPatch):
        self._completion, self._held_idx, self._num_begun = PromptBuilder.completion, held_idx, 0
        monkeypatch.setattr(PromptBuilder, "completion", lambda *args: self._waited(*args))
        self.reached, self.may_go_on = threading.Event(), threading.Event()

    def _waited(self, *args: Any) -> Any:
        if self._num_begun == self._held_idx:
            self.reached.set()
            assert self.may_go_on.wait(HANG_S)
        self._num_begun += 1
        return self._completion(*args)


@pytest.mark.parametrize("held_idx", [0, 1, 2])
async def test_a_client_that_leaves_takes_all_its_prompts_with_it(door, held_idx, monkeypatch):
    gate = Gate(held_idx, monkeypatch)
    task = asyncio.ensure_future(door.complete(call_of(door, [SHORT] * 3)))
    assert await asyncio.to_thread(gate.reached.wait, HANG_S)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.may_go_on.set()


async def test_prompts_that_are_accepted_are_closed_by_their_reader(door):
    choices = await door.complete(call_of(door, [SHORT] * 3, n=2, temperature=1.0))
    assert len(choices) == 6 and not door.is_idle
    for choice in choices:
        await choice.aclose()
