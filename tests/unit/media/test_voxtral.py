"""Voxtral's prompts, which the product makes without mistral-common, are those that mistral-common makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import transformers as hf

from cluster.errors import RequestError
from cluster.media.processor import MediaProcessor
from cluster.media.torchvision_compat import ensure_torchvision
from cluster.text.chat import ChatMedia, ChatMessage, ChatOptions, ChatText, LaidOutMedia, ToolCall
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import MediaProbe, Modality
from tests.flow.voxtral_folder import AUDIO, NUM_SPECIAL, write_preprocessor, write_tekken

# `messages`, `tools` and the ids that mistral-common 1.13.1 makes of them on the vocabulary of `write_tekken`
# (`encode_chat_completion`, sounds as WAV); [id, count] stands for a run.
PROMPTS = json.loads((Path(__file__).parent / "voxtral_prompts.json").read_text())


class Voxtral:
    def __init__(self, folder: Path):
        media = MediaProcessor.load(folder)
        assert media is not None
        self.media = media
        self.text = TextProcessor.load(folder, media.transformers_processor)

    def token_ids(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        sounds = [
            part["num_samples"]
            for message in messages
            if isinstance(message["content"], list)
            for part in message["content"]
            if part["type"] == "audio"
        ]
        media = [
            LaidOutMedia(self.media.layout(MediaProbe(Modality.AUDIO, num_samples=count)), (str(i),))
            for i, count in enumerate(sounds)
        ]
        options = ChatOptions(tools=tuple(json.dumps(tool) for tool in tools))
        prompt = self.text.chat_prompt([chat_message(message) for message in messages], media, options)
        return list(prompt.token_ids)


def chat_message(message: dict[str, Any]) -> ChatMessage:
    content = message["content"]
    if isinstance(content, list):
        content = tuple(
            ChatText(part["text"]) if part["type"] == "text" else ChatMedia(Modality.AUDIO)
            for part in content
        )
    calls = tuple(
        ToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", ())
    )
    return ChatMessage(message["role"], content, calls, message.get("tool_call_id", ""))


def written_out(token_ids: list[int | list[int]]) -> list[int]:
    return [
        token_id
        for entry in token_ids
        for token_id in ([entry[0]] * entry[1] if isinstance(entry, list) else [entry])
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    ensure_torchvision()
    folder = tmp_path_factory.mktemp("voxtral")
    write_tekken(folder, vocab_size=1088)
    write_preprocessor(folder, hf.WhisperFeatureExtractor(feature_size=128))
    hf.VoxtralConfig(audio_token_id=24).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def voxtral(folder) -> Voxtral:
    return Voxtral(folder)


@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_are_those_of_mistral_common(voxtral, case):
    assert voxtral.token_ids(case["messages"], case["tools"]) == written_out(case["token_ids"])


def test_a_folder_with_a_converted_tokenizer_gives_the_same_prompts(folder, tmp_path):
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, mistral_format=False)
    tokenizer.save_pretrained(tmp_path)
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    assert not (tmp_path / "tekken.json").exists()
    case = PROMPTS[1]
    assert Voxtral(tmp_path).token_ids(case["messages"], []) == written_out(case["token_ids"])


def test_a_template_of_the_folder_is_used(folder, tmp_path):
    for file in folder.iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    template = "{% for part in messages[0].content %}{{ part.text or '" + AUDIO + "' }}!{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    token_ids = Voxtral(tmp_path).token_ids(PROMPTS[1]["messages"], [])
    assert token_ids[0] == 25 and token_ids[1:376] == [24] * 375
    assert token_ids[376] == token_ids[-1] == NUM_SPECIAL + ord("!")


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        (("system", "user"), "in a conversation without a system message"),
        (("user", "user"), "messages of the user must not follow each other"),
    ],
)
def test_a_conversation_that_the_model_does_not_know_is_refused(voxtral, roles, reason):
    messages = [{"role": roles[0], "content": "a"}, {**PROMPTS[1]["messages"][0], "role": roles[1]}]
    with pytest.raises(RequestError, match=reason):
        voxtral.token_ids(messages, [])
