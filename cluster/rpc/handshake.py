"""Authenticates the peer, once per connection, before any message is delivered. Pure: bytes in, bytes out.

Order, with S the accepting side and C the dialling side:

    TCP only:  S → C  nonce_s
               C → S  nonce_c + proof of the client
               S → C  proof of the server
    always:    C → S  Hello,  S → C  Hello

Both sides prove that they know the cluster secret without sending it. A proof is HMAC-SHA256(secret, [LABEL,
side, address, nonce_s, nonce_c]):

* Each side draws one of the nonces for this connection, so a proof from another connection does not fit.
* The proof contains the side, so a peer cannot send a proof back to its author.
* The proof contains the address that the client dialled, so a host in between, which listens at another
  address, cannot relay it.

The handshake refuses strangers and members of other clusters. It does not encrypt or sign what follows: a
network on which others can read or alter packets needs a tunnel underneath. TLS here would not change that.
The KV cache and the embeddings travel beside the side channel, through transports with neither encryption nor
authentication, so the network between hosts must be private in any case (SECURITY.md). TLS would not be
smaller either: Python's ssl module has no pre-shared keys before 3.13, so every host would need a
certificate.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from enum import StrEnum

import msgspec

from cluster.errors import ConfigError, UnavailableError
from cluster.rpc.frames import FrameError, decode_message, encode_message, frame
from cluster.types.messages import PROTOCOL_VERSION, Hello

LABEL = "epdg side channel 2"  # changes with the content of the proof
NONCE_BYTES = 32
MAX_HANDSHAKE_FRAME_BYTES = 4096  # most that an unauthenticated peer can make this process keep

# `Hello.last_read` for the peer of this name. A client says it before it knows the name, and passes ""
LastRead = Callable[[str], str | None]


def nothing_read(peer_name: str) -> str | None:
    return None


class _Expect(StrEnum):
    NONCE = "the server's challenge"
    ANSWER = "the client's answer"
    PROOF = "the server's proof"
    HELLO = "Hello"
    NOTHING = "nothing"


class Handshake:
    """One side of the handshake. Feed frames until `peer` is set. Raises FrameError or ConfigError to refuse
    the peer."""

    def __init__(
        self,
        name: str,
        *,
        is_server: bool,
        address: str,
        secret: bytes | None,
        last_read: LastRead = nothing_read,
        wanted: str = "",
    ):
        """`address`: what the client dials; both sides must write it alike. `secret` None: a Unix socket,
        without proofs. `wanted`: the name of the only peer that is accepted; empty: any."""
        self.peer: Hello | None = None
        self._is_server = is_server
        self._address = address
        self._secret = secret
        self._nonce_s = secrets.token_bytes(NONCE_BYTES) if is_server and secret is not None else b""
        self._nonce_c = b""
        self._name = name
        self._last_read = last_read
        self._wanted = wanted
        if secret is None:
            self._expect = _Expect.HELLO
        else:
            self._expect = _Expect.ANSWER if is_server else _Expect.NONCE

    @property
    def waiting_for(self) -> str:
        return self._expect.value

    def opening(self) -> bytes:
        """Bytes to send when the socket is open."""
        if self._secret is None:
            return b"" if self._is_server else self._hello()
        return frame(self._nonce_s) if self._is_server else b""

    def feed(self, payload: bytes) -> bytes:
        """Takes one frame from the peer and returns bytes to send."""
        match self._expect:
            case _Expect.NONCE:
                return self._answer(payload)
            case _Expect.ANSWER:
                return self._check_answer(payload)
            case _Expect.PROOF:
                self._check(payload, "server")
                self._expect = _Expect.HELLO
                return self._hello()
            case _Expect.HELLO:
                return self._take_hello(payload)
        raise FrameError("a frame after the handshake")

    def _answer(self, payload: bytes) -> bytes:
        if len(payload) != NONCE_BYTES:
            raise FrameError("the peer's challenge is malformed")
        self._nonce_s, self._nonce_c = payload, secrets.token_bytes(NONCE_BYTES)
        self._expect = _Expect.PROOF
        return frame(self._nonce_c + self._digest("client"))

    def _check_answer(self, payload: bytes) -> bytes:
        self._nonce_c = payload[:NONCE_BYTES]
        self._check(payload[NONCE_BYTES:], "client")
        self._expect = _Expect.HELLO
        return frame(self._digest("server"))

    def _take_hello(self, payload: bytes) -> bytes:
        hello = decode_message(payload)
        if not isinstance(hello, Hello):
            raise FrameError(f"{type(hello).__name__} came before Hello")
        answer = self._hello(hello.name) if self._is_server else b""
        self._expect = _Expect.NOTHING
        self.peer = hello
        return answer

    def check_peer(self) -> None:
        """Raises ConfigError for another version, and UnavailableError for another process than the wanted
        one. Call it once `peer` is set and the last answer is sent, so that both sides can report the
        mismatch."""
        if self.peer is None:
            return
        if self.peer.protocol_version != PROTOCOL_VERSION:
            raise ConfigError(
                f"{self.peer.name} speaks side-channel protocol {self.peer.protocol_version}, this process "
                f"{PROTOCOL_VERSION}: run one version of epdg in the whole cluster"
            )
        if self._wanted not in ("", self.peer.name):
            raise UnavailableError(f"{self.peer.name} is at the address of {self._wanted}")

    def _hello(self, peer_name: str = "") -> bytes:
        return bytes(encode_message(Hello(PROTOCOL_VERSION, self._name, self._last_read(peer_name))))

    def _digest(self, side: str) -> bytes:
        assert self._secret is not None
        claim = msgspec.msgpack.encode((LABEL, side, self._address, self._nonce_s, self._nonce_c))
        return hmac.digest(self._secret, claim, "sha256")

    def _check(self, proof: bytes, side: str) -> None:
        if not hmac.compare_digest(proof, self._digest(side)):
            raise ConfigError(
                f"the peer at {self._address} does not know this cluster's secret (EPDG_CLUSTER_SECRET)"
            )
