"""Serve's health checks: the first is answered at once, the others stay open."""

from __future__ import annotations

import asyncio

from deploy.serving.held_check import HeldCheck

FOREVER_S = 3600.0


async def test_only_the_first_check_is_answered_at_once():
    check = HeldCheck(FOREVER_S)
    await check.hold()
    later = asyncio.create_task(check.hold())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not later.done()
    later.cancel()
