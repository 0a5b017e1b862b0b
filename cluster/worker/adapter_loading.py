"""How a LoRA adapter comes into a slot of a worker's model while it computes steps: it is read, checked and
written on a thread of its own (`cluster/model/adapters.py`), and in a worker of several ranks by each of them
for itself, at once. A digest names the content, so all of them have the same.

Ranks above 0 have a pipe and a thread for it: `follow_loads`. Rank 0 orders, and waits for all of them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from cluster.config.adapters import folder_within, read_adapter
from cluster.config.settings import ClusterArgs
from cluster.errors import ConfigError, ErrorInfo, UnavailableError, from_info, to_info
from cluster.model.language import LanguageModel
from cluster.types.adapters import AdapterEntry

logger = logging.getLogger(__name__)

RANK_TIMEOUT_S = 120.0  # until a rank has read an adapter that is in the page cache
LoadAdapter = Callable[[AdapterEntry, int], None]  # into a slot. Blocks


class AdapterLoader:
    """Loads an adapter of a set into a slot of one rank's model. One thread at a time."""

    def __init__(self, args: ClusterArgs, model: LanguageModel):
        self._args, self._model = args, model

    def __call__(self, entry: AdapterEntry, slot: int) -> None:
        """Blocks. Raises ConfigError, also if the content is not what the entry's digest says."""
        args = self._args
        if entry.folder:
            folder = folder_within(args.adapters_folder, entry.folder)
        else:
            folder = Path(args.adapters[entry.name])
        adapter = read_adapter(entry.name, folder, args.max_lora_rank)
        if adapter.digest != entry.digest:
            raise ConfigError(f"adapter '{entry.name}': this worker finds other content in its folder")
        self._model.write_adapter(slot, self._model.read_adapter(adapter))


class RankedLoader:
    """Rank 0's: loads an adapter into a slot of all ranks. One thread at a time."""

    def __init__(self, own: LoadAdapter, others: Sequence[Connection], timeout_s: float = RANK_TIMEOUT_S):
        self._own, self._others, self._timeout_s = own, others, timeout_s
        self._numbers = itertools.count()

    def __call__(self, entry: AdapterEntry, slot: int) -> None:
        """Blocks. Raises the error of the first rank that could not."""
        order = _LoadOrder(next(self._numbers), slot, entry)
        try:
            for other in self._others:
                other.send_bytes(msgspec.msgpack.encode(order))
            self._own(entry, slot)
            deadline = time.monotonic() + self._timeout_s
            errors = [self._answer(other, order.number, deadline) for other in self._others]
        except OSError as error:  # or the end of a pipe
            raise UnavailableError("a rank of this worker is gone") from error
        for error in filter(None, errors):
            raise from_info(error)

    def _answer(self, other: Connection, number: int, deadline: float) -> ErrorInfo | None:
        while other.poll(max(0.0, deadline - time.monotonic())):
            answer = msgspec.msgpack.decode(other.recv_bytes(), type=_LoadAnswer)
            if answer.number == number:  # else that of an order that was given up
                return answer.error
        raise UnavailableError("a rank of this worker does not load the adapter in time")


def follow_loads(orders: Connection, load: LoadAdapter) -> None:
    """Loads what rank 0 orders, until the pipe ends. Blocks; for a thread of its own."""
    while True:
        try:
            order = msgspec.msgpack.decode(orders.recv_bytes(), type=_LoadOrder)
            error = None
            try:
                load(order.entry, order.slot)
            except Exception as raised:  # rank 0 tells it
                logger.exception("an adapter could not be loaded")
                error = to_info(raised)
            orders.send_bytes(msgspec.msgpack.encode(_LoadAnswer(order.number, error)))
        except (EOFError, OSError):
            return


class _LoadOrder(msgspec.Struct, frozen=True, array_like=True):
    number: int
    slot: int
    entry: AdapterEntry


class _LoadAnswer(msgspec.Struct, frozen=True, array_like=True):
    number: int  # of the order
    error: ErrorInfo | None
