"""Where a side channel may listen: private folders, and TCP with a secret."""

from __future__ import annotations

import os
import stat

import pytest

from cluster.errors import ConfigError
from cluster.rpc import Server, new_address
from cluster.rpc.address import make_private
from tests.unit.rpc.two_ends import ignore


def test_tcp_without_a_secret_is_a_configuration_error():
    with pytest.raises(ConfigError, match="EPDG_CLUSTER_SECRET"):
        Server("tcp:127.0.0.1:0", "worker", ignore, ignore)


def test_a_directory_that_others_can_enter_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="0700"):
        make_private(tmp_path)


def test_a_directory_that_is_made_is_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        make_private(tmp_path / "sockets")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "sockets").stat().st_mode) == 0o700


def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="of this user"):
        make_private(tmp_path)


@pytest.mark.parametrize("target", ["private", "missing"])
def test_a_link_in_place_of_the_directory_is_refused(tmp_path, target):
    make_private(tmp_path / "private")
    (tmp_path / "link").symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="must be a directory"):
        make_private(tmp_path / "link")


def test_a_file_in_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "file").touch(mode=0o600)
    with pytest.raises(ConfigError, match="must be a directory"):
        make_private(tmp_path / "file")


async def test_a_path_too_long_for_a_socket_is_refused(tmp_path):
    address = new_address("unix", name="x" * 120, directory=tmp_path, host="")
    with pytest.raises(ConfigError, match="EPDG_SOCKET_DIR"):
        await Server(address, "worker", ignore, ignore).start()
