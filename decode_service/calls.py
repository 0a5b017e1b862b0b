"""The Serve calls that stay open while their requests generate answers in this process.

`run` is the Serve call. It returns when the request has left the engine, for whatever reason, so that Serve's
drain, limits and load include every generation. It may arrive before or after the request itself, which comes
by the side channel.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from cluster.errors import UnavailableError

MAX_REMEMBERED_ENDS = 100_000  # request ids that have ended, for Serve calls that arrive late
START_TIMEOUT_S = 30.0  # between a Serve call and its request; normally milliseconds


class GenerationCalls:
    """Event loop only."""

    def __init__(self, start_timeout_s: float = START_TIMEOUT_S):
        self._start_timeout_s = start_timeout_s
        self._runs: dict[str, asyncio.Future[None]] = {}
        self._started: set[str] = set()  # requests that have started and not ended
        self._ended: OrderedDict[str, None] = OrderedDict()

    async def run(self, request_id: str) -> None:
        """Returns when the request has ended here. Cancelling this call does not cancel the request; doors do
        that.

        Raises UnavailableError if the request itself does not come: its door's connection was cut
        meanwhile."""
        if request_id in self._ended:
            return
        loop = asyncio.get_running_loop()
        run = self._runs.setdefault(request_id, loop.create_future())
        check = loop.call_later(self._start_timeout_s, self._check_started, request_id)
        try:
            await asyncio.shield(run)
        finally:
            check.cancel()

    def start(self, request_id: str) -> None:
        """The request has come."""
        self._started.add(request_id)

    def end(self, request_id: str) -> None:
        """The request has left the engine."""
        self._started.discard(request_id)
        self._ended[request_id] = None
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        run = self._runs.pop(request_id, None)
        if run is not None and not run.done():
            run.set_result(None)

    def _check_started(self, request_id: str) -> None:
        if request_id not in self._started and (run := self._runs.pop(request_id, None)) is not None:
            run.set_exception(UnavailableError("the request did not reach this worker"))
