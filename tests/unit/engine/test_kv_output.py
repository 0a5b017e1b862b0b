"""Which blocks go to decode, when, and in which pieces."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.kv_output import (
    MIN_SENT_BYTES,
    MIN_WRITE_BYTES,
    KvOutput,
    StepPush,
    num_blocks_to_send,
    plan_end,
    send_computed,
)
from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguagePhase, LanguageRequest, PromptWork
from cluster.engine.timing import Stopwatch
from cluster.kvcache.memory import MemoryLayout, SegmentSpec
from cluster.types.transfer import KvReady
from kv_transfer.agents.agent import LeaseExpiredError, TransferError
from kv_transfer.lease.prompt_places import PromptPlaces
from tests.fakes.requests import make_request

BLOCK_SIZE, SEGMENTS_PER_LAYER = 4, 2


class Recorder:
    """An `Outgoing` that remembers what was written: {(grant index, segment): local block}."""

    def __init__(self, error=None, blocks_together=1, block_s=None, lease_id=""):
        self.lease_id = lease_id
        self.written, self.num_writes, self.payload, self._error = {}, 0, None, error
        self.blocks_together, self.block_s = blocks_together, block_s

    def write(self, local_block_ids, grant_indices, segment_ids=None, ready=None):
        if self._error is not None:
            raise self._error
        self.num_writes += 1
        for segment in segment_ids if segment_ids is not None else ["all"]:
            for local, index in zip(local_block_ids, grant_indices, strict=True):
                assert (index, segment) not in self.written, "a block is sent once"
                self.written[index, segment] = local

    def finish(self, payload):
        self.payload = payload

    def abort(self, reason):
        self.aborted = reason


def sequence(num_tokens, num_computed=0, first_block=100, media_end=0) -> TokenSequence:
    prompt: Any = SimpleNamespace(token_ids=range(num_tokens), media_end=media_end)
    table = list(range(first_block, first_block + -(-num_tokens // BLOCK_SIZE)))
    return TokenSequence("s", prompt, block_table=table, num_computed_tokens=num_computed)


def request(*sequences, outgoing: Any = None, phase=LanguagePhase.COMPUTING) -> LanguageRequest:
    """`outgoing`: None: it has no grant yet."""
    asked = make_request("r", 1)
    made = LanguageRequest(asked, 1, 1.0, 0.0, Stopwatch(0.0), computes=True, sends=True, phase=phase)
    for each in sequences:
        made.add_prompt(each)
    if outgoing is not None:
        made.send_to(outgoing, places_of(made))
    return made


def places_of(request: LanguageRequest) -> PromptPlaces:
    num_blocks = [len(each.block_table) for each in request.sequences]
    grant: Any = SimpleNamespace(lease_id="", first_blocks=(), block_ids=range(sum(num_blocks)))
    return PromptPlaces(grant, num_blocks)


def run_step(batch, num_layers, block_bytes):
    """A forward; yields the layers as they come."""
    spec = SegmentSpec(
        BLOCK_SIZE, (block_bytes // num_layers // SEGMENTS_PER_LAYER // BLOCK_SIZE,), torch.uint8
    )
    layout = MemoryLayout((spec,) * (num_layers * SEGMENTS_PER_LAYER))
    push = StepPush(batch, layout, num_layers)
    for layer in range(num_layers):
        push.on_layer(layer, None)
        yield layer
    push.close()
    for work in batch:
        work.sequence.computed(work.num_tokens)


@given(
    num_tokens=st.integers(1, 60),
    cached=st.integers(0, 10),
    chunks=st.lists(st.integers(1, 20), max_size=8),
    num_layers=st.integers(1, 5),
    block_bytes=st.sampled_from([64, MIN_WRITE_BYTES // 3, MIN_WRITE_BYTES, 9 * MIN_WRITE_BYTES]),
    granted_before_chunk=st.integers(0, 9),
    blocks_together=st.sampled_from([1, 3]),
)
def test_every_segment_of_every_block_goes_exactly_once(
    num_tokens, cached, chunks, num_layers, block_bytes, granted_before_chunk, blocks_together
):
    cached = min(cached * BLOCK_SIZE, (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE)
    negative, seq = sequence(num_tokens, cached), sequence(9, 0, first_block=500)
    recorder: Any = Recorder(blocks_together=blocks_together)
    req = request(seq, negative)
    left = [*chunks, max(num_tokens, seq.num_prompt_tokens)]
    for i, size in enumerate(left):
        if i == granted_before_chunk:
            req.send_to(recorder, places_of(req))
            send_computed(req, BLOCK_SIZE)
        batch = [
            PromptWork(req, s, min(size, s.num_prompt_tokens - s.num_computed_tokens)) for s in req.sequences
        ]
        batch = [work for work in batch if work.num_tokens > 0]
        if batch:
            list(run_step(batch, num_layers, block_bytes))
            send_computed(req, BLOCK_SIZE)
    req.send_to(recorder, places_of(req))
    req.drawn((5,))
    send_computed(req, BLOCK_SIZE)
    tables = seq.block_table + negative.block_table
    for index, local in enumerate(tables):
        segments = {segment: found for (i, segment), found in recorder.written.items() if i == index}
        assert set(segments.values()) == {local}
        assert set(segments) in ({"all"}, set(range(num_layers * SEGMENTS_PER_LAYER)))
    assert recorder.payload is not None


def test_a_large_layer_is_on_its_way_before_the_next_one_is_computed():
    seq, recorder = sequence(16), Recorder()
    for layer in run_step([PromptWork(request(seq, outgoing=recorder), seq, 16)], 3, 3 * MIN_WRITE_BYTES):
        assert {segment for _, segment in recorder.written} == set(range(2 * layer + 2))
        assert recorder.num_writes == layer + 1
    assert seq.num_blocks_sent == 4


def test_small_layers_wait_until_they_are_worth_a_write_and_the_last_one_leaves_nothing_behind():
    seq, recorder = sequence(16), Recorder()
    after_layer = []
    for _ in run_step([PromptWork(request(seq, outgoing=recorder), seq, 16)], 5, MIN_WRITE_BYTES * 5 // 8):
        after_layer.append(recorder.num_writes)
    assert after_layer == [0, 1, 1, 2, 3]


def test_a_lease_that_runs_out_does_not_stop_the_step_or_its_neighbours():
    late, fine = sequence(8), sequence(8, first_block=300)
    recorder = Recorder()
    batch = [
        PromptWork(request(late, outgoing=Recorder(LeaseExpiredError("over"))), late, 8),
        PromptWork(request(fine, outgoing=recorder), fine, 8),
    ]
    list(run_step(batch, 2, 64))
    assert {index for index, _ in recorder.written} == {0, 1}


def test_blocks_that_travel_together_go_when_the_last_of_them_is_filled():
    seq, recorder = sequence(30), Recorder(blocks_together=3)  # 8 blocks of 4, the last one with 2 tokens
    req = request(seq, outgoing=recorder)
    sent = []
    for count in (11, 5, 8, 6):
        list(run_step([PromptWork(req, seq, count)], 1, 64))
        sent.append(len({index for index, _ in recorder.written}))
    assert sent == [0, 3, 6, 8]


seconds = st.floats(1e-4, 1.0)


@given(st.integers(1, 200), seconds, seconds, st.floats(0, 100))
def test_as_many_blocks_travel_as_make_the_hand_over_shortest(num_blocks, block_s, compute_s, prefill_s):
    def took(n):
        return max(0.0, n * block_s - prefill_s) + (num_blocks - n) * compute_s

    chosen = num_blocks_to_send(num_blocks, block_s, compute_s, prefill_s)
    best = min(took(n) for n in range(num_blocks + 1))
    assert 0 <= chosen <= num_blocks
    assert took(chosen) <= best + min(block_s, compute_s) + 1e-9  # a block that hides in part travels or not


# One block measures a link.
WIDE = MemoryLayout((SegmentSpec(BLOCK_SIZE, (MIN_SENT_BYTES // BLOCK_SIZE,), torch.uint8),))
BUDGET: Any = SimpleNamespace(predicted_s=lambda tokens, context: 0.1 * tokens)


def cut(
    num_tokens,
    *,
    block_s: Any = 8.0,
    token_s: Any = 0.01,
    media_end=0,
    together=1,
    layout=WIDE,
    num_computed=0,
):
    outgoing = Recorder(blocks_together=together, block_s=block_s)
    req = request(sequence(num_tokens, num_computed, media_end=media_end), outgoing=outgoing)
    plan_end(req, token_s, BUDGET, layout)
    return req.main.first_recomputed


def test_the_end_is_left_to_decode_only_where_that_is_sooner():
    assert cut(100) == 4  # ten seconds of prefill hide one block, nearly
    assert cut(200) == 8
    assert cut(200, num_computed=120) == 4
    assert cut(100, block_s=0.01) is None  # the link is fast
    assert cut(100, token_s=3.0) is None  # computing is slow
    assert cut(100, block_s=None) is None and cut(100, token_s=None) is None  # nothing is known


def test_media_the_first_bytes_and_whole_groups_always_travel():
    assert cut(100, media_end=50) == 52
    assert cut(100, media_end=99) is None
    assert cut(100, together=4) == 16
    narrow = MemoryLayout((SegmentSpec(BLOCK_SIZE, (MIN_SENT_BYTES // BLOCK_SIZE // 10,), torch.uint8),))
    assert cut(100, layout=narrow) == 44


def test_what_is_left_to_decode_is_not_sent_and_said():
    outgoing = Recorder()
    req = request(sequence(22, 8), outgoing=outgoing)
    req.main.leave_to_receiver(12)
    send_computed(req, BLOCK_SIZE)
    for _ in run_step([PromptWork(req, req.main, 14)], 2, MIN_WRITE_BYTES):
        pass
    req.drawn((5,))
    send_computed(req, BLOCK_SIZE)
    assert {index for index, _ in outgoing.written} == {0, 1, 2}
    assert msgspec.msgpack.decode(outgoing.payload or b"", type=KvReady).first_recomputed == 12


@given(joins=st.integers(0, 4), num_layers=st.integers(1, 4), computed=st.integers(0, 3))
def test_a_request_whose_grant_comes_while_its_step_runs_joins_with_the_layers_that_are_done(
    joins, num_layers, computed
):
    req = request(sequence(24, computed * BLOCK_SIZE))
    outgoing: Any = Recorder()
    for layer in run_step(
        [PromptWork(req, req.main, 24 - req.main.num_computed_tokens)], num_layers, 64 * MIN_WRITE_BYTES
    ):
        if layer == joins:
            req.send_to(outgoing, places_of(req))
            send_computed(req, BLOCK_SIZE)  # what was there before the step
    if req.outgoing is None:
        req.send_to(outgoing, places_of(req))
    send_computed(req, BLOCK_SIZE)
    segments = range(num_layers * SEGMENTS_PER_LAYER)
    sent = {(i, s) for i, segment in outgoing.written for s in (segments if segment == "all" else [segment])}
    assert sent == {(i, s) for i in range(6) for s in segments}
    assert (joins < num_layers - 1) == any(segment != "all" for _, segment in outgoing.written)


class Opener:
    """A transfer engine that cannot open leases of some names."""

    def __init__(self, *bad):
        self.bad, self.opened = bad, {}

    def open(self, received):
        if received.grant.lease_id in self.bad:
            raise TransferError("not that one")
        outgoing = self.opened[received.grant.lease_id] = Recorder(lease_id=received.grant.lease_id)
        return outgoing


def received(name) -> Any:
    return SimpleNamespace(
        grant=SimpleNamespace(lease_id=name, token_s=None, first_blocks=(), block_ids=range(2))
    )


def test_a_grant_for_a_request_that_has_ended_is_given_back_and_belongs_to_nothing():
    closing = request(sequence(8, 8), phase=LanguagePhase.CLOSING)
    transfer_engine: Any = Opener("bad")
    targets = KvOutput(transfer_engine, BUDGET, WIDE)
    for name in ("closing", "gone", "bad"):
        targets.offer(name, received(name))
    assert list(targets.take({"closing": closing})) == []
    assert {name: outgoing.aborted for name, outgoing in transfer_engine.opened.items()} == {
        "closing": "the request has ended",
        "gone": "the request has ended",
    }
    assert targets.num_open_leases == 0 and closing.outgoing is None


def test_between_layers_only_good_grants_of_prompts_in_the_step_are_used():
    running, other, failing = (request(sequence(8, 8)) for _ in range(3))
    requests = {"running": running, "other": other, "failing": failing}
    transfer_engine: Any = Opener("failing")
    targets = KvOutput(transfer_engine, BUDGET, WIDE)
    for name in (*requests, "gone"):
        targets.offer(name, received(name))
    targets.take_early({"running": running, "failing": failing})
    assert [targets.is_open(each) for each in requests.values()] == [True, False, False]
    assert {index for index, _ in transfer_engine.opened["running"].written} == {0, 1}
    assert other.outgoing is None
    taken = {id(req): error for req, error in targets.take(requests)}
    assert taken[id(other)] is None and "not that one" in str(taken[id(failing)]) and len(taken) == 2
    assert targets.pop_closed("running") is running and targets.pop_closed("other") is other
    assert targets.pop_closed("failing") is None


@pytest.mark.parametrize("phase", [None, LanguagePhase.CLOSING])
def test_a_grant_that_comes_too_late_is_given_back_at_once(phase):
    """To a request that has ended, or is about to."""
    outgoing, closing = Recorder(), request(sequence(8, 8), phase=phase or LanguagePhase.COMPUTING)
    transfer_engine: Any = SimpleNamespace(open=lambda grant: outgoing)
    targets = KvOutput(transfer_engine, BUDGET, WIDE)
    targets.offer("r", received("lease"))
    assert list(targets.take({} if phase is None else {"r": closing})) == []
    assert outgoing.aborted == "the request has ended"
    assert closing.outgoing is None and targets.num_open_leases == 0
