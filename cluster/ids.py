"""Names for things that live in more than one process. Unique per cluster, safe in logs, never guessable."""

from __future__ import annotations

import secrets

RequestId = str  # one generated choice; `n` choices of one HTTP request are n requests
LeaseId = str
ReplicaId = str  # Serve's unique id of one incarnation of one replica


def new_request_id() -> RequestId:
    return "req-" + secrets.token_hex(12)


def new_lease_id() -> LeaseId:
    return "lease-" + secrets.token_hex(8)
