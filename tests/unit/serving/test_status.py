"""Serve's account of a start as lines, and the one line of a failure."""

from __future__ import annotations

import pytest

from deploy.serving.status import (
    ClusterFailed,
    StartProgress,
    are_running,
    own_message,
    read_status,
    write_status,
)

TRACEBACK = """A replica failed to start with exception. Retrying 2 more time(s). Error:
\x1b[36mray::ServeReplica:epdg:Prefill.initialize_and_get_metadata()\x1b[39m (pid=9, ip=192.0.2.2)
  File "ray/serve/_private/replica.py", line 1, in initialize_and_get_metadata
    raise RuntimeError(traceback.format_exc()) from None
RuntimeError: Traceback (most recent call last):
  File "deploy/serving/replicas.py", line 58, in __init__
    self._service = load(service)(local, replica_id)
cluster.errors.ConfigError: this worker needs more memory than there is:
  weights                 9.7 MiB  (loaded)
  available              20.0 MiB
"""


def deployment(state: str, *, status: str = "UPDATING", message: str = "", target: int = 1, count: int = 1):
    replicas = [{"state": state, "start_time_s": 10.0}] * count
    return {"status": status, "message": message, "target_num_replicas": target, "replicas": replicas}


def application(**deployments: dict) -> dict:
    return {"epdg": {"status": "DEPLOYING", "message": "", "deployments": deployments}}


def test_each_pool_is_said_to_load_and_to_be_ready_once():
    progress = StartProgress()
    assert progress.update({}, 9.0) == []
    assert progress.update(application(Encode=deployment("STARTING")), 11.0) == ["encode: loading …"]
    assert progress.update(application(Encode=deployment("STARTING")), 12.0) == []
    assert progress.update(application(Encode=deployment("RUNNING")), 17.1) == ["encode: ready in 7.1 s"]
    assert progress.update(application(Encode=deployment("RUNNING")), 18.0) == []


def test_a_pool_is_ready_when_all_its_replicas_run():
    progress = StartProgress()
    assert progress.update(application(Decode=deployment("RUNNING", target=2)), 11.0) == ["decode: loading …"]
    both = application(Decode=deployment("RUNNING", target=2, count=2))
    assert progress.update(both, 12.0) == ["decode: ready in 2.0 s"]


def test_the_first_failure_of_a_replica_ends_the_start_in_one_line():
    with pytest.raises(ClusterFailed) as error:
        StartProgress().update(application(Prefill=deployment("STARTING", message=TRACEBACK)), 11.0)
    assert str(error.value) == (
        "prefill: this worker needs more memory than there is: weights 9.7 MiB (loaded); available 20.0 MiB"
    )


def test_an_application_that_cannot_be_built_ends_the_start():
    failed = {
        "epdg": {"status": "DEPLOY_FAILED", "message": "…\nValueError: no such thing", "deployments": {}}
    }
    with pytest.raises(ClusterFailed, match=r"^ValueError: no such thing$"):
        StartProgress().update(failed, 11.0)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no reason given; see the logs"),
        ("all is lost\n", "all is lost"),
        ("ValueError: a\nthen\nray.exceptions.ActorDiedError: gone\n", "ActorDiedError: gone"),
        ("Traceback:\n  File x\nKeyError", "KeyError"),
    ],
)
def test_the_last_error_of_a_text_is_its_message(text, line):
    assert own_message(text) == line


def test_running_means_every_application_runs():
    assert not are_running({})
    assert are_running({"a": {"status": "RUNNING"}})
    assert not are_running({"a": {"status": "RUNNING"}, "b": {"status": "DEPLOYING"}})


def test_a_status_that_is_written_is_read_and_none_is_empty(tmp_path):
    assert read_status(tmp_path) == {}
    write_status(tmp_path, {"epdg": {"status": "RUNNING"}})
    assert read_status(tmp_path) == {"epdg": {"status": "RUNNING"}}
