"""The side channel: typed messages between a door and its workers, over one persistent connection per pair.

* `frames` cuts a byte stream into messages.
* `address` names a socket.
* `handshake` authenticates the peer.
* `connection` is one end of a pair.
* `server` listens and dials.
* `sent_log` knows which messages a peer has not read, over all connections to it.

The package owns sockets and nothing else; it does not interpret messages.
"""

from cluster.rpc.address import new_address
from cluster.rpc.connection import Connection
from cluster.rpc.sent_log import SentLog, grant_name
from cluster.rpc.server import Server, connect

__all__ = ["Connection", "SentLog", "Server", "connect", "grant_name", "new_address"]
