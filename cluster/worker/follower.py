"""A process of rank 1 or higher: its share of the model repeats the calls of rank 0, its transfer engine the
transfers of rank 0.

`python -m cluster.worker.follower CALLS TRANSFERS ADAPTERS`, inherited pipes; started by
cluster/worker/ranks.py.
It has no sockets and no queue of its own, and decides nothing. It ends when its pipes end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from multiprocessing.connection import Connection

import torch

from cluster.clock import SystemClock
from cluster.model.parallel import ForwardProgress, follow, join_group
from cluster.worker.adapter_loading import AdapterLoader, follow_loads
from cluster.worker.language import load_language
from cluster.worker.ranks import RankSpec, failure_of
from cluster.worker.setup import set_up
from kv_transfer.agents.factory import make_agent
from kv_transfer.lease.rank_follower import RankFollower, RankReady
from kv_transfer.lease.transfer_engine import TransferEngine

logger = logging.getLogger(__name__)


def main(*pipes: int) -> None:
    calls, transfers, adapters = map(Connection, pipes)
    spec: RankSpec = transfers.recv()
    progress = ForwardProgress()
    rank_follower = RankFollower(transfers, progress.has)
    threading.Thread(target=_follow_transfers, args=(rank_follower,), name="transfers", daemon=True).start()
    try:
        _run(spec, rank_follower, progress, calls, adapters)
    except BaseException as error:  # the process's edge: rank 0 raises it, if it is the first one
        failure = failure_of(spec.rank, error)
        logger.exception("rank %d fails", spec.rank)
        rank_follower.report(failure)
        os._exit(1)
    os._exit(0)  # an orderly end would wait in NCCL for the graphs that contain its collectives


def _run(
    spec: RankSpec, rank_follower: RankFollower, progress: ForwardProgress, calls: Connection,
    adapters: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(spec.num_threads)
    args = spec.args
    setup = set_up(args, f"{spec.replica_id}-{spec.rank}", host=spec.host)
    group = join_group(spec.rank, args.tensor_parallel_size, spec.meeting, setup.device.type)
    language = load_language(args, setup, spec.role, spec.sizes, group)
    sends, receives = spec.role.prefills, spec.role.decodes
    transfer_engine = TransferEngine(
        make_agent(setup.transport, setup.replica_id, setup.host, setup.net_devices),
        SystemClock(),
        rank_follower.on_event,
        margin_s=spec.lease_margin_s,
        model=language.model.fingerprint,
        outgoing=language.kv if sends else None,
        outgoing_wire=language.wire if sends else None,
        incoming=language.kv if receives else None,
        incoming_wire=language.wire if receives else None,
    )
    rank_follower.attach(transfer_engine)
    transfer_engine.start()
    rank_follower.report(RankReady(spec.rank))
    setup.late_memory.populate(language.memories)
    model = language.model
    load = AdapterLoader(args, model)
    threading.Thread(target=follow_loads, args=(adapters, load), name="adapters", daemon=True).start()
    follow(language.steps, language.kv, group, calls, progress, model.dtype, model.feature_width)
    transfer_engine.close()


def _follow_transfers(rank_follower: RankFollower) -> None:
    try:
        rank_follower.run()
    except Exception:  # the process's edge: the log has the error, and rank 0 reports the lost rank
        logger.exception("a transfer order could not be followed")
    os._exit(1)  # rank 0 is gone or will be; the main thread may be inside a collective that never ends


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(*map(int, sys.argv[1:]))
