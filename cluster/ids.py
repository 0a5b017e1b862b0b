"""Names of requests and leases, which live in more than one process. Unique per cluster, safe in logs, not
guessable."""

from __future__ import annotations

import secrets


def new_request_id() -> str:
    return "req-" + secrets.token_hex(12)


def new_lease_id() -> str:
    return "lease-" + secrets.token_hex(8)
