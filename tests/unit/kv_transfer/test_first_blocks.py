"""Leases on the blocks that the owner lacks: which blocks of prompts they are, coded and raw, on several
ranks, and transfers of nothing but the last word."""

from __future__ import annotations

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cluster.types.transfer import Contract, Grant, ReceivedTotals
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.events import Aborted, Completed, Expired, Finished, SendAborted
from kv_transfer.lease.prompt_places import PromptPlaces
from tests.fakes.leases import MARGIN_S, TTL_S
from tests.unit.kv_transfer import test_group, test_leases, test_wire

CONTRACT = Contract(6, "", 4, (), "raw", "")


def grant_of(pair, num_blocks, first_blocks, lease_id="lease"):
    return pair.owner.grant(lease_id, *pair.take(lease_id, num_blocks), TTL_S, (), first_blocks)


def posts(pair) -> list[int]:
    """The number of bytes of each write from now on."""
    sizes: list[int] = []
    post = pair.writer.agent.post

    def noting(peer, local, remote, notification=b""):
        sizes.append(int(local[:, 1].sum()))
        return post(peer, local, remote, notification)

    pair.writer.agent.post = noting
    return sizes


# ------------------------------------------------------------------------------------- places


def bare_grant(num_blocks: int, first_blocks: tuple[int, ...]) -> Grant:
    ids = tuple(range(num_blocks))
    return Grant("lease", b"", 0, num_blocks, CONTRACT, ids, ids, 1.0, first_blocks)


prompts = st.lists(
    st.integers(0, 9).flatmap(lambda count: st.tuples(st.just(count), st.integers(0, count))), max_size=4
)


@given(prompts, st.integers(1, 4))
def test_every_lacking_block_has_one_place_and_the_others_none(sizes, step):
    counts, firsts = [count for count, _ in sizes], [first for _, first in sizes]
    places = PromptPlaces(bare_grant(sum(counts) - sum(firsts), tuple(firsts)), counts)
    found = []
    for prompt_idx, count in enumerate(counts):
        assert places.first_block(prompt_idx) == firsts[prompt_idx]
        for start in range(0, count, step):
            blocks = range(start, min(start + step, count))
            wanted, indices = places.of(prompt_idx, blocks)
            assert list(wanted) == [block for block in blocks if block >= firsts[prompt_idx]]
            found += indices
    assert found == list(range(sum(counts) - sum(firsts)))


def test_a_grant_without_first_blocks_is_for_all_blocks():
    places = PromptPlaces(bare_grant(5, ()), [3, 2])
    assert places.of(1, range(2)) == (range(2), range(3, 5))


@pytest.mark.parametrize(
    ("num_granted", "firsts", "counts"), [(4, (), [3, 2]), (4, (1,), [3, 2]), (2, (4, 0), [3, 3])]
)
def test_a_grant_for_other_prompts_is_refused(num_granted, firsts, counts):
    with pytest.raises(TransferError, match="lease lease"):
        PromptPlaces(bare_grant(num_granted, firsts), counts)


# ------------------------------------------------------------------------------------- leases


def test_only_lacking_blocks_travel_and_go_where_they_belong(pair):
    tables = [[7, 6, 5], [4, 3, 2]]
    sizes, grant = posts(pair), grant_of(pair, 4, (2, 0))
    outgoing, places = pair.open(grant), PromptPlaces(grant, [3, 3])
    for prompt_idx, table in enumerate(tables):
        for blocks in (range(2), range(2, 3)):
            wanted, indices = places.of(prompt_idx, blocks)
            outgoing.write([table[i] for i in wanted], indices)
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")]
    for source, target in zip(pair.source.segments, pair.target.segments, strict=True):
        assert torch.equal(target[list(grant.block_ids)], source[[5, 4, 3, 2]])
        assert not target[4:].any(), "blocks that were not granted"
    assert sum(sizes) == 4 * pair.target.layout.block_bytes
    assert pair.owner.received == ReceivedTotals(spared_bytes=2 * pair.target.layout.block_bytes)


def test_an_empty_transfer_is_one_notification(pair):
    sizes, grant = posts(pair), grant_of(pair, 0, (3,))
    outgoing = pair.open(grant)
    wanted, indices = PromptPlaces(grant, [3]).of(0, range(3))
    outgoing.write(list(wanted), indices)
    pair.step(3)
    assert not pair.received, "the first token is not known yet"
    outgoing.finish(b"first token")
    pair.step(2)
    assert pair.received == [Completed("lease", b"first token")] and pair.sent == [Finished("lease")]
    assert not sizes and not pair.target.buffer.any()


def test_an_empty_lease_ends_in_every_other_way_too(pair):
    pair.open(grant_of(pair, 0, (3,), "aborted")).abort("client gone")
    pair.step(2)
    grant_of(pair, 0, (3,), "revoked")
    pair.owner.revoke("revoked", "no writer")
    late = pair.open(grant_of(pair, 0, (3,), "late"))
    pair.owner.step()
    pair.clock.at += TTL_S + MARGIN_S
    pair.owner.step()
    assert pair.received == [
        Aborted("aborted", "client gone"),
        Aborted("revoked", "no writer"),
        Expired("late"),
    ]
    late.abort("too late")
    pair.step(2)
    assert pair.sent == [SendAborted("aborted", "client gone"), SendAborted("late", "too late")]
    assert pair.owner.received == ReceivedTotals(num_ignored=1), "nothing was written late"


def test_whichever_operation_of_an_empty_transfer_fails_both_sides_hear_once():
    outcomes = set()
    for nth in range(1, 20):
        pair = test_leases.Pair()
        pair.network.faults.fail_at(nth)
        pair.open(grant_of(pair, 0, (3,))).finish(b"first token")
        pair.let_everything_end()
        (sent,), (received,) = pair.sent, pair.received
        outcomes.add((type(sent).__name__, type(received).__name__))
        pair.audit()
    assert {("Finished", "Completed"), ("SendFailed", "Expired")} <= outcomes


def test_a_word_about_other_blocks_of_the_same_prompts_completes_nothing(pair):
    grant = grant_of(pair, 4, (1, 1))
    test_leases.send(pair, msgspec.structs.replace(grant, first_blocks=(2, 0)))  # the same blocks elsewhere
    pair.step(3)
    assert not pair.received
    assert pair.owner.received.num_mismatched == 1


@pytest.mark.parametrize(("num_blocks", "firsts"), [(0, ()), (2, (-1,))])
def test_grants_that_make_no_sense_are_refused(pair, num_blocks, firsts):
    with pytest.raises(ValueError, match=r"cannot be granted|before a prompt"):
        pair.owner.grant("lease", range(num_blocks), [0] * num_blocks, TTL_S, (), firsts)


# --------------------------------------------------------------------------------- coded, several ranks


@pytest.mark.parametrize(
    ("first", "coded_first_blocks"), [(0, (0, 4)), (1, (3,)), (4, (0,)), (6, ()), (9, ())]
)
def test_groups_that_lack_no_block_travel_coded(first, coded_first_blocks):
    """Two groups and two more blocks, then 64 tokens of a companion, which lacks them all."""
    pair, run_lengths = test_wire.Pair(), (test_wire.RUN, 64)
    num_blocks = test_wire.NUM_RUN_BLOCKS - first + 4
    taken = pair.take("lease", num_blocks)
    grant = pair.owner.grant("lease", *taken, TTL_S, run_lengths, (first, 0))
    companion = test_wire.NUM_RUN_BLOCKS - first
    assert grant.coded.first_blocks == (*coded_first_blocks, companion)
    outgoing, places = pair.open(grant), PromptPlaces(grant, [test_wire.NUM_RUN_BLOCKS, 4])
    sources, ends = test_wire.source_blocks(grant), (4, 8, test_wire.NUM_RUN_BLOCKS)
    for start, end in zip((0, *ends), ends, strict=False):  # as prefill sends: up to a group's end
        _, indices = places.of(0, range(start, end))
        outgoing.write([sources[i] for i in indices], indices)
    _, indices = places.of(1, range(4))
    outgoing.write([sources[i] for i in indices], indices)
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")]
    coded = {place + i for place in grant.coded.first_blocks for i in range(test_wire.PER_GROUP)}
    worst = test_wire.errors(pair, grant)
    limit = test_wire.MAX_ERROR * test_wire.largest(pair)
    assert [0 < error <= limit for error in worst] == [place in coded for place in range(num_blocks)]
    assert all(error == 0 for place, error in enumerate(worst) if place not in coded)
    test_wire.end(pair)


def test_a_raw_prompt_to_a_worker_with_a_codec_is_granted_without_what_is_there():
    """As with `codec: auto`, which decides for each request."""
    pair = test_wire.Pair()
    taken = pair.take("lease", 2)
    grant = pair.owner.grant("lease", *taken, TTL_S, (), (1,))
    assert (grant.coded, grant.first_blocks) == (None, (1,))
    outgoing = pair.open(grant)
    outgoing.write(test_wire.source_blocks(grant), range(2))
    outgoing.finish(b"payload")
    pair.step(2)
    assert pair.received == [Completed("lease", b"payload")]
    test_wire.end(pair)


@pytest.mark.parametrize("num_blocks", [2, 0])
def test_all_ranks_leave_out_the_same_blocks(num_blocks):
    pair = test_group.Pair()
    blocks = pair.blocks[:num_blocks]
    grant = pair.owner.group.grant("lease", blocks, pair.pool.generations(blocks), TTL_S, (), (3,))
    assert [shard.first_blocks for shard in (grant, *grant.shards)] == [(3,)] * test_group.NUM_RANKS
    outgoing, places = (
        pair.writer.group.open(grant.received(pair.clock.at)),
        PromptPlaces(grant, [3 + num_blocks]),
    )
    table = [0, 1, 2, 7, 6]
    wanted, indices = places.of(0, range(3 + num_blocks))
    outgoing.write([table[i] for i in wanted], indices)
    outgoing.finish(b"payload")
    pair.step(3)
    assert pair.writer.events == [Finished("lease")]
    assert pair.owner.events == [Completed("lease", b"payload")]
    if num_blocks:
        pair.check_bytes()
    spared = 3 * test_group.LAYOUT.block_bytes
    assert [engine.received.spared_bytes for engine in pair.owner.engines] == [spared] * test_group.NUM_RANKS
