"""The collective agent against hostile, silent and lost peers, and the arithmetic of its registered
memory."""

from __future__ import annotations

import itertools
import select
import socket
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kvcache.memory import BlockMemory, MemoryLayout, SegmentSpec
from kv_transfer.agents import collective_agent
from kv_transfer.agents.agent import PeerLostError, TransferError, TransferState
from kv_transfer.agents.collective_agent import CollectiveAgent
from kv_transfer.agents.collective_frames import (
    MAX_FRAME_BYTES,
    MAX_GREETING_BYTES,
    FrameSocket,
    Greeting,
    Notification,
    Refusal,
)
from kv_transfer.agents.collective_group import Channel, PairStore
from kv_transfer.agents.collective_link import CollectiveMetadata
from kv_transfer.agents.regions import Region, RegionTable, locate, pieces
from kv_transfer.lease.lease_writer import MAX_DESCRIPTORS

LAYOUT = MemoryLayout((SegmentSpec(4, (8,), torch.float32), SegmentSpec(4, (4,), torch.float32)))
NUM_BLOCKS = 16
DEADLINE_S = 60.0  # a guard only
PROMPT_S = 5.0  # for calls that must not wait, on a busy machine


@pytest.fixture
def make():
    """make(name) -> an agent with a registered memory full of its serial number."""
    agents = []

    def one(name, **options):
        agent: Any = CollectiveAgent(name, "127.0.0.1", **options)
        agent.memory = BlockMemory(LAYOUT, NUM_BLOCKS)
        agents.append(agent)
        agent.memory.buffer.fill_(len(agents))
        agent.register(agent.memory)
        return agent

    yield one
    for agent in agents:
        agent.close()
    links = [thread for thread in threading.enumerate() if thread.name.startswith(("writes-to-", "accepted"))]
    for thread in links:  # a process group that is being made cannot be interrupted: its own timeout ends it
        thread.join(4 * DEADLINE_S)
    assert not any(thread.is_alive() for thread in links)


def until(condition, *agents):
    """Drives the agents until then; returns what they delivered."""
    received, pause = [], threading.Event()
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "nothing happened before the deadline"
        for agent in agents:
            received.extend(agent.notifications())
        pause.wait(0.001)
    return received


def post(writer, owner, blocks, metadata=None, notification=b""):
    peer = writer.connect(owner.metadata() if metadata is None else metadata)
    return writer.post(
        peer, writer.memory.descriptors(blocks), owner.memory.descriptors(blocks), notification
    )


def is_over(agent, handle):
    return lambda: agent.poll(handle) is not TransferState.PENDING


def write(writer, owner, blocks):
    handle = post(writer, owner, blocks)
    until(is_over(writer, handle), writer, owner)
    writer.release(handle)
    return handle.state


def expect_loss(agent, handle, *others):
    """The message of the error with which the pending write ends."""
    with pytest.raises(PeerLostError) as caught:
        until(is_over(agent, handle), agent, *others)
    assert agent.poll(handle) is TransferState.FAILED
    agent.release(handle)
    return str(caught.value)


def expect_loss_of_a_new_write(writer, owner, metadata, *others):
    """The message of the error. The post itself may raise it, if the loss is known by then."""
    with pytest.raises(PeerLostError) as caught:
        handle = post(writer, owner, [2], metadata)
        try:
            until(is_over(writer, handle), writer, *others)
        finally:
            writer.release(handle)
    return str(caught.value)


def test_each_pair_has_a_group_of_its_own_so_a_lost_peer_breaks_no_other(make):
    writer, first, second = make("writer"), make("first"), make("second")
    assert write(writer, first, [1]) is write(writer, second, [1]) is TransferState.DONE
    metadata = first.metadata()
    first.close()
    expect_loss_of_a_new_write(writer, first, metadata, second)
    writer.disconnect("first")
    assert write(writer, second, [3]) is TransferState.DONE
    assert (second.memory.segments[0].view(torch.uint8)[3] == 1).all()


def test_two_agents_write_to_each_other_at_the_same_time(make):
    left, right = make("left"), make("right")
    handles = [(left, post(left, right, [1])), (right, post(right, left, [2]))]
    for agent, handle in handles:
        until(is_over(agent, handle), left, right)
        agent.release(handle)
        assert handle.state is TransferState.DONE
    assert (right.memory.segments[1].view(torch.uint8)[1] == 1).all()
    assert (left.memory.segments[1].view(torch.uint8)[2] == 2).all()


def with_more_memory(metadata):
    """Metadata of an owner whose memory seems larger than it is."""
    known = msgspec.msgpack.decode(metadata, type=CollectiveMetadata)
    regions = tuple(Region(region.address - 4096, region.num_bytes + 8192) for region in known.regions)
    return msgspec.msgpack.encode(msgspec.structs.replace(known, regions=regions))


def test_a_target_outside_the_memory_ends_the_writers_link_and_nobody_elses(make):
    liar, honest, owner = make("liar"), make("honest"), make("owner")
    assert write(honest, owner, [0]) is TransferState.DONE
    before = owner.memory.buffer.clone()
    peer = liar.connect(with_more_memory(owner.metadata()))
    local, remote = (agent.memory.descriptors([1, 2]) for agent in (liar, owner))
    remote[-1, 0] = owner.memory.base_address + owner.memory.buffer.numel() - 8
    reason = expect_loss(liar, liar.post(peer, local, remote, b"done"), owner)
    assert "registered memory" in reason
    assert torch.equal(owner.memory.buffer, before) and owner.notifications() == []
    with pytest.raises(PeerLostError):
        liar.notify(peer, b"still there?")
    assert write(honest, owner, [5]) is TransferState.DONE


def dial(owner):
    known = msgspec.msgpack.decode(owner.metadata(), type=CollectiveMetadata)
    return known, socket.create_connection((known.host, known.port), DEADLINE_S)


def is_hung_up(connection):
    """Whether the owner has ended this connection."""
    connection.setblocking(False)
    try:
        return not connection.recv(1 << 16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: owner\r\n\r\n",
        (MAX_GREETING_BYTES + 1).to_bytes(4, "little"),
        b"\x05\0\0\0\xc1\xc1\xc1\xc1\xc1",
        b"\0\0\0\0",
    ],
    ids=["http", "too long", "no msgpack", "empty"],
)
def test_garbage_ends_the_connection_and_touches_nothing(make, garbage):
    owner = make("owner")
    before = owner.memory.buffer.clone()
    _, connection = dial(owner)
    connection.sendall(garbage)
    until(lambda: is_hung_up(connection), owner)
    connection.close()
    assert torch.equal(owner.memory.buffer, before) and owner.notifications() == []
    assert write(make("writer"), owner, [1]) is TransferState.DONE


def test_a_stranger_without_the_token_hears_nothing_and_delivers_nothing(make):
    owner = make("owner")
    _, connection = dial(owner)
    frames = FrameSocket(connection)
    frames.write(Greeting(b"guess" * 6, "stranger", "gloo"), DEADLINE_S)
    frames.write(Notification(b"let me in"), DEADLINE_S)
    received = until(lambda: is_hung_up(connection), owner)
    with pytest.raises(PeerLostError):
        frames.read(DEADLINE_S)
    frames.shut()
    assert received == owner.notifications() == []


def test_a_writer_that_wants_a_backend_the_owner_lacks_is_told_so(make):
    owner = make("owner", backends=frozenset({"gloo"}))
    known, connection = dial(owner)
    frames = FrameSocket(connection)
    frames.write(Greeting(known.token, "writer", "nccl"), DEADLINE_S)
    until(lambda: select.select([connection], [], [], 0)[0], owner)
    answer = frames.read(DEADLINE_S)
    frames.shut()
    assert isinstance(answer, Refusal) and "nccl" in answer.reason


def test_strangers_who_dial_and_stay_silent_are_counted(make, monkeypatch):
    monkeypatch.setattr(collective_agent, "MAX_UNKNOWN_CONNECTIONS", 3)
    owner = make("owner")
    strangers = [dial(owner)[1] for _ in range(5)]
    until(lambda: sum(map(is_hung_up, strangers)) == 2, owner)
    for stranger in strangers:
        stranger.close()
    assert write(make("writer"), owner, [1]) is TransferState.DONE


def test_no_verb_waits_for_an_owner_that_never_answers(make):
    writer, owner = make("writer"), make("owner")
    began_at = time.monotonic()
    handles = [post(writer, owner, [i]) for i in range(3)]
    writer.notify("owner", b"hello")
    assert [writer.poll(handle) for handle in handles] == [TransferState.PENDING] * 3
    assert writer.notifications() == []
    with pytest.raises(TransferError, match="in flight"):
        writer.release(handles[0])
    writer.disconnect("owner")
    assert time.monotonic() - began_at < PROMPT_S
    for handle in handles:
        expect_loss(writer, handle)
    assert write(writer, owner, [7]) is TransferState.DONE
    assert (owner.memory.segments[0].view(torch.uint8)[:3] == 2).all()


def test_the_longest_write_of_a_lease_fits_into_a_frame():
    assert 16 * MAX_DESCRIPTORS < MAX_FRAME_BYTES - 64


def test_an_owner_whose_port_is_closed_is_lost_at_once(make):
    writer, owner = make("writer"), make("owner")
    metadata = owner.metadata()
    owner.close()
    began_at = time.monotonic()
    assert "cannot be reached" in expect_loss_of_a_new_write(writer, owner, metadata)
    assert time.monotonic() - began_at < PROMPT_S


def test_an_owner_that_disconnects_a_writer_hears_no_more_of_it_until_it_dials_again(make):
    writer, owner = make("writer"), make("owner")
    assert write(writer, owner, [1]) is TransferState.DONE
    owner.disconnect("writer")
    expect_loss_of_a_new_write(writer, owner, None, owner)
    writer.disconnect("owner")
    assert write(writer, owner, [3]) is TransferState.DONE


def test_memories_of_other_transports_and_sizes_are_refused(make):
    writer, owner = make("writer"), make("owner")
    peer = writer.connect(owner.metadata())
    rows = owner.memory.descriptors([0])
    with pytest.raises(TransferError):
        writer.post(peer, writer.memory.descriptors([0, 1]), rows)
    with pytest.raises(TransferError):
        writer.connect(msgspec.msgpack.encode(("owner", 3)))


@pytest.fixture
def channels():
    """(writer's, owner's) end of one group over a loopback connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = FrameSocket(socket.create_connection(listener.getsockname()), 1 << 20)
        theirs = FrameSocket(listener.accept()[0], 1 << 20)
    ends = {}

    def make_end(rank, frames):
        store = PairStore(frames, DEADLINE_S)
        ends[rank] = Channel(store, rank, "gloo", torch.device("cpu"), "127.0.0.1", DEADLINE_S)

    other = threading.Thread(target=make_end, args=(1, theirs))
    other.start()
    make_end(0, ours)
    other.join(DEADLINE_S)
    yield ends[0], ends[1]
    for end in ends.values():
        end.sever()
    ours.shut()
    theirs.shut()


def test_severing_a_channel_wakes_who_waits_in_it_at_both_ends(channels):
    raised = []

    def wait_for_bytes(channel, tensor):
        try:
            channel.receive([tensor])
        except PeerLostError as error:
            raised.append(error)

    threads = [threading.Thread(target=wait_for_bytes, args=(end, torch.zeros(1 << 16, dtype=torch.uint8))) for end in channels]  # fmt: skip
    for thread in threads:
        thread.start()
    threading.Event().wait(0.05)
    assert not raised
    channels[0].sever()
    channels[0].sever()
    for thread in threads:
        thread.join(PROMPT_S)
    assert len(raised) == 2


def test_a_post_must_name_whole_rows(make):
    writer, owner = make("writer"), make("owner")
    link = post(writer, owner, [1]).link
    link.post([], np.zeros(3), b"")  # a row and a half
    until(lambda: link.error is not None, writer, owner)
    assert "out of place or malformed" in str(link.error)


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 63), st.integers(1, 64)), min_size=1, max_size=40)
)
@settings(max_examples=40)
def test_runs_are_the_descriptors_bytes_in_order_with_neighbours_merged(rows):
    table, memories = RegionTable(), [BlockMemory(feature_like(), 128) for _ in range(3)]
    for memory in memories:
        memory.buffer.copy_(torch.randint(0, 256, memory.buffer.shape, dtype=torch.uint8))
        table.register(memory)
        table.register(memory)
    descriptors = np.array(
        [(memories[m].base_address + start, size) for m, start, size in rows], dtype=np.uint64
    )
    expected = torch.cat([memories[m].buffer[start : start + size] for m, start, size in rows])
    runs = table.runs(descriptors)
    assert torch.equal(torch.cat(runs), expected)
    num_joints = sum(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in itertools.pairwise(rows))
    assert len(runs) == len(rows) - num_joints


def feature_like():
    return MemoryLayout((SegmentSpec(1, (1,), torch.uint8),))


@settings(max_examples=40)
@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 40))
def test_pieces_hold_the_same_bytes_and_are_all_full_but_the_last(lengths, max_bytes):
    whole = torch.arange(sum(lengths), dtype=torch.int32)
    cut = list(pieces(whole.split(lengths) if lengths else [], max_bytes))
    sizes = [sum(map(len, piece)) for piece in cut]
    assert torch.equal(torch.cat([run for piece in cut for run in piece] or [whole]), whole)
    assert sizes[:-1] == [max_bytes] * (len(sizes) - 1) and all(0 < size <= max_bytes for size in sizes)


TOP = 1 << 64


@pytest.mark.parametrize(
    "row",
    [(999, 1), (1000, 101), (1100, 1), (1050, TOP - 1), (TOP - 1, 2), (0, 0), (1101, 0), (1000, TOP - 1000)],
)
def test_a_row_that_is_not_wholly_inside_is_refused_also_where_sums_wrap_around(row):
    regions = (Region(1000, 100),)
    assert locate(np.array([(1000, 100), (1100, 0), (1099, 1)], dtype=np.uint64), regions).tolist() == [
        0,
        0,
        0,
    ]
    with pytest.raises(TransferError):
        locate(np.array([(1000, 1), row], dtype=np.uint64), regions)
