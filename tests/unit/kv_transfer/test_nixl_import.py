"""What NIXL does to the process when it is imported, and what is kept from it."""

from __future__ import annotations

import logging
import logging.config
from logging.handlers import MemoryHandler

from kv_transfer.agents.nixl_agent import keeping_log_handlers


def test_handlers_survive_a_library_that_configures_logging():
    handler = MemoryHandler(1, target=logging.NullHandler())
    with keeping_log_handlers():
        logging.config.dictConfig({"version": 1})
        logging.raiseExceptions = False
    assert handler.target is not None and logging.raiseExceptions
    handler.close()
