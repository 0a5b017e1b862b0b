"""Blocks behind a sliding window go back to the pool while their request runs; nothing else changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine.features import FeatureStore
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguagePhase
from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_torch import TorchAttention
from cluster.model.language import LanguageModel, SequenceChunk
from cluster.model.language_parts import make_backend, probed_parts
from cluster.types.messages import Cancel
from cluster.types.request import Prompt, num_window_blocks
from tests.fakes.engines import BLOCK_SIZE, Rig
from tests.fakes.language_runner import ScriptedRunner
from tests.fakes.relay import Relay
from tests.fakes.requests import kv_value, make_request
from tests.flow.tiny_models import TEXT_FAMILIES

BACKENDS = {"torch": TorchAttention, "best": lambda: make_backend(torch.device("cpu"), torch.float32)}


class WindowRig(Rig):
    """Its decode worker looks `window` tokens back and drafts up to `max_draft` tokens, right ones and wrong
    ones. It writes and checks through the table alone, so a block that another request uses by now is
    found."""

    def __init__(self, window: int, *, max_draft: int = 0, seed: int = 0, **sizes: Any):
        super().__init__(window=window, **sizes)
        self.window, self.max_draft = window, max_draft
        self._draw = random.Random(seed)

    @property
    def most_blocks(self) -> int:
        """Of one running sequence, behind a step."""
        return num_window_blocks(self.window + self.max_draft, BLOCK_SIZE)

    def sequences(self) -> list[TokenSequence]:
        requests = self.decode.engine.requests.values()
        running = [request for request in requests if request.phase is LanguagePhase.RUNNING]
        return [each for request in running for choice in request.live_choices for each in choice.sequences]

    def turn(self, rounds: int = 1) -> None:
        for _ in range(rounds):
            super().turn()
            for sequence in self.sequences():
                assert len(sequence.blocks) <= self.most_blocks
                assert sequence.block_table[: sequence.num_dropped] == [0] * sequence.num_dropped

    def _decode_runner(self, features: FeatureStore) -> ScriptedRunner:
        runner: Any = super()._decode_runner(features)
        runner.answer = self._answer
        runner.propose = self._propose
        return runner

    def _propose(self, batch: Sequence[Any]) -> None:
        for choice in (
            choice for request in batch if not request.request.guidance for choice in request.live_choices
        ):
            room = min(self.max_draft, choice.stop.max_tokens - choice.num_generated - 1)
            length = self._draw.randint(0, max(0, room))
            wrong_at = self._draw.randint(0, length)  # length: nowhere
            choice.propose([choice.token_ids[-1] + 1 + i + (i == wrong_at) for i in range(length)])

    def _answer(self, request: Any) -> list[list[int]]:
        return [self._advance(choice) for choice in request.live_choices]

    def _advance(self, choice: Any) -> list[int]:
        """Writes the KV of the last token and of the drafts, each seeing what its window holds; says the next
        numbers."""
        tokens = [choice.token_ids[-1], *choice.drafts]
        for sequence in choice.sequences:
            prompt = sequence.prompt
            known = [kv_value(prompt, position) for position in range(sequence.num_prompt_tokens)]
            known += choice.token_ids[choice.num_prompt_tokens : -1]
            for position, token in enumerate(tokens, sequence.num_computed_tokens):
                known.append(token)
                self._row(sequence, position).fill_(known[-1])
                for seen in range(max(0, position + 1 - self.window), position + 1):
                    assert int(self._row(sequence, seen)) == known[seen], "foreign KV"
        num_right = 0
        while num_right < len(choice.drafts) and choice.drafts[num_right] == tokens[0] + 1 + num_right:
            num_right += 1
        choice.drop_drafts()
        return [tokens[0] + 1 + i for i in range(num_right + 1)]

    def _row(self, sequence: TokenSequence, position: int) -> Any:
        block_id = sequence.block_table[position // BLOCK_SIZE]
        assert position // BLOCK_SIZE >= sequence.num_dropped, "read in the hole"
        return self._decode_kv.segments[0][block_id, position % BLOCK_SIZE]


def test_a_long_answer_holds_no_more_than_its_window() -> None:
    rig = WindowRig(10, decode_blocks=24)
    relay = Relay(rig)
    story = relay.start(make_request("r", 20, max_tokens=60))
    used = []
    while not story.tokens or story.finish_reason is None:
        relay.play(1)
        if rig.decode.engine.load().num_running:
            used.append(rig.pools["decode"].num_referenced)
    assert story.tokens == list(range(50, 110))
    assert len(used) > 50 and set(used) == {3}  # behind a step the window has nine tokens, of 20 + 60
    relay.finish()


def test_a_prompt_is_given_back_behind_the_window_as_soon_as_it_is_there() -> None:
    rig = WindowRig(5, decode_blocks=24)
    relay = Relay(rig)
    relay.start(make_request("r", 39, max_tokens=9))  # 10 blocks
    while not rig.decode.engine.load().num_running:
        before = rig.pools["decode"].num_referenced
        relay.play(1)
    assert (before, rig.pools["decode"].num_referenced) == (10, 2)
    relay.finish()


def test_a_prompt_that_choices_share_is_free_when_the_last_of_them_has_left_it() -> None:
    rig = WindowRig(6, decode_blocks=24)
    relay = Relay(rig)
    story = relay.start(make_request("r", 11, max_tokens=12, num_choices=3))  # 3 full blocks
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    tables = [each.block_table for each in rig.sequences()]
    assert [table[:2] for table in tables] == [[0, tables[0][1]]] * 3  # shared
    relay.play()
    assert [line.token_ids for line in story.lines] == [list(range(50, 62))] * 3
    relay.finish()


def test_a_request_whose_window_fits_is_taken_though_its_whole_answer_would_not_fit() -> None:
    for window, is_taken in ((8, True), (30, False)):
        rig = WindowRig(window, decode_blocks=8)
        relay = Relay(rig)
        story = relay.start(make_request("r", 7, max_tokens=50))
        relay.play(100)
        assert (story.tokens == list(range(50, 100))) is is_taken
        assert (story.error is None) is is_taken
        relay.finish()


def test_what_is_held_behind_a_window_is_at_most_what_the_whole_answer_needs() -> None:
    request = make_request("r", 9, max_tokens=30, num_choices=2)  # 10 tokens: 2 full blocks
    assert request.max_blocks(4) == 2 + 2 * 8
    assert [request.max_blocks(4, window) for window in (1, 2, 5, 9, 1000)] == [4, 6, 6, 8, 18]


@pytest.mark.parametrize("num_rounds", range(14))
def test_a_request_that_leaves_with_a_hole_in_its_table_gives_back_the_rest_once(num_rounds: int) -> None:
    rig = WindowRig(5, decode_blocks=24)
    relay = Relay(rig)
    relay.start(make_request("r", 12, max_tokens=30, num_choices=2))
    relay.play(num_rounds)
    rig.receive("decode", Cancel("r", 1))
    relay.play(2)
    relay.land("r")
    relay.finish()
    assert rig.pools["decode"].num_referenced == 0


def test_the_copy_meant_for_a_choice_that_ended_early_is_free_at_once() -> None:
    rig = WindowRig(5, decode_blocks=24)
    relay = Relay(rig)
    relay.start(make_request("r", 2, max_tokens=9, num_choices=2))
    relay.play(2)
    assert rig.decode.engine.load().num_open_leases == 1  # granted, not yet begun
    rig.receive("decode", Cancel("r", 0))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 1
    relay.finish()


request_sizes = st.tuples(
    st.integers(1, 24),  # prompt tokens, but for one
    st.integers(1, 30),  # generated
    st.integers(1, 3),  # choices
    st.sampled_from([0, 0, 3, 13]),  # of a negative prompt
    st.booleans(),  # decode computes the prompt, if there is no negative prompt
)


@settings(max_examples=30)
@given(
    window=st.integers(1, 24),
    max_draft=st.integers(0, 5),
    sizes=st.lists(request_sizes, min_size=1, max_size=5),
    decode_blocks=st.integers(12, 40),
    cancelled=st.integers(0, 30),
    seed=st.integers(0, 9),
)
def test_the_pool_is_used_within_bounds_and_gets_everything_back(
    window: int,
    max_draft: int,
    sizes: list[tuple[int, int, int, int, bool]],
    decode_blocks: int,
    cancelled: int,
    seed: int,
) -> None:
    """With preemption, several choices, negative prompts, drafts and a cancellation: answers are right, no KV
    is foreign."""
    rig = WindowRig(window, max_draft=max_draft, seed=seed, decode_blocks=decode_blocks, kv_blocks=64)
    relay = Relay(rig)
    requests = []
    for idx, (num_tokens, max_tokens, num_choices, negative, prefills_locally) in enumerate(sizes):
        request = make_request(
            f"r{idx}", num_tokens, max_tokens=max_tokens, num_choices=num_choices, negative=negative
        )
        if (
            request.max_blocks(BLOCK_SIZE) <= decode_blocks
        ):  # as the door asks: a preempted one comes back whole
            requests.append(request)
            relay.start(request, prefills_locally=prefills_locally and not negative)
            rig.clock.at += 0.01
    for round_number in range(400):
        if round_number == cancelled and requests:
            rig.receive("decode", Cancel(requests[0].request_id, 0))
        relay.play(1)
        load = rig.decode.engine.load()
        if load.num_running and not load.num_waiting and not load.num_prompts:
            assert load.num_used_blocks <= rig.most_blocks * len(rig.sequences())
        if all(story.is_over for story in relay.stories.values()):
            break
    for request in requests[1:]:
        story = relay.stories[request.request_id]
        assert story.error is None
        wanted = list(range(50, 50 + request.stop.max_tokens))
        assert [line.token_ids for line in story.lines] == [wanted] * len(request.sampling)
    relay.finish()
    assert rig.pools["decode"].num_referenced == 0


@pytest.mark.parametrize(
    ("family", "window"),
    [("mistral_window", 16), ("phi3_window", 16), ("llama", None), ("gemma3_window", None)],
)
def test_a_model_has_a_window_if_all_its_layers_have(family: str, window: int | None) -> None:
    assert LanguageModel.from_model(TEXT_FAMILIES[family]().model).sliding_window == window


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS.keys())
@pytest.mark.parametrize("context_len", [16, 19, 37, 48])
def test_what_stands_in_the_holes_place_changes_no_logit(backend: Any, context_len: int) -> None:
    """Block 0 holds numbers that would be seen from afar; decode and verification are compared with whole
    tables."""
    parts = probed_parts(TEXT_FAMILIES["mistral_window"]().model.eval(), BLOCK_SIZE, "auto")
    model = LanguageModel(replace(parts, attention=backend()))
    kv = BlockMemory(model.kv_layout, 40)
    for segment in kv.segments:
        segment[0].fill_(1e4)
    contexts = [context_len, 21]
    tables = [list(range(1, 16)), list(range(16, 31))]
    for context, table in zip(contexts, tables, strict=True):
        chunk = SequenceChunk([5 + i for i in range(context)], torch.arange(context), 0, table)
        model.forward([chunk], kv)
    sequences = [
        TokenSequence("s", Prompt((0,) * context), block_table=list(table))
        for context, table in zip(contexts, tables, strict=True)
    ]
    for sequence, context in zip(sequences, contexts, strict=True):
        sequence.drop_behind_window(max(0, context + 1 - 16) // BLOCK_SIZE)
    with_holes = [sequence.block_table for sequence in sequences]
    assert with_holes[1][0] == 0
    for several in (tables, with_holes):
        chunks = [
            SequenceChunk([7, 8, 9], torch.arange(context, context + 3), context, table, num_logits=3)
            for context, table in zip(contexts, several, strict=True)
        ]
        logits = model.decode([7, 7], contexts, [0, 0], several, kv), model.forward(chunks, kv)
        if several is tables:
            wanted = logits
    assert all(torch.equal(got, due) for got, due in zip(logits, wanted, strict=True))
