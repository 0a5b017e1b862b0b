"""What a tenant with limits has used of them at this door: requests and tokens a minute, requests at once.

A request begins (`TenantUse.begin`), may give its permit what counts its tokens (`Permit.watch`), and ends
with the permit. Tokens are counted when a request ends and when another one of the tenant begins, so no token
of a stream costs anything. Therefore a request that has begun always ends, and what it uses beyond the limit
makes the next ones wait. Pure but for the clock; belongs to the door's event loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

from cluster.clock import Clock
from cluster.config.keys import KeyLimits
from cluster.errors import OverloadedError

MINUTE_S = 60.0
RETRY_AFTER_S = 1.0  # when a request of the same tenant ends is not known
_ROUNDING = 1e-6  # of a unit


class RateLimitError(OverloadedError):
    code = "rate_limit_exceeded"


class Allowance:
    """Units that come evenly, `per_minute` of them, and are kept for a minute at most. May be overdrawn."""

    def __init__(self, per_minute: int, now: float):
        self.per_minute = per_minute
        self._num_units = float(per_minute)
        self._counted_at = now

    def wait_s(self, now: float) -> float:
        """Returns the time until there is a unit."""
        self.charge(0, now)
        missing = 1 - self._num_units
        return missing * MINUTE_S / self.per_minute if missing > _ROUNDING else 0.0

    def charge(self, num_units: int, now: float) -> None:
        come = (now - self._counted_at) * self.per_minute / MINUTE_S
        self._num_units = min(float(self.per_minute), self._num_units + come) - num_units
        self._counted_at = now


class TenantUse:
    def __init__(self, tenant: str, limits: KeyLimits, clock: Clock):
        self.tenant = tenant
        self._clock = clock
        self._limits = KeyLimits()
        self._requests: Allowance | None = None
        self._tokens: Allowance | None = None
        self._permits: set[Permit] = set()  # of requests in work
        self.change(limits)

    @property
    def counts_tokens(self) -> bool:
        return self._tokens is not None

    def change(self, limits: KeyLimits) -> None:
        """A limit that has changed begins with a full minute."""
        now = self._clock.now()
        if limits.requests_per_minute != self._limits.requests_per_minute:
            self._requests = _allowance(limits.requests_per_minute, now)
        if limits.tokens_per_minute != self._limits.tokens_per_minute:
            self._tokens = _allowance(limits.tokens_per_minute, now)
        self._limits = limits

    def begin(self) -> Permit:
        """Raises RateLimitError; then nothing has been charged."""
        now = self._clock.now()
        limit = self._limits.concurrent_requests
        if limit is not None and len(self._permits) >= limit:
            raise RateLimitError(
                f"the key '{self.tenant}' may have {limit} requests in work at once",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._tokens is not None:
            self._tokens.charge(sum(permit.take_tokens() for permit in self._permits), now)
        for allowance, unit in ((self._tokens, "tokens"), (self._requests, "requests")):
            if allowance is not None and (wait_s := allowance.wait_s(now)):
                raise RateLimitError(
                    f"the key '{self.tenant}' may use {allowance.per_minute} {unit} a minute; the next "
                    f"request is possible in {math.ceil(wait_s)} s",
                    retry_after_s=wait_s,
                )
        if self._requests is not None:
            self._requests.charge(1, now)
        permit = Permit(self.tenant, self)
        self._permits.add(permit)
        return permit

    def end(self, permit: Permit) -> None:
        self._permits.discard(permit)
        if self._tokens is not None:
            self._tokens.charge(permit.take_tokens(), self._clock.now())


class Permit(AbstractContextManager):
    """The right of one request to be answered; a context manager that ends with the request."""

    def __init__(self, tenant: str, use: TenantUse | None = None):
        """`use`: None if the request counts for no limit."""
        self.tenant = tenant
        self._use = use
        self._counts: list[Callable[[], int]] = []
        self._num_taken = 0

    def watch(self, count: Callable[[], int]) -> None:
        """`count`: the tokens so far of what the request generates."""
        if self._use is not None and self._use.counts_tokens:
            self._counts.append(count)

    def take_tokens(self) -> int:
        """Returns the number of tokens since the last call."""
        num_tokens = sum(count() for count in self._counts)
        num_new = num_tokens - self._num_taken
        self._num_taken = num_tokens
        return num_new

    def __exit__(self, *error: object) -> None:
        if self._use is not None:
            self._use.end(self)


def _allowance(per_minute: int | None, now: float) -> Allowance | None:
    return None if per_minute is None else Allowance(per_minute, now)
