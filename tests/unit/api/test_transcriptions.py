"""/v1/audio/transcriptions through the real openai client, and its forms by themselves."""

from __future__ import annotations

import asyncio
import base64

import msgspec
import openai
import pytest

from cluster.errors import RequestError, UnavailableError, UnsupportedError
from cluster.types.media import Modality
from router.http.forms import MAX_PARTS, parse_form
from tests.fakes.fake_door import FakeDoor
from tests.unit.api.test_app import call, error_of
from tests.unit.api.test_client import HANG_S, expect_soon, run

SOUND = bytes(range(256)) * 40 + b"\r\n--boundary\r\n"  # any bytes, and what looks like a boundary
FORM = "multipart/form-data; boundary=xyz"


def ask(api: openai.AsyncOpenAI, **fields):
    return api.audio.transcriptions.create(**{"model": "org/demo", "file": ("a.wav", SOUND), **fields})


def post(door: FakeDoor, fields: dict, files: dict | None = None):
    files = {"file": ("a.wav", SOUND)} if files is None else files
    return call(door, "POST", "/v1/audio/transcriptions", data={"model": "org/demo", **fields}, files=files)


def test_a_sound_becomes_a_chat_request_with_the_instruction(door):
    async def scenario(api):
        answer = await ask(api, language="en", prompt="Shapes.", temperature=0.5)
        assert answer.text == "Hello wörld"
        usage = answer.usage
        assert (usage.type, usage.input_tokens, usage.output_tokens, usage.total_tokens) == (
            "tokens",
            7,
            4,
            11,
        )
        assert (usage.input_token_details.audio_tokens, usage.input_token_details.text_tokens) == (5, 2)
        (asked,) = door.calls
        ((place, text),) = [message.content for message in asked.messages]
        assert place.modality is Modality.AUDIO
        assert text.text == "Write it down.\nLanguage: en\nContext: Shapes."
        (source,) = asked.media
        assert base64.b64decode(source.url.partition("base64,")[2]) == SOUND
        assert source.param == "file" and asked.sampling[0].temperature == 0.5

    run(door, scenario)


def test_without_options_it_is_greedy_and_says_the_instruction_alone(door):
    assert post(door, {}).json()["finish_reason"] == "stop"
    (asked,) = door.calls
    assert asked.messages[0].content[1].text == "Write it down." and asked.sampling[0].temperature == 0


def test_one_segment_spans_the_sound(door):
    async def scenario(api):
        answer = await ask(
            api, response_format="verbose_json", timestamp_granularities=["segment"], language="en"
        )
        assert (answer.duration, answer.language, answer.text) == (2.5, "en", "Hello wörld")
        (segment,) = answer.segments
        assert (segment.start, segment.end, segment.text) == (0, 2.5, "Hello wörld")
        assert segment.avg_logprob == -0.5 and segment.tokens == [0, 1, 2, 3]
        assert answer.usage.type == "duration" and answer.usage.seconds == 2.5

    run(door, scenario)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("text", "Hello wörld\n"),
        ("srt", "1\n00:00:00,000 --> 00:00:02,500\nHello wörld\n\n"),
        ("vtt", "WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello wörld\n\n"),
    ],
)
def test_other_forms_are_plain_text(door, form, expected):
    async def scenario(api):
        assert await ask(api, response_format=form) == expected

    run(door, scenario)


def test_a_stream_ends_with_the_whole_transcript(door):
    async def scenario(api):
        events = [event async for event in await ask(api, stream=True)]
        assert [event.type for event in events] == [*["transcript.text.delta"] * 3, "transcript.text.done"]
        assert "".join(event.delta for event in events[:-1]) == events[-1].text == "Hello wörld"
        assert events[-1].usage.input_token_details.audio_tokens == 5

    run(door, scenario)


def test_an_error_in_mid_stream_ends_it(door):
    door.error, door.fail_at = UnavailableError("decode lost"), 2

    async def scenario(api):
        with pytest.raises(openai.APIError, match="decode lost"):
            async for _ in await ask(api, stream=True):
                pass

    run(door, scenario)


@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")  # of the client, not of the endpoint
def test_a_translation_has_an_instruction_of_its_own(door):
    fields = {"model": "org/demo", "file": ("a.wav", SOUND)}

    async def scenario(api):
        translations = api.audio.translations
        assert (await translations.create(**fields, prompt="Shapes.")).text == "Hello wörld"
        answer = await translations.create(**fields, response_format="verbose_json")
        assert (answer.duration, answer.language, answer.segments[0].text) == (2.5, "english", "Hello wörld")
        assert answer.model_extra["task"] == "translate"
        assert await translations.create(**fields, response_format="text") == "Hello wörld\n"
        prompts = [asked.messages[0].content[1].text for asked in door.calls]
        assert prompts == ["Write it down in English.\nContext: Shapes."] + 2 * ["Write it down in English."]

    run(door, scenario)


def test_only_a_door_with_an_instruction_translates(door):
    path, fields = "/v1/audio/translations", {"model": "org/demo", "language": "de", "stream": "true"}
    asked = {"data": fields, "files": {"file": ("a.wav", SOUND)}}
    assert b"transcript.text.done" in call(door, "POST", path, **asked).content
    assert door.calls[0].messages[0].content[1].text == "Write it down in English.\nLanguage: de"
    assert path in call(door, "GET", "/openapi.json").json()["paths"]
    door.translation_instruction = ""
    assert path not in call(door, "GET", "/openapi.json").json()["paths"]
    refused = call(door, "POST", path, **asked)
    assert refused.status_code == 404 and error_of(refused)["code"] == "unsupported_endpoint"
    assert "door.translation_instruction" in error_of(refused)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_call(door, stream):
    door.start_pause_s = HANG_S

    async def scenario(api):
        asking = asyncio.ensure_future(ask(api, stream=stream))
        await expect_soon(lambda: door.calls)
        asking.cancel()
        await expect_soon(lambda: door.was_cancelled)

    run(door, scenario)


def test_a_model_that_takes_no_sound_refuses_the_file(door):
    door.error, door.fail_at = UnsupportedError("this model takes no audio input", param="messages"), None
    response = post(door, {})
    assert response.status_code == 400 and error_of(response)["param"] == "file"


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"language": "klingon language"}, None, "language"),
        ({"temperature": "hot"}, None, "temperature"),
        ({"temperature": "2"}, None, "temperature"),
        ({"response_format": "diarized_json"}, None, "response_format"),
        ({"response_format": "srt", "stream": "true"}, None, "response_format"),
        ({"timestamp_granularities[]": "segment"}, None, "timestamp_granularities"),
        (
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            None,
            "timestamp_granularities[0]",
        ),
        ({"include[]": "logprobs"}, None, "include"),
        ({"chunking_strategy": '{"type":"server_vad"}'}, None, "chunking_strategy"),
        ({"prompt": "x" * 4096 * 33}, None, "prompt"),
        ({"promt": "x"}, None, "promt"),
        ({"model": "other"}, None, "model"),
        ({}, {"sound": ("a.wav", SOUND)}, "sound"),
        ({}, {"file": ("a.wav", b"")}, "file"),
    ],
)
def test_a_wrong_field_is_named(door, fields, files, param):
    response = post(door, fields, files)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param and not door.calls


def test_a_body_that_is_no_form_is_refused(door):
    response = call(door, "POST", "/v1/audio/transcriptions", json={"model": "org/demo"})
    assert response.status_code == 415 and error_of(response)["code"] == "unsupported_media_type"


def test_a_form_is_held_to_the_limits_of_bodies(door):
    response = post(door, {}, {"file": ("a.wav", bytes(5 << 20))})
    assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"
    # more commas than a JSON body may have, in a file
    assert post(door, {}, {"file": ("a.wav", b"," * (1 << 20))}).status_code == 200


def test_a_file_is_charged_as_base64(door):
    """A tenant may hold half of the budget: a body of this size, but not its base64."""
    size = len(SOUND) * 100
    door.limits = msgspec.structs.replace(FakeDoor.limits, held_body_bytes=int(2.4 * size))
    response = post(door, {}, {"file": ("a.wav", SOUND * 100)})
    assert response.status_code == 429 and not door.calls
    door.limits = msgspec.structs.replace(FakeDoor.limits, held_body_bytes=int(2.8 * size))
    assert post(door, {}, {"file": ("a.wav", SOUND * 100)}).status_code == 200


def part(*headers: str, data: bytes = b"1") -> bytes:
    return b"--xyz\r\n" + "\r\n".join(headers).encode() + b"\r\n\r\n" + data + b"\r\n"


NAMED = 'Content-Disposition: form-data; name="a"'


def test_a_form_is_read_as_clients_write_it():
    body = (
        b"preamble\r\n"
        + part('content-disposition: form-data; name="x[]"', data="ä".encode())
        + part('Content-Disposition: form-data; name="x[]"', data=b"--xy\r\n")
        + part(
            'Content-Disposition: form-data; name="f"; filename="ä.wav"',
            "Content-Type: audio/wav",
            data=SOUND,
        )
        + part("Content-Disposition: form-data; name=g; filename*=utf-8''%C3%A4.mp3", data=b"")
        + b"--xyz--\r\nepilogue"
    )
    form = parse_form(body, 'Multipart/Form-Data; boundary="xyz"')
    assert form.fields == {"x": ["ä", "--xy\r\n"]}
    assert form.files == {"f": SOUND, "g": b""}


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", FORM),
        (part(NAMED), FORM),
        (part(NAMED)[:-4] + b"--xyz--", FORM),
        (part("Content-Type: text/plain") + b"--xyz--", FORM),
        (part(NAMED) * 2 + b"--xyz--", FORM),
        (part(NAMED + "; filename=b") * 2 + b"--xyz--", FORM),
        (part(NAMED, data=b"\xff") + b"--xyz--", FORM),
        (part(NAMED, "x: " + "y" * 5000) + b"--xyz--", FORM),
        (part(NAMED + '; x="' + ";" * 2500) + b"--xyz--", FORM),
        (part('Content-Disposition: form-data; name="a[]"') * (MAX_PARTS + 1) + b"--xyz--", FORM),
        (part(NAMED) + b"--xyz--", "multipart/form-data"),
        (part(NAMED) + b"--xyz--", "multipart/form-data; boundary=" + "x" * 71),
        (part(NAMED) + b"--xyz--", "multipart/mixed; boundary=xyz"),
        (part(NAMED) + b"--xyz--", FORM + '; x="' + ";" * 300),
    ],
)
def test_a_broken_form_is_refused(body, content_type):
    with pytest.raises(RequestError):
        parse_form(body, content_type)


CHARSETS = ("idna", "undefined", "punycode", "unicode_escape", "base64", "no-such", "x\0y", "")


@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize("value", ["%ff%00", "a..b", "x" * 64, "%5cx"])
def test_a_parameter_in_any_character_set_is_read_or_refused(charset, value):
    given = f"*={charset}''{value}"
    name, filename = f"Content-Disposition: form-data; name{given}", f"{NAMED}; filename{given}"
    for body, content_type in [
        (part(name), FORM),
        (part(filename), FORM),
        (part(NAMED), f"multipart/form-data; boundary{given}"),
    ]:
        try:
            form = parse_form(body + b"--xyz--", content_type)
        except RequestError as error:
            assert error.status == 400
        else:
            assert len(form.fields) + len(form.files) == 1


def test_no_cut_and_no_flipped_byte_of_a_form_breaks_the_parser():
    body = part(NAMED + "; filename*=utf-8''%C3", 'Content-Type: audio/wav; x="y', data=b"12") + b"--xyz--"
    num_refused = 0
    for at in range(len(body)):
        for broken in (body[:at], body[:at] + bytes((body[at] ^ 0xA5,)) + body[at + 1 :]):
            try:
                parse_form(broken, FORM)
            except RequestError:
                num_refused += 1
    assert num_refused >= len(body)  # at least every cut
