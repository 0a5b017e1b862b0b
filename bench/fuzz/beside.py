"""A well-behaved client during the fuzz: streams one request after the other and records the gaps between its
tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict

import httpx

ANSWER_TOKENS = 64


class Beside:
    """`gaps_s`: gaps by phase, of the streams that began and ended in that phase."""

    def __init__(self, url: str, model_id: str):
        self._url = url
        self._body = {
            "model": model_id,
            "messages": [{"role": "user", "content": "hello"}],
            "max_tokens": ANSWER_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        self.phase = ""
        self.gaps_s: dict[str, list[float]] = defaultdict(list)
        self.num_failed = 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with httpx.AsyncClient(base_url=self._url, timeout=120) as client:
            while True:
                phase = self.phase
                gaps_s = await self._stream(client)
                if phase == self.phase:
                    self.gaps_s[phase] += gaps_s

    async def _stream(self, client: httpx.AsyncClient) -> list[float]:
        gaps_s: list[float] = []
        last_at: float | None = None
        last_line = ""
        async with client.stream("POST", "/v1/chat/completions", json=self._body) as response:
            async for line in response.aiter_lines():
                if not line:
                    continue
                now = time.monotonic()
                if '"content":"' in line and last_at is not None:
                    gaps_s.append(now - last_at)
                last_at, last_line = now, line
        if last_line != "data: [DONE]":
            self.num_failed += 1
            await asyncio.sleep(1)
        return gaps_s
