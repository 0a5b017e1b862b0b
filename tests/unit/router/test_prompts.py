"""From a call to a prompt: which items stand in it, how many of its tokens they may be, under which names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from bench.media_files import audio, image, video
from cluster.config.settings import MediaArgs
from cluster.errors import ContextLengthError, MediaError, RequestError
from cluster.media.sources import MediaSource
from cluster.text.chat import NO_OPTIONS, ChatMedia, ChatMessage, ChatOptions, ChatText, LaidOutMedia
from cluster.types.media import MediaOptions, Modality, PlacedMedia
from cluster.types.request import Prompt, SamplingParams
from router.calls import ChatCall, CompletionCall, GuidanceRules, MediaRules, StopRules
from router.prompts.builder import PreparedPrompt, PromptBuilder, items_of_earlier_turns, without_items
from router.prompts.media import MediaPlanner
from tests.unit.router.test_media import AS_NEEDED, FakeProcessor, contents_of

IMAGE, VIDEO, AUDIO = Modality.IMAGE, Modality.VIDEO, Modality.AUDIO
ROW = 7
BIG, OTHER = image(64, 64), image(63, 64)  # 256 and 225 rows
BAD = MediaError("item 0 (image): broken")


class FakeText:
    """A token for each letter and each row."""

    def chat_prompt(
        self,
        messages: Sequence[ChatMessage],
        media: Sequence[LaidOutMedia] = (),
        options: ChatOptions = NO_OPTIONS,
    ) -> Prompt:
        token_ids: list[int] = []
        placed: list[PlacedMedia] = []
        items = iter(media)
        for message in messages:
            parts = (ChatText(message.content),) if isinstance(message.content, str) else message.content
            for part in parts:
                if isinstance(part, ChatText):
                    token_ids += map(ord, part.text)
                    continue
                item = next(items)
                assert item.layout.modality is part.modality
                for (kind, geometry), name in zip(item.layout.parts, item.media_hashes, strict=True):
                    placed.append(PlacedMedia(kind, name, ((len(token_ids), geometry.num_tokens),), geometry))
                    token_ids += [ROW] * geometry.num_tokens
        assert next(items, None) is None
        return Prompt(tuple(token_ids), tuple(placed))

    def text_prompt(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def checked_prompt(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)


FAKE_TEXT: Any = FakeText()
FAKE_PROCESSOR: Any = FakeProcessor()


def builder(max_model_len: int = 1000, max_items: int = 4, max_tokens: int = 0, is_held=lambda _: False):
    planner = MediaPlanner(FAKE_PROCESSOR, is_held)
    return PromptBuilder(
        FAKE_TEXT, planner, MediaArgs(max_items=max_items, max_tokens=max_tokens), 16, max_model_len
    )


def user(*parts: str | Modality) -> ChatMessage:
    return ChatMessage(
        "user", tuple(ChatText(part) if type(part) is str else ChatMedia(Modality(part)) for part in parts)
    )


def call(
    *messages: ChatMessage, max_tokens: int | None = 10, rules: MediaRules = AS_NEEDED, **fields
) -> ChatCall:
    media = tuple(
        MediaSource(kind, "", options=MediaOptions()) for message in messages for kind in message.modalities()
    )
    return ChatCall(
        model="m",
        messages=messages,
        media=media,
        sampling=(SamplingParams(),),
        stop=StopRules(max_tokens, (), ()),
        media_rules=rules,
        **fields,
    )


def prepared(built: PromptBuilder, asked: ChatCall, *contents: bytes | MediaError, share: float = 1.0):
    return built.chat(asked, contents_of(asked.media, contents, asked.media_rules), share)


def completed(prompt: str | tuple[int, ...], **fields: Any) -> PreparedPrompt:
    stop = StopRules(10, (), ())
    asked = CompletionCall(model="m", sampling=(SamplingParams(),), stop=stop, prompts=(prompt,), **fields)
    return builder().completion(asked, prompt)


TALK = (
    ChatMessage("system", "be brief"),
    user("a", IMAGE, AUDIO),
    ChatMessage("assistant", "yes"),
    user(VIDEO),
    user(IMAGE, "b", IMAGE),
)


@pytest.mark.parametrize(
    ("left_out", "contents"),
    [
        ((), [("a", IMAGE, AUDIO), (VIDEO,), (IMAGE, "b", IMAGE)]),
        ((0, 3), [("a", AUDIO), (VIDEO,), ("b", IMAGE)]),
        ((1, 2), [("a", IMAGE), (), (IMAGE, "b", IMAGE)]),
        (range(5), [("a",), (), ("b",)]),
    ],
)
def test_items_are_taken_out_of_a_conversation_by_their_number(left_out, contents):
    kept = without_items(TALK, set(left_out))
    assert [kept[0], kept[2]] == [TALK[0], TALK[2]]
    assert [kept[1], *kept[3:]] == [user(*parts) for parts in contents]


def test_what_stands_before_the_last_answer_was_shown_before():
    assert items_of_earlier_turns(TALK) == {0, 1}
    assert items_of_earlier_turns((*TALK, ChatMessage("assistant", "no"), user(IMAGE))) == {0, 1, 2, 3, 4}
    assert items_of_earlier_turns((user(IMAGE),)) == set()
    assert items_of_earlier_turns((ChatMessage("assistant", "hello"), user(IMAGE))) == set()


def test_the_items_of_a_prompt_stand_in_its_order_and_know_whether_they_return():
    talk = (user(IMAGE), ChatMessage("assistant", "x"), user(AUDIO, "what"))
    got = prepared(builder(), call(*talk), BIG, audio(1.0, 16_000))
    assert [(item.modality, item.is_returning) for item in got.items] == [(IMAGE, True), (AUDIO, False)]
    assert [placed.media_hash for placed in got.prompt.media] == [item.media_hash for item in got.items]
    assert got.num_tokens == 256 + 1 + 10 + 4 and got.num_audio_tokens == 10


def test_an_item_that_is_shown_once_more_returns_in_both_places():
    talk = (user(IMAGE), ChatMessage("assistant", "x"), user(IMAGE, "again"))
    got = prepared(builder(), call(*talk), BIG, BIG)
    assert [item.is_returning for item in got.items] == [True, True]
    assert got.items[0].media_hash == got.items[1].media_hash


def test_rows_that_pooling_hides_are_refused_though_the_prompt_has_room():
    asked = call(user(IMAGE, "?"))
    media = msgspec.structs.replace(asked.media[0], options=MediaOptions(spatial_pooling=8))
    asked = msgspec.structs.replace(asked, media=(media,))
    planner = MediaPlanner(FAKE_PROCESSOR, lambda _: False)
    for most, is_accepted in ((256, True), (255, False)):
        caps = MediaArgs(max_items=4, max_picture_rows=most, max_rows=1000)
        built = PromptBuilder(FAKE_TEXT, planner, caps, 16, 1000)
        if is_accepted:
            (item,) = prepared(built, asked, BIG).items
            assert (item.geometry.num_tokens, item.num_call_rows) == (4, 256)
        else:
            with pytest.raises(MediaError, match="would compute 256 rows"):
                prepared(built, asked, BIG)


def test_too_many_items_are_refused_before_any_is_fetched():
    built = builder(max_items=2)
    built.check_count(call(user(IMAGE, IMAGE)))
    asked = call(user(IMAGE), user(AUDIO, VIDEO))
    media = tuple(
        msgspec.structs.replace(source, param=f"place {idx}") for idx, source in enumerate(asked.media)
    )
    with pytest.raises(RequestError, match="3 media items; at most 2") as refused:
        built.check_count(msgspec.structs.replace(asked, media=media))
    assert refused.value.param == "place 2", "of the first that is too many"


@pytest.mark.parametrize(
    ("rules", "operator", "room"),
    [
        (MediaRules(), 0, 400 - 5 - 10),
        (MediaRules(max_tokens=300), 0, 300),
        (MediaRules(max_tokens=300), 200, 200),
        (MediaRules(max_tokens=100), 200, 100),
        (MediaRules(max_tokens=1000), 0, 400 - 5 - 10),
    ],
)
def test_media_gets_what_context_client_and_operator_all_allow(rules, operator, room):
    built = builder(400, max_tokens=operator)
    got = prepared(built, call(user(IMAGE, IMAGE, "words"), rules=rules), BIG, OTHER)
    num_rows = got.num_tokens - 5
    assert 0.7 * room <= num_rows <= room
    assert [(note.item, note.reason) for note in got.media_notes] == [(0, "budget"), (1, "budget")]
    assert [note.num_tokens for note in got.media_notes] == [item.geometry.num_tokens for item in got.items]


def test_media_leaves_room_for_an_answer_of_unsaid_length_unless_it_must_not_be_touched():
    asked = user(IMAGE, "words")
    assert prepared(builder(400), call(asked, max_tokens=100), BIG).media_notes == []
    assert prepared(builder(360), call(asked, max_tokens=None), BIG).media_notes == []
    got = prepared(builder(300), call(asked, max_tokens=None), BIG)
    assert got.num_tokens <= 300 - 300 // 4 and len(got.media_notes) == 1
    exact = MediaRules(is_exact=True)
    assert prepared(builder(263), call(asked, max_tokens=None, rules=exact), BIG).num_tokens == 261
    with pytest.raises(ContextLengthError, match="have 256 tokens; there is room for 255"):
        prepared(builder(261), call(asked, max_tokens=None, rules=exact), BIG)


def test_words_that_are_too_long_by_themselves_are_refused():
    with pytest.raises(ContextLengthError, match="prompt has 50 tokens"):
        prepared(builder(50), call(user("x" * 50), max_tokens=None))
    with pytest.raises(ContextLengthError, match="room for 0"):
        prepared(builder(50), call(user("x" * 60, IMAGE), max_tokens=None), BIG)
    negative = GuidanceRules(2.0, (ChatMessage("user", "y" * 60),))
    with pytest.raises(ContextLengthError, match="prompt has 60 tokens"):
        prepared(builder(50), call(user("x"), guidance=negative))


def test_items_that_cannot_be_used_are_neither_in_the_prompt_nor_counted():
    rules = MediaRules(max_tokens=100, omits_bad=True)
    got = prepared(builder(), call(user(IMAGE, "a", IMAGE, "b"), rules=rules), BAD, BIG)
    assert [(note.item, note.reason) for note in got.media_notes] == [(0, "error"), (1, "budget")]
    assert len(got.items) == 1 and got.prompt.token_ids[0] == ord("a")
    text_only = prepared(builder(), call(user(IMAGE, "ab"), rules=rules), BAD)
    assert text_only.prompt.token_ids == tuple(map(ord, "ab")) and text_only.items == ()
    with pytest.raises(MediaError, match="broken"):
        prepared(builder(), call(user(IMAGE)), BAD)


def test_under_load_new_media_is_reduced_once_and_the_tighter_reason_is_told():
    asked = user(IMAGE, "a", IMAGE)
    got = prepared(builder(), call(asked), BIG, OTHER, share=0.5)
    assert [note.reason for note in got.media_notes] == ["load", "load"]
    assert 100 <= sum(note.num_tokens for note in got.media_notes) <= 241
    tight = prepared(builder(), call(asked, rules=MediaRules(max_tokens=60)), BIG, OTHER, share=0.5)
    assert [note.reason for note in tight.media_notes] == ["budget", "budget"]
    assert sum(note.num_tokens for note in tight.media_notes) == tight.num_tokens - 1 <= 60
    assert (
        prepared(builder(), call(asked, rules=MediaRules(is_exact=True)), BIG, OTHER, share=0.5).num_tokens
        == 482
    )
    assert prepared(builder(is_held=lambda _: True), call(asked), BIG, OTHER, share=0.25).num_tokens == 482


def test_names_of_items_and_of_blocks_differ_between_salts():
    asked = user(IMAGE, "a question of more than sixteen letters")
    plain, other, salted = (
        prepared(builder(), call(asked, cache_salt=salt), BIG) for salt in ("", "me/", "me/salt")
    )
    assert len({got.items[0].media_hash for got in (plain, other, salted)}) == 3
    assert len({got.block_hashes[0] for got in (plain, other, salted)}) == 3
    words = [completed("a question of more than sixteen letters", cache_salt=salt) for salt in ("", "s")]
    assert words[0].block_hashes[0] != words[1].block_hashes[0]


def test_a_companion_of_guidance_has_no_media_and_the_prompts_salt():
    negative = GuidanceRules(2.0, (ChatMessage("user", "nothing"),))
    got = prepared(
        builder(), call(user(VIDEO, "what"), guidance=negative, cache_salt="s"), video(8, 4, (64, 64))
    )
    assert got.guidance is not None
    assert got.guidance.negative_prompt == Prompt(tuple(map(ord, "nothing")), cache_salt="s")
    bare = completed((1, 2, 3), guidance=GuidanceRules(2.0, None))
    assert bare.guidance is not None and bare.guidance.negative_prompt.token_ids == (3,)
