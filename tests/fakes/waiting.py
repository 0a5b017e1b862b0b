"""Waiting for what other tasks bring about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Returns when the condition holds.

    Raises:
        TimeoutError: it did not within `timeout_s`.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
