"""What NIXL does to the process when it is imported, and what is kept from it."""

from __future__ import annotations

import logging
import logging.config
from logging.handlers import MemoryHandler

import pytest

from cluster.errors import ConfigError
from kv_transfer.agents import nixl_agent
from kv_transfer.agents.nixl_agent import keeping_log_handlers, load_nixl


def test_handlers_survive_a_library_that_configures_logging():
    handler = MemoryHandler(1, target=logging.NullHandler())
    with keeping_log_handlers():
        logging.config.dictConfig({"version": 1})
        logging.raiseExceptions = False
    assert handler.target is not None and logging.raiseExceptions
    handler.close()


@pytest.mark.parametrize(
    ("cuda", "order"), [("13.0", "cu13 cu12"), ("12.8", "cu12 cu13"), (None, "cu12 cu13")]
)
def test_the_wheel_for_torchs_cuda_is_tried_first_and_all_are_named(monkeypatch, cuda, order):
    tried = []

    def none_installed(name):
        tried.append(name)
        raise ImportError("not installed")

    monkeypatch.setattr(nixl_agent.torch.version, "cuda", cuda)
    monkeypatch.setattr(nixl_agent.importlib, "import_module", none_installed)
    with pytest.raises(ConfigError, match="none can be imported") as error:
        load_nixl()
    first, second = (f"nixl_{name}" for name in order.split())
    assert tried == [f"{first}._api", f"{second}._api", "nixl._api"]
    assert f"{first}: not installed; {second}: not installed" in str(error.value)
