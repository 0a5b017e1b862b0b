"""/tokenize, /detokenize and /version."""

from __future__ import annotations

import importlib.metadata

import pytest

from cluster.errors import MediaError
from router.calls import ChatCall, TokenizeCall
from tests.unit.api.test_app import call, error_of

MESSAGES = [{"role": "user", "content": "hi"}]


def tokenize(door, **fields):
    return call(door, "POST", "/tokenize", json={"model": "org/demo", **fields})


def detokenize(door, **fields):
    return call(door, "POST", "/detokenize", json={"model": "org/demo", **fields})


def test_a_text_is_told_with_its_count(door):
    answer = tokenize(door, prompt="a b")
    assert answer.json() == {
        "count": 2,
        "max_model_len": door.limits.max_model_len,
        "tokens": [1, 2],
        "token_strs": None,
    }
    assert door.calls == [TokenizeCall("a b", names=False, adds_special=True)]


def test_names_and_special_tokens_are_the_clients_choice(door):
    answer = tokenize(door, prompt="a b", add_special_tokens=False, return_token_strs=True)
    assert answer.json()["token_strs"] == ["a", "b"]
    assert door.calls == [TokenizeCall("a b", names=True, adds_special=False)]


def test_a_conversation_is_the_prompt_that_a_chat_request_would_have(door):
    assert tokenize(door, messages=MESSAGES).json()["count"] == 2
    call(door, "POST", "/v1/chat/completions", json={"model": "org/demo", "messages": MESSAGES})
    tokenized, chat = door.calls
    assert isinstance(tokenized.what, ChatCall) and isinstance(chat, ChatCall)
    assert tokenized.what.messages == chat.messages


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": MESSAGES}, "prompt"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "promt": "b"}, "promt"),
        ({"prompt": 7}, "prompt"),
    ],
)
def test_what_cannot_be_tokenized_is_refused(door, fields, param):
    answer = tokenize(door, **fields)
    assert answer.status_code == 400 and error_of(answer)["param"] == param
    assert door.calls == []


@pytest.mark.parametrize("tokens", [[-1], [1 << 40], "1", [1.5], None])
def test_tokens_that_the_vocabulary_does_not_have_are_refused(door, tokens):
    answer = detokenize(door, tokens=tokens)
    assert answer.status_code == 400 and error_of(answer)["param"].startswith("tokens")


def test_more_than_a_prompt_can_have_is_refused(door):
    answer = tokenize(door, prompt="a" * (door.limits.max_text_chars + 1))
    assert answer.status_code == 400 and error_of(answer)["code"] == "context_length_exceeded"
    limit = door.limits.max_model_len
    assert detokenize(door, tokens=[1] * limit).status_code == 200
    answer = detokenize(door, tokens=[1] * (limit + 1))
    assert answer.status_code == 400 and error_of(answer)["code"] == "context_length_exceeded"


def test_tokens_become_text(door):
    assert detokenize(door, tokens=[3, 4]).json() == {"prompt": "3 4"}
    assert detokenize(door, tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_an_unknown_model_is_not_found(door, path):
    fields = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    answer = call(door, "POST", path, json={"model": "other", **fields})
    assert answer.status_code == 404 and error_of(answer)["code"] == "model_not_found"


def test_media_that_cannot_be_read_are_the_clients_error(door):
    door.error = MediaError("cannot be decoded", param="messages")
    answer = tokenize(door, messages=MESSAGES)
    assert answer.status_code == 400 and error_of(answer)["param"] == "messages"


def test_the_version_is_that_of_the_package(door):
    version = call(door, "GET", "/version").json()["version"]
    assert version and version[0].isdigit()


def test_a_checkout_that_is_not_installed_has_a_version_too(door, monkeypatch):
    def distribution(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    assert call(door, "GET", "/version").json() == {"version": "0+unknown"}
