"""What `epdg serve` says when it is ready, and the command that it names: `epdg ask`."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path

import pytest

from cluster.config.environment import read_environment
from cluster.config.settings import AccessArgs
from cluster.errors import OverloadedError
from cluster.types.media import Modality
from deploy.serving import command
from deploy.serving.welcome import DEFAULT_URL, EXAMPLES, welcome
from router.calls import ChatCall
from router.http.keys import Access
from tests.fakes.fake_door import FakeDoor
from tests.fakes.http_server import serving

FOLDER = Path("/tmp/epdg-x")


def asked(door: FakeDoor, *arguments: str) -> int:
    """The exit status of the command, run against a server with this door."""

    async def main() -> int:
        async with serving(door) as url:
            return await asyncio.to_thread(command.main, ["ask", *arguments, "--url", url])

    return asyncio.run(main())


def test_a_question_with_files_is_answered_on_standard_output(capsys):
    door = FakeDoor()
    files = [EXAMPLES / name for name in ("red_circle.png", "moving_right.mp4", "seven.wav")]
    assert asked(door, "What is this?", *map(str, files)) == 0
    assert capsys.readouterr().out == "Hello wörld\n"
    (call,) = door.calls
    assert isinstance(call, ChatCall)
    assert [source.modality for source in call.media] == ["image", "video", "audio"]


@pytest.mark.parametrize("fail_at", [None, 1])
def test_the_servers_words_are_the_error_also_in_the_middle_of_an_answer(capsys, fail_at):
    door = FakeDoor()
    door.error, door.fail_at = OverloadedError("too much to do"), fail_at
    assert asked(door, "hello") == 1
    assert capsys.readouterr().err == "error: too much to do\n"


def test_a_file_of_no_modality_and_a_server_that_is_not_there_are_named(capsys, tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    assert command.main(["ask", "What?", str(tmp_path / "notes.txt")]) == 1
    assert "notes.txt: neither an image" in capsys.readouterr().err
    assert command.main(["ask", "What?", "--url", "http://127.0.0.1:9"]) == 1
    assert "no answer from http://127.0.0.1:9" in capsys.readouterr().err


def commands_in(text: str) -> list[list[str]]:
    """The arguments of `epdg ask` in each."""
    lines = [shlex.split(line) for line in text.splitlines() if " ask " in line]
    return [words[words.index("ask") + 1 :] for words in lines]


def test_the_first_words_name_the_page_a_command_for_each_modality_and_the_logs(monkeypatch):
    monkeypatch.chdir(EXAMPLES)
    text = welcome("http://127.0.0.1:8001", FOLDER, 12.34, tuple(Modality))
    assert text.startswith("ready in 12.3 s: http://127.0.0.1:8001 ")
    for address in ("http://127.0.0.1:8001/\n", "http://127.0.0.1:8001/metrics\n", f"{FOLDER}/serve.log"):
        assert address in text
    files = [[word for word in words if Path(word).is_file()] for words in commands_in(text)]
    assert files == [[], ["red_circle.png"], ["moving_right.mp4"], ["seven.wav"]]
    assert all(words[-2:] == ["--url", "http://127.0.0.1:8001"] for words in commands_in(text))


def test_a_model_without_media_gets_no_files_and_the_usual_port_is_left_out():
    (words,) = commands_in(welcome(DEFAULT_URL, FOLDER, 1.0, ()))
    assert words == ["Count from 3 to 9."]


def test_the_key_of_the_environment_is_sent(capsys, monkeypatch):
    door = FakeDoor()
    door.access = Access.load(AccessArgs(), read_environment({"EPDG_API_KEY": "mine"}))
    monkeypatch.delenv("EPDG_API_KEY", raising=False)
    assert asked(door, "Hello?") == 1
    assert "no API key was sent" in capsys.readouterr().err
    monkeypatch.setenv("EPDG_API_KEY", "mine")
    assert asked(door, "Hello?") == 0
