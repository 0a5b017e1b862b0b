"""Who gets in over TCP, frame by frame: both sides prove that they know the secret, in this connection and no
other."""

from __future__ import annotations

import pytest

from cluster.errors import ConfigError
from cluster.rpc.frames import FrameBuffer, FrameError
from cluster.rpc.handshake import NONCE_BYTES, Handshake

ADDRESS = "tcp:10.0.0.1:4000"


def side(is_server: bool, secret: bytes = b"secret", address: str = ADDRESS) -> Handshake:
    name = "worker" if is_server else "door"
    return Handshake(name, is_server=is_server, address=address, secret=secret)


def cut(data: bytes) -> list[bytes]:
    return list(FrameBuffer().feed(data))


def challenge_of(server: Handshake) -> bytes:
    (nonce,) = cut(server.opening())
    return nonce


def answer_of(client: Handshake, challenge: bytes) -> bytes:
    (answer,) = cut(client.feed(challenge))
    return answer


def proof_of(server: Handshake, answer: bytes) -> bytes:
    (proof,) = cut(server.feed(answer))
    return proof


def test_two_sides_that_share_the_secret_greet_each_other():
    server, client = side(True), side(False)
    proof = proof_of(server, answer_of(client, challenge_of(server)))
    (hello,) = cut(client.feed(proof))
    (greeting,) = cut(server.feed(hello))
    client.feed(greeting)
    assert server.peer is not None and client.peer is not None
    assert (server.peer.name, client.peer.name) == ("door", "worker")


def test_a_server_refuses_a_client_without_the_secret():
    server, stranger = side(True), side(False, b"guess")
    with pytest.raises(ConfigError, match="secret"):
        server.feed(answer_of(stranger, challenge_of(server)))


def test_a_client_refuses_a_server_without_the_secret():
    server, client = side(True), side(False)
    answer_of(client, challenge_of(server))
    with pytest.raises(ConfigError, match="secret"):
        client.feed(b"\0" * NONCE_BYTES)
    assert client.peer is None


def test_an_answer_of_another_connection_is_refused():
    old, new, client = side(True), side(True), side(False)
    answer = answer_of(client, challenge_of(old))
    assert proof_of(old, answer)
    with pytest.raises(ConfigError, match="secret"):
        new.feed(answer)


def test_a_servers_proof_of_another_connection_is_refused():
    """The challenge is replayed with it, so only the client's own nonce tells the two connections apart."""
    server, first, second = side(True), side(False), side(False)
    challenge = challenge_of(server)
    proof = proof_of(server, answer_of(first, challenge))
    answer_of(second, challenge)
    with pytest.raises(ConfigError, match="secret"):
        second.feed(proof)


def test_a_clients_proof_sent_back_to_it_is_refused():
    client = side(False)
    answer = answer_of(client, b"\1" * NONCE_BYTES)
    with pytest.raises(ConfigError, match="secret"):
        client.feed(answer[NONCE_BYTES:])


def test_proofs_passed_on_by_a_host_in_between_are_refused():
    server, client = side(True), side(False, address="tcp:10.0.0.66:4000")
    with pytest.raises(ConfigError, match="secret"):
        server.feed(answer_of(client, challenge_of(server)))


def test_each_connection_has_nonces_of_its_own():
    assert challenge_of(side(True)) != challenge_of(side(True))
    challenge = challenge_of(side(True))
    first, second = (answer_of(side(False), challenge)[:NONCE_BYTES] for _ in range(2))
    assert first != second


@pytest.mark.parametrize(
    "num_bytes", [0, NONCE_BYTES - 1, NONCE_BYTES, 2 * NONCE_BYTES - 1, 2 * NONCE_BYTES + 1]
)
def test_an_answer_of_another_length_is_refused(num_bytes):
    server, client = side(True), side(False)
    answer = answer_of(client, challenge_of(server))
    with pytest.raises(ConfigError, match="secret"):
        server.feed((answer + b"\0")[:num_bytes])


def test_a_challenge_of_another_length_is_refused():
    with pytest.raises(FrameError, match="malformed"):
        side(False).feed(b"\0" * (NONCE_BYTES - 1))


def test_a_hello_before_the_proof_is_refused():
    server = side(True)
    (hello,) = cut(Handshake("door", is_server=False, address="unix:/s", secret=None).opening())
    with pytest.raises(ConfigError, match="secret"):
        server.feed(hello)
    assert server.peer is None
