"""Names of requests, leases and processes, which more than one process knows. Unique per cluster, safe in
logs, not guessable."""

from __future__ import annotations

import secrets


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


def new_lease_id() -> str:
    return "lease-" + secrets.token_hex(8)


def new_process_name(name: str) -> str:
    """`name`: of the door or the replica, which another process may have had."""
    return f"{name}-{secrets.token_hex(4)}"
