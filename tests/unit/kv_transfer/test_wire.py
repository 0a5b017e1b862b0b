"""Leases whose groups travel coded: over the in-process agent, on a virtual clock."""

from __future__ import annotations

import itertools

import pytest
import torch

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.kv_format import kv_segments
from kv_transfer.agents.agent import LayoutMismatchError
from kv_transfer.agents.in_process import FaultScript
from kv_transfer.codecs.wire_memory import Wire
from kv_transfer.lease.events import Aborted, Completed, Expired, Finished, SendFailed
from kv_transfer.lease.transfer_engine import TransferEngine
from tests.fakes.leases import MARGIN_S, TTL_S, LeasePair
from tests.fakes.slow_memory import SlowMemory
from tests.fakes.slow_params import often

LAYERS, BLOCK_SIZE, NUM_BLOCKS = 3, 16, 24
PER_GROUP = 4
LAYOUT = MemoryLayout(kv_segments([(2, 8)] * (2 * LAYERS), BLOCK_SIZE, torch.float32))
RUN = 2 * 64 + 20  # tokens: two groups and two more blocks, the last one partly filled
NUM_RUN_BLOCKS = 10
MAX_ERROR = 0.5 / 127 + 1e-3  # of the largest element around: half a step, and the scale's rounding


class Pair(LeasePair):
    """Their KV travels as int8."""

    def __init__(self, writer_tokens=6 * 64, owner_tokens=6 * 64, kind=BlockMemory):
        source, target = kind(LAYOUT, NUM_BLOCKS), kind(LAYOUT, NUM_BLOCKS)
        writer_wire = Wire(source, "int8", writer_tokens)
        super().__init__(source, target, writer_wire, Wire(target, "int8", owner_tokens))
        for segment in source.segments:
            segment.normal_(generator=torch.Generator().manual_seed(segment.numel()))

    def grant(self, lease_id="lease", run_lengths=(RUN,), num_behind=0):
        num_blocks = sum(-(-length // BLOCK_SIZE) + num_behind for length in run_lengths)
        return self.owner.grant(lease_id, *self.take(lease_id, num_blocks), TTL_S, run_lengths)

    def sent_numbers(self):
        return self.writer.sent.coded_groups, self.writer.sent.crowded_groups


@pytest.fixture
def pair():
    pair = Pair()
    yield pair
    end(pair)


def end(pair):
    pair.let_everything_end()
    pair.audit()


def source_blocks(grant):
    """Other block ids than the owner's, in another order."""
    return [NUM_BLOCKS - 1 - i for i in range(len(grant.block_ids))]


def send(pair, grant):
    """Two writes, the second one layer by layer."""
    outgoing = pair.open(grant)
    sources = source_blocks(grant)
    outgoing.write(sources[:PER_GROUP], list(range(PER_GROUP)))
    pair.step()
    for layer in range(LAYERS):
        rest = range(PER_GROUP, len(sources))
        outgoing.write([sources[i] for i in rest], list(rest), [2 * layer, 2 * layer + 1])
    outgoing.finish(b"payload")
    return outgoing


def errors(pair, grant):
    """Per block of the grant: the largest difference in all segments."""
    worst = []
    for source, target in zip(source_blocks(grant), grant.block_ids, strict=True):
        worst.append(
            max(
                float((ours[target] - theirs[source]).abs().max())
                for ours, theirs in zip(pair.target.segments, pair.source.segments, strict=True)
            )
        )
    return worst


def largest(pair):
    return max(float(segment.abs().max()) for segment in pair.source.segments)


def assert_arrived(pair, grant, num_coded_blocks):
    """The coded blocks arrived nearly, the raw ones exactly."""
    found = errors(pair, grant)
    assert all(0 < error <= MAX_ERROR * largest(pair) for error in found[:num_coded_blocks])
    assert found[num_coded_blocks:] == [0] * (len(found) - num_coded_blocks)


def test_whole_groups_travel_coded_and_the_rest_as_it_is(pair):
    grant = pair.grant()
    assert grant.coded.first_blocks == (0, 4)
    send(pair, grant)
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")] and pair.sent == [Finished("lease")]
    assert_arrived(pair, grant, 8)
    assert pair.sent_numbers() == (2, 0)
    assert pair.writer_wire.num_used == pair.owner_wire.num_used == 0


def test_a_companions_groups_begin_behind_the_prompts_last_block(pair):
    grant = pair.grant(run_lengths=(70, 64, 10))
    assert grant.coded.first_blocks == (0, 5)
    outgoing = pair.open(grant)
    outgoing.write(source_blocks(grant), list(range(10)))
    outgoing.finish(b"")
    pair.step(2)
    found = errors(pair, grant)
    assert [error > 0 for error in found] == [True] * 4 + [False] + [True] * 4 + [False]


def test_states_behind_each_prompt_travel_as_they_are(pair):
    grant = pair.grant(run_lengths=(64, 64), num_behind=1)
    assert grant.coded.first_blocks == (0, 5)
    send(pair, grant)
    pair.step(2)
    found = errors(pair, grant)
    assert [error > 0 for error in found] == [True] * 4 + [False] + [True] * 4 + [False]


def test_coded_groups_are_a_quarter_of_float32(pair):
    grant = pair.grant()
    num_bytes = []
    post = pair.writer.agent.post
    pair.writer.agent.post = lambda peer, local, remote, notification=b"": (
        num_bytes.append(int(local[:, 1].sum())), post(peer, local, remote, notification)
    )[1]  # fmt: skip
    send(pair, grant)
    pair.step(2)
    whole = NUM_RUN_BLOCKS * LAYOUT.block_bytes
    assert sum(num_bytes) == pytest.approx(whole * (2 + 8 * pair.writer_wire.ratio) / 10)
    assert pair.writer.sent.raw_bytes == whole * 2 // 10
    assert pair.writer.sent.coded_bytes == sum(num_bytes) - pair.writer.sent.raw_bytes
    assert 0 < pair.writer.sent.key_error < 0.02 and 0 < pair.writer.sent.value_error < 0.02
    assert pair.writer_wire.ratio < 0.4


@pytest.mark.parametrize("prompt_tokens", [63, 5])
def test_a_prompt_without_a_whole_group_takes_no_wire(pair, prompt_tokens):
    grant = pair.grant(run_lengths=(prompt_tokens,))
    assert grant.coded is None
    outgoing = pair.open(grant)
    assert outgoing.blocks_together == 1
    outgoing.write(source_blocks(grant), list(range(len(grant.block_ids))))
    outgoing.finish(b"")
    pair.step(2)
    assert_arrived(pair, grant, 0)


@pytest.mark.parametrize(("writer_tokens", "owner_tokens", "num_coded"), [(64, 640, 4), (640, 64, 0)])
def test_what_finds_no_room_goes_raw(writer_tokens, owner_tokens, num_coded):
    pair = Pair(writer_tokens, owner_tokens)
    grant = pair.grant()
    send(pair, grant)
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")]
    assert_arrived(pair, grant, num_coded)
    assert pair.sent_numbers() == ((1, 1) if num_coded else (0, 0))
    end(pair)


def test_a_group_that_is_written_in_parts_goes_raw(pair):
    grant = pair.grant()
    outgoing = pair.open(grant)
    sources = source_blocks(grant)
    for start, end in ((0, 3), (3, 6), (6, 10)):
        outgoing.write(sources[start:end], list(range(start, end)))
    outgoing.finish(b"")
    pair.step(2)
    assert_arrived(pair, grant, 0)


def test_a_group_cannot_be_begun_whole_and_go_on_in_parts(pair):
    grant = pair.grant()
    outgoing = pair.open(grant)
    sources = source_blocks(grant)
    outgoing.write(sources, list(range(10)), [0, 1])
    outgoing.write(sources[:2], [0, 1], [2, 3])
    outgoing.finish(b"")
    pair.step(3)
    assert isinstance(pair.sent[0], SendFailed) and isinstance(pair.received[0], Aborted)


def test_a_byte_that_changes_on_the_wire_is_found(pair):
    grant = pair.grant()
    send(pair, grant)
    pair.writer.step()
    pair.owner_wire.memory.segments[3][grant.coded.block_ids[1], 0, 0, 0] += 1
    pair.owner.step()
    assert [type(event) for event in pair.received] == [Aborted]
    assert "not those" in pair.received[0].reason
    assert pair.owner.received.num_corrupt == 1


def test_peers_with_other_codecs_are_told_which(pair):
    plain = TransferEngine(pair.network.agent("plain"), pair.clock, print, outgoing=BlockMemory(LAYOUT, 4))
    with pytest.raises(LayoutMismatchError, match="codec is raw here and int8 there"):
        plain.open(pair.grant().received(0.0))


def test_a_lease_that_is_revoked_while_it_is_decoded_ends_once_and_after_that(pair, monkeypatch):
    grant = pair.grant()
    send(pair, grant)
    decode = pair.owner_wire.decode

    def revoke_meanwhile(wire_ids, groups):
        pair.owner.revoke("lease", "its writer is dead")
        assert pair.owner_wire.num_used == 2, "still being read"
        return decode(wire_ids, groups)

    monkeypatch.setattr(pair.owner_wire, "decode", revoke_meanwhile)
    pair.step(2)
    assert pair.received == [Aborted("lease", "its writer is dead")]


def test_the_bytes_of_a_cancelled_lease_are_not_decoded(pair, monkeypatch):
    grant = pair.grant()
    monkeypatch.setattr(pair.owner_wire, "decode", lambda *_: pytest.fail("decoded, though cancelled"))
    pair.owner.cancel("lease")
    send(pair, grant)
    pair.step(2)
    assert [type(event) for event in pair.received] == [Aborted]


def test_a_done_notice_for_wire_blocks_that_were_granted_again_completes_nothing(pair):
    """KV blocks and their generations are as before; only the wire blocks have moved on."""
    pair.network.faults.delay(1, polls=6)
    first = pair.grant()
    send(pair, first)
    pair.writer.step()
    pair.owner.revoke("lease", "given up")
    pair.step()
    others = pair.owner_wire.try_allocate(4)
    second = pair.owner.grant("lease", first.block_ids, first.generations, TTL_S, (RUN,))
    pair.held["lease"] = pair.pool.allocate(NUM_RUN_BLOCKS)
    assert second.coded.generations != first.coded.generations
    pair.received.clear()
    pair.step(8)
    assert pair.received == []
    assert pair.owner.received.num_mismatched == 1
    pair.owner_wire.free(others)
    pair.owner.revoke("lease", "end")


# ------------------------------------------------------------------------------------------------ every fault


@pytest.mark.parametrize(
    ("post_polls", "kind"),
    often(itertools.product((0, 2), (BlockMemory, SlowMemory)), ((0, BlockMemory), (2, SlowMemory))),
)
def test_whichever_operation_fails_nothing_wrong_arrives_and_nothing_stays(post_polls, kind):
    for nth in range(1, 200):
        pair = Pair(kind=kind)
        pair.network.faults = FaultScript(post_polls=post_polls)
        pair.network.faults.fail_at(nth)
        grant = pair.grant()
        send(pair, grant)
        pair.step(24)
        pair.clock.at += TTL_S + MARGIN_S
        pair.step(8)
        (event,) = pair.received
        if isinstance(event, Completed):
            assert_arrived(pair, grant, 8)
        else:
            assert isinstance(event, Aborted | Expired)
        end(pair)
        if pair.network.faults.num_operations < nth:
            break
    assert 10 < nth < 199


@pytest.mark.parametrize("dies", ["writer", "owner"])
def test_when_one_side_dies_the_other_is_told_and_frees_everything(dies):
    for rounds in range(8):
        pair = Pair()
        pair.network.faults.post_polls = 2
        grant = pair.grant()
        outgoing = pair.open(grant)
        outgoing.write(source_blocks(grant), list(range(10)))
        outgoing.finish(b"")
        pair.step(rounds)
        pair.network.kill(dies)
        pair.step(3)
        pair.clock.at += TTL_S + MARGIN_S
        pair.step(3)
        other = pair.received if dies == "writer" else pair.sent
        assert len(other) == 1
        survivor = pair.owner_wire if dies == "writer" else pair.writer_wire
        assert survivor is not None and survivor.num_used == 0


def test_a_decoder_that_fails_costs_its_lease_only_and_the_next_notice_is_read(pair, monkeypatch):
    first, second = pair.grant("first", (64,)), pair.grant("second", (20,))
    monkeypatch.setattr(pair.owner_wire, "decode", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    for grant in (first, second):
        outgoing = pair.open(grant)
        outgoing.write(source_blocks(grant), range(len(grant.block_ids)))
        outgoing.finish(b"")
    pair.writer.step()
    pair.owner.step()
    assert [type(event) for event in pair.received] == [Aborted, Completed]
    assert "RuntimeError('broken')" in pair.received[0].reason


def test_an_encoder_that_fails_costs_its_lease_only(pair, monkeypatch):
    grant = pair.grant()
    monkeypatch.setattr(pair.writer_wire, "encode", lambda *_: (_ for _ in ()).throw(RuntimeError("broken")))
    send(pair, grant)
    pair.step(2)
    assert isinstance(pair.sent[0], SendFailed)
    monkeypatch.undo()
    following = pair.grant("next")
    send(pair, following)
    pair.step(2)
    assert pair.received[-1] == Completed("next", b"payload")


def test_layouts_that_cannot_be_coded_are_refused():
    with pytest.raises(ValueError, match="int8 needs plain K and V"):
        Wire(BlockMemory(MemoryLayout(kv_segments([(2, 8)] * 2, 48, torch.float32)), 4), "int8", 64)


def test_a_memory_too_small_for_a_group_codes_none():
    wire = Wire(BlockMemory(LAYOUT, 2), "int8", 64)
    assert wire.encoding.s_per_byte > 0 and wire.first_blocks([32]) == []
