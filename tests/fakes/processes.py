"""Child processes of tests: forked from a server that has loaded what takes seconds to load, so that a child
starts at once.

The server is started with the first child and ends with the test process. It has run no computation and
opened no transport, so a child inherits no thread pool without its threads. A child sees the environment that
the server was started with; `call_with` changes it before the child loads a transport, which may read it
then.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from multiprocessing.context import ForkServerContext
from typing import Any

LOADED = (
    "cluster.model.language",
    "kv_transfer.agents.collective_agent",
    "kv_transfer.lease.transfer_engine",
)


def fork_server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED))
    return context


def call_with(environment: dict[str, str], module: str, name: str, *arguments: Any) -> None:
    """In a child: a function of a module that is imported after the environment has changed."""
    os.environ.update(environment)
    getattr(importlib.import_module(module), name)(*arguments)
