"""The member table over real Unix sockets; workers are bare servers."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from cluster.rpc import Connection, Server, connect
from cluster.types.members import Member, Phase, Role
from cluster.types.messages import (
    AnyMessage,
    Cancel,
    DecodeGranted,
    DecodeTarget,
    Goodbye,
    GrantPassed,
    LoadReport,
    ReturnGrant,
    Tokens,
)
from router.members import MemberTable, Peer
from tests.fakes.scripted_flow import grant
from tests.fakes.waiting import until


class Listener:
    def __init__(self):
        self.lost: list[str] = []

    def on_joined(self, peer):
        pass

    def on_listed(self, peer):
        pass

    def on_message(self, peer, message):
        pass

    def on_lost(self, peer):
        self.lost.append(peer.member.replica_id)


class Workers:
    def __init__(self, directory):
        self._directory = directory
        self.connections: list[Connection] = []
        self.servers: list[Server] = []
        self.heard: list[tuple[str, AnyMessage]] = []  # by the worker of that name
        self.last_read: dict[str, str | None] = {}  # what the worker of that name says of this door

    async def start(self, name: str, process: str = "") -> Member:
        address = f"unix:{self._directory / name}"
        server = Server(
            address,
            process or name,
            self.connections.append,
            lambda _, message: self.heard.append((name, message)),
            last_read=lambda _: self.last_read.get(name),
        )
        await server.start()
        self.servers.append(server)
        return Member(replica_id=name, role=Role.DECODE, address=address, model="", layout="", num_blocks=8)


@pytest.fixture
async def workers(tmp_path):
    tmp_path.chmod(0o700)
    workers = Workers(tmp_path)
    yield workers
    for server in workers.servers:
        await server.aclose()


@pytest.fixture
def listener():
    return Listener()


@pytest.fixture
def read_by_door():
    """The callbacks that get what this door reads, in the order in which it dialled."""
    return []


@pytest.fixture
async def table(listener, read_by_door):
    async def dial(address, name, on_message, *args, **options):
        read_by_door.append(on_message)
        return await connect(address, name, on_message, *args, **options)

    table = MemberTable("door", listener, None, dial)
    yield table
    await table.aclose()
    await asyncio.sleep(0.01)
    assert not table.all_peers()


def only(table: MemberTable) -> Peer:
    (peer,) = table.all_peers()
    return peer


def peer_of(table: MemberTable, name: str) -> Peer:
    (peer,) = [peer for peer in table.all_peers() if peer.member.replica_id == name]
    return peer


async def test_a_listed_worker_becomes_a_candidate_and_its_load_is_known(table, workers):
    table.update(Role.DECODE, [await workers.start("d")])
    await until(lambda: table.has(Phase.DECODE))
    workers.connections[0].send(Tokens((), LoadReport(num_queued_units=7)))
    await until(lambda: only(table).loads[Role.DECODE].num_queued_units == 7)
    assert not table.has(Phase.PREFILL)


async def test_a_worker_that_is_not_up_yet_is_dialled_until_it_answers(table, workers):
    late = await workers.start("d")
    await workers.servers[0].aclose()
    table.update(Role.DECODE, [late])
    await asyncio.sleep(0.1)
    assert not table.has(Phase.DECODE)
    await workers.start("d")
    await until(lambda: table.has(Phase.DECODE))


async def test_a_draining_worker_is_kept_until_the_listener_closes_it(table, listener, workers):
    table.update(Role.DECODE, [await workers.start("d")])
    await until(lambda: table.has(Phase.DECODE))
    peer = only(table)
    table.update(Role.DECODE, [])
    assert not table.has(Phase.DECODE) and table.all_peers() == [peer]
    table.close("d")
    assert table.all_peers() == [] and listener.lost == ["d"]


async def test_a_cut_connection_is_told_and_dialled_again(table, listener, workers):
    table.update(Role.DECODE, [await workers.start("d")])
    await until(lambda: table.has(Phase.DECODE))
    old = only(table)
    workers.connections[0].abort()
    await until(lambda: listener.lost == ["d"])
    await until(lambda: table.has(Phase.DECODE))
    assert only(table) is not old


async def test_a_table_that_is_closed_dials_no_more(listener, workers):
    table = MemberTable("door", listener, None)
    late = await workers.start("d")
    await workers.servers[0].aclose()
    table.update(Role.DECODE, [late])
    await asyncio.sleep(0.01)
    await table.aclose()
    await workers.start("d")
    await asyncio.sleep(0.1)
    assert not workers.connections


async def test_a_worker_that_is_unlisted_while_it_is_dialled_is_no_candidate(table, workers):
    member = await workers.start("d")
    table.update(Role.DECODE, [member])
    await asyncio.sleep(0)  # the dial is under way
    table.update(Role.DECODE, [])
    await until(table.all_peers)
    assert not table.has(Phase.DECODE) and not any(peer.is_listed for peer in table.all_peers())


async def test_a_worker_that_greets_is_in_the_table_before_the_listener_hears_of_it(workers, tmp_path):
    """Its greeting is here before the dial has returned, and a request may be placed there at once."""
    greeted: list[tuple[str, bool]] = []

    class Sending(Listener):
        def on_joined(self, peer):
            greeted.append(("joined", only(table) is peer))
            table.send("d", Tokens(()))

        def on_message(self, peer, message):
            greeted.append(("told", only(table) is peer))

    table = MemberTable("door", Sending(), None)
    server = Server(f"unix:{tmp_path / 'd'}", "d", lambda c: c.send(Tokens(())), lambda *_: None)
    await server.start()
    workers.servers.append(server)
    table.update(
        Role.DECODE,
        [Member(replica_id="d", role=Role.DECODE, address=server.address, model="", layout="", num_blocks=8)],
    )
    await until(lambda: len(greeted) == 2)
    await table.aclose()
    assert greeted == [("joined", True), ("told", True)]


async def test_a_worker_that_the_listener_stumbles_over_is_dialled_again(workers):
    class Stumbling(Listener):
        num_joined = 0

        def on_joined(self, peer):
            self.num_joined += 1
            if self.num_joined == 1:
                raise ValueError("a bug")

    listener = Stumbling()
    table = MemberTable("door", listener, None)
    table.update(Role.DECODE, [await workers.start("d")])
    await until(lambda: listener.num_joined == 2 and table.has(Phase.DECODE))
    assert listener.lost == ["d"]
    await table.aclose()


@pytest.fixture
async def pair(table, workers):
    """The owner of grants and their writer; the connection to the writer is the second one."""
    owner = await workers.start("owner")
    table.update(Role.DECODE, [owner])
    await until(lambda: len(table.all_peers()) == 1)
    table.update(Role.DECODE, [owner, await workers.start("writer")])
    await until(lambda: len(table.all_peers()) == 2)
    return table


async def redial(table: MemberTable, workers: Workers, connection: Connection) -> None:
    num_connections = len(workers.connections)
    connection.abort()
    await until(lambda: len(workers.connections) > num_connections and len(table.all_peers()) == 2)


async def test_of_a_grant_that_its_writer_never_read_the_owner_is_told(pair, workers):
    for lease_id in ("a", "b"):
        pair.send("writer", DecodeTarget("r", grant(lease_id)), "owner")
    pair.send("writer", Cancel("r"))
    await until(lambda: len(workers.heard) == 3)
    workers.last_read["writer"] = "DecodeTarget a"
    await redial(pair, workers, workers.connections[1])
    await until(lambda: workers.heard[3:])
    assert workers.heard[3:] == [("owner", ReturnGrant("b"))]


async def test_what_the_owner_never_read_about_its_grants_it_is_told_again(pair, workers):
    """Also what came up while it had no connection."""
    pair.send("owner", GrantPassed("a", ()))
    pair.send("owner", GrantPassed("b", ()))
    await until(lambda: len(workers.heard) == 2)
    workers.last_read["owner"] = "GrantPassed a"
    await workers.servers[0].aclose()
    await until(lambda: len(pair.all_peers()) == 1)
    pair.send("owner", ReturnGrant("c"))
    await workers.start("owner")
    await until(lambda: len(workers.heard) == 4)
    assert workers.heard[2:] == [("owner", GrantPassed("b", ())), ("owner", ReturnGrant("c"))]


async def test_what_a_worker_has_read_says_nothing_of_the_one_that_had_its_name(pair, workers):
    pair.send("writer", DecodeTarget("r", grant("a")), "owner")
    await until(lambda: workers.heard)
    await workers.servers[1].aclose()
    await until(lambda: len(pair.all_peers()) == 1)
    workers.last_read["writer"] = ""
    await workers.start("writer", "another process")
    await until(lambda: len(pair.all_peers()) == 2)
    pair.send("owner", Cancel("r"))
    await until(lambda: workers.heard[1:])
    assert workers.heard[1:] == [("owner", Cancel("r"))]


async def test_another_process_at_the_address_of_a_worker_is_not_taken_for_it(table, workers):
    """Owners would be told of processes that do not write (seed 501243). The list may come later."""
    member = await workers.start("d", "new process")
    table.update(Role.DECODE, [msgspec.structs.replace(member, process_name="old process")])
    await until(lambda: len(workers.connections) > 1)
    assert not table.all_peers()
    listed = msgspec.structs.replace(member, process_name="new process")
    table.update(Role.DECODE, [listed])
    await until(lambda: table.has(Phase.DECODE))
    assert only(table).member == listed


async def test_a_worker_is_told_which_of_its_grants_was_read_last(pair, workers):
    workers.connections[0].send(DecodeGranted("r", grant("a")))
    await until(lambda: peer_of(pair, "owner").log.last_read)
    await redial(pair, workers, workers.connections[0])
    said = [connection.peer_last_read for connection in workers.connections]
    assert said == [None, None, "DecodeGranted a"]


@pytest.mark.parametrize("is_door_ending", [False, True])
async def test_a_worker_is_told_what_was_read_before_its_connection_is_closed(
    pair, workers, read_by_door, is_door_ending
):
    """What is read behind that counts for nothing."""
    workers.connections[0].send(DecodeGranted("r", grant("a")))
    await until(lambda: peer_of(pair, "owner").log.last_read)
    peer = peer_of(pair, "owner")
    if is_door_ending:
        await pair.aclose()
    else:
        pair.close("owner")
        read_by_door[0](peer.connection, DecodeGranted("r", grant("b")))
    await until(lambda: workers.heard)
    assert ("owner", Goodbye("DecodeGranted a")) in workers.heard


async def test_a_grant_of_a_worker_that_has_left_the_table_may_still_come(pair, workers, read_by_door):
    """It was on its way when the connection was closed."""
    peer = peer_of(pair, "owner")
    pair.close("owner")
    writer = only(pair).member
    pair.update(Role.DECODE, [writer])
    read_by_door[0](peer.connection, DecodeGranted("r", grant("a")))
    pair.update(Role.DECODE, [writer, peer.member])
    await until(lambda: len(pair.all_peers()) == 2)
    assert workers.connections[-1].peer_last_read is None


async def test_a_worker_that_is_neither_listed_nor_connected_is_forgotten(pair, workers):
    owner, writer = (peer_of(pair, name).member for name in ("owner", "writer"))
    workers.connections[1].send(DecodeGranted("r", grant("a")))
    await until(lambda: peer_of(pair, "writer").log.last_read)
    pair.update(Role.DECODE, [owner])
    pair.update(Role.DECODE, [owner, writer])
    await redial(pair, workers, workers.connections[1])
    assert workers.connections[-1].peer_last_read == "DecodeGranted a", "it was connected"
    pair.update(Role.DECODE, [owner])
    pair.close("writer")
    pair.update(Role.DECODE, [owner])
    pair.update(Role.DECODE, [owner, writer])
    await until(lambda: len(pair.all_peers()) == 2)
    assert workers.connections[-1].peer_last_read is None
