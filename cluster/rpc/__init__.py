"""The side channel: typed messages between a door and its workers, over one persistent connection per pair.

`frames` cuts a byte stream into messages, `address` names a socket, `handshake` decides whom to trust, `connection`
is one end of a pair, `server` accepts. Owns sockets and nothing else: what a message means is its receiver's business.
"""

from cluster.rpc.address import new_address
from cluster.rpc.connection import Connection
from cluster.rpc.server import Server, connect

__all__ = ["Connection", "Server", "connect", "new_address"]
