"""One worker process that generates answers. It keeps one Serve call per request open.

`run` is the Serve call. It returns when the request has left the engine, for whatever reason, so that Serve's
drain, limits and load include every generation. It may arrive before or after the request itself, which comes
by the side channel.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from cluster.config.settings import ClusterArgs
from cluster.engine.worker import LanguageWorker
from cluster.errors import UnavailableError
from cluster.types.members import Role
from cluster.types.messages import AnyMessage, StartDecode
from cluster.worker.outbox import DoorId
from cluster.worker.process import LEASE_MARGIN_S
from cluster.worker.setup import WorkerSetup

MAX_REMEMBERED_ENDS = 100_000  # request ids that have ended, for Serve calls that arrive late
START_TIMEOUT_S = 30.0  # between a Serve call and its request; normally milliseconds


class DecodeService(LanguageWorker):
    role = Role.DECODE

    def __init__(self, args: ClusterArgs, setup: WorkerSetup, *, lease_margin_s: float = LEASE_MARGIN_S):
        """Takes the arguments of `LanguageWorker`."""
        super().__init__(args, setup, lease_margin_s=lease_margin_s)
        self._runs: dict[str, asyncio.Future[None]] = {}
        self._started: set[str] = set()  # requests that have started and not ended
        self._ended: OrderedDict[str, None] = OrderedDict()

    async def run(self, request_id: str, start_timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when the request has ended here. Cancelling this call does not cancel the request; doors do
        that.

        Raises UnavailableError if the request itself does not come: its door's connection was cut
        meanwhile."""
        if request_id in self._ended:
            return
        loop = asyncio.get_running_loop()
        run = self._runs.setdefault(request_id, loop.create_future())
        check = loop.call_later(start_timeout_s, self._check_started, request_id)
        try:
            await asyncio.shield(run)
        finally:
            check.cancel()

    def _check_started(self, request_id: str) -> None:
        if request_id not in self._started and (run := self._runs.pop(request_id, None)) is not None:
            run.set_exception(UnavailableError("the request did not reach this worker"))

    def _on_message(self, door: DoorId, message: AnyMessage) -> None:
        if isinstance(message, StartDecode):
            self._started.add(message.request.request_id)
        super()._on_message(door, message)

    def _on_ended(self, request_id: str) -> None:
        self._process.shell.call_from_thread(self._finish_run, request_id)

    def _finish_run(self, request_id: str) -> None:
        self._started.discard(request_id)
        self._ended[request_id] = None
        if len(self._ended) > MAX_REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        run = self._runs.pop(request_id, None)
        if run is not None and not run.done():
            run.set_result(None)


class LanguageService(DecodeService):
    """A worker that generates answers and also computes prompts: any prompt, for itself or for other
    workers."""

    role = Role.LANGUAGE
