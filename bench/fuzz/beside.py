"""A well-behaved client during the fuzz: streams one request after the other and records the gaps between its
tokens.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from bench.client import ChatRequest, Endpoint, ask, open_session

TIMEOUT_S = 120.0
REQUEST = ChatRequest([{"role": "user", "content": "hello"}], 64, "beside")


class Beside:
    """`gaps_s`: gaps by phase, of the streams that began and ended in that phase."""

    def __init__(self, url: str, model_id: str):
        self._endpoint = Endpoint(url, model_id, {})
        self.phase = ""
        self.gaps_s: dict[str, list[float]] = defaultdict(list)
        self.num_failed = 0

    async def run(self) -> None:
        """Runs until it is cancelled."""
        async with open_session(TIMEOUT_S) as session:
            while True:
                phase = self.phase
                answer = await ask(session, self._endpoint, REQUEST)
                if answer.failure or not answer.is_over:
                    self.num_failed += 1
                    await asyncio.sleep(1)
                elif phase == self.phase:
                    self.gaps_s[phase] += answer.gaps_s
