"""Evaluation on wordings that training never saw: how people ask, what the model cannot answer, JSON and
tools."""

import random

from PIL import Image

from deploy.demo_model.training import calls, objects
from deploy.demo_model.training.claims import (
    UNKNOWN_COLOURS_HELD_OUT,
    UNKNOWN_SHAPES_HELD_OUT,
    Fact,
    draw_unknown_claim,
)
from deploy.demo_model.training.data import GREETING_ANSWER, WHO_ANSWER, Turn
from deploy.demo_model.training.phrases import HELD_OUT, OTHERS, Wordings, typed
from deploy.demo_model.training.questions import (
    BYE_ANSWER,
    ELSEWHERE_ANSWER,
    THANKS_ANSWER,
    Asker,
)
from deploy.demo_model.training.samples import Maker, Sample, draw_image, draw_sound, draw_video
from deploy.demo_model.training.speech import WordBank

UNRELATED = "unrelated questions"
IMAGE_RATIO = 0.25
PLAIN_WORDS = {
    **dict.fromkeys(("hello", "hi", "hey", "hello there", "good morning"), GREETING_ANSWER),
    **dict.fromkeys(("who are you", "what can you do", "help"), WHO_ANSWER),
    **dict.fromkeys(("thanks", "thank you"), THANKS_ANSWER),
    **dict.fromkeys(("bye", "goodbye"), BYE_ANSWER),
}
HELD_OUT_ASKER, OTHER_ASKER = Asker(HELD_OUT), Asker(OTHERS)


def draw_images(rng: random.Random, count: int) -> tuple[list[Image.Image], list[Fact]]:
    """Pictures and their facts."""
    drawn = [draw_image(rng) for _ in range(count)]
    return [picture for picture, *_ in drawn], [(shape, colour) for _, shape, colour in drawn]


def one_image(rng: random.Random, _words: WordBank) -> Sample:
    """Any question about one image."""
    pictures, (fact,) = draw_images(rng, 1)
    return Sample(HELD_OUT_ASKER.image(rng, *fact), images=pictures)


def yes_or_no(rng: random.Random, _words: WordBank) -> Sample:
    """Yes or no about one image."""
    pictures, (fact,) = draw_images(rng, 1)
    return Sample(HELD_OUT_ASKER.claim(rng, fact), images=pictures)


def unknown_names(rng: random.Random, _words: WordBank) -> Sample:
    """Yes or no about a shape or a color that no image has and no training either."""
    pictures, (fact,) = draw_images(rng, 1)
    claim = draw_unknown_claim(rng, [fact], UNKNOWN_SHAPES_HELD_OUT, UNKNOWN_COLOURS_HELD_OUT)
    return Sample(HELD_OUT_ASKER.claim(rng, fact, claim), images=pictures)


def several_images(rng: random.Random, _words: WordBank) -> Sample:
    """Any question about two or three images."""
    pictures, facts = draw_images(rng, rng.choice((2, 2, 3)))
    return Sample(HELD_OUT_ASKER.images(rng, facts), images=pictures)


def video(rng: random.Random, _words: WordBank) -> Sample:
    """Any question about one clip."""
    frames, shape, colour, direction = draw_video(rng)
    return Sample(HELD_OUT_ASKER.video(rng, shape, colour, direction), videos=[frames])


def sound(rng: random.Random, words: WordBank) -> Sample:
    """Any question about one sound of one to three words."""
    samples, said = draw_sound(rng, words, rng.choice((1, 1, 2, 3)))
    return Sample(HELD_OUT_ASKER.sound(rng, said), sounds=[samples])


def image_and_sound(rng: random.Random, words: WordBank) -> Sample:
    """About both."""
    pictures, (fact,) = draw_images(rng, 1)
    samples, said = draw_sound(rng, words, 1)
    return Sample(HELD_OUT_ASKER.both(rng, *fact, said), images=pictures, sounds=[samples])


def text(rng: random.Random, _words: WordBank) -> Sample:
    """Counts, sums, repeated words, chat."""
    return Sample(HELD_OUT_ASKER.text(rng))


def plain_words(rng: random.Random, _words: WordBank) -> Sample:
    """Greetings and the like in small and capital letters, with or without a mark behind them."""
    words = rng.choice(tuple(PLAIN_WORDS))
    in_case = rng.choice((str.lower, str.upper, str.capitalize))
    return Sample(Turn(in_case(words) + rng.choice(("", "!", ".", "?")), PLAIN_WORDS[words]))


def follow_up(rng: random.Random, _words: WordBank) -> Sample:
    """A second question about one image."""
    pictures, (fact,) = draw_images(rng, 1)
    asker = HELD_OUT_ASKER
    turn = asker.follow_up(rng, *fact) if rng.random() < 0.5 else asker.image(rng, *fact)
    return Sample(turn, images=pictures, before=[asker.image(rng, *fact)])


def as_others_ask(rng: random.Random, _words: WordBank) -> Sample:
    """Questions in the manner of those that people asked about other pictures."""
    pictures, facts = draw_images(rng, 2)
    if rng.random() < 0.15 and all(ours != theirs for ours, theirs in zip(*facts, strict=True)):
        kind = rng.choice(("colour_of", "shape_of", "same"))
        return Sample(OTHER_ASKER.images(rng, facts, kind), images=pictures)
    return Sample(OTHER_ASKER.image(rng, *facts[0]), images=pictures[:1])


def no_media(rng: random.Random, _words: WordBank) -> Sample:
    """About media that were not sent."""
    return Sample(HELD_OUT_ASKER.without_media(rng))


def json_object(rng: random.Random, words: WordBank) -> Sample:
    """An object about an image, a clip or a sound."""
    kind = rng.randrange(3)
    if kind == 0:
        pictures, (fact,) = draw_images(rng, 1)
        known, question = objects.known_image(*fact), HELD_OUT_ASKER.image(rng, *fact, "describe").question
        sample = Sample(Turn("", ""), images=pictures)
    elif kind == 1:
        frames, *facts = draw_video(rng)
        known, question = (
            objects.known_video(*facts),
            HELD_OUT_ASKER.video(rng, *facts, "describe").question,
        )
        sample = Sample(Turn("", ""), videos=[frames])
    else:
        samples, said = draw_sound(rng, words, rng.choice((1, 2)))
        known, question = objects.known_sound(said), HELD_OUT_ASKER.sound(rng, said, "said").question
        sample = Sample(Turn("", ""), sounds=[samples])
    turn = objects.json_turn(rng, known, question, HELD_OUT)
    sample.turn = Turn(turn.question, turn.answer)
    return sample


def tool_call(rng: random.Random, _words: WordBank) -> Sample:
    """A call whose argument the user says; names of cities that training never saw."""
    kind = rng.choice(tuple(calls.TOOL_KINDS))
    tool = calls.draw_tool(rng, kind, HELD_OUT)
    return Sample(
        calls.asked_call(rng, kind, tool, HELD_OUT),
        tools=calls.draw_tools(rng, tool, without=kind, split=HELD_OUT),
    )


def tool_call_from_media(rng: random.Random, words: WordBank) -> Sample:
    """A call whose argument the media show, in the wordings of training."""
    kind = rng.choice(("colour", "direction", "shape", "text"))
    tool = calls.draw_tool(rng, kind, HELD_OUT)
    tools = calls.draw_tools(rng, tool, without=kind, split=HELD_OUT)
    if kind == "direction":
        frames, _, _, direction = draw_video(rng)
        return Sample(calls.media_call(rng, kind, tool, direction, HELD_OUT), videos=[frames], tools=tools)
    if kind == "text":
        samples, said = draw_sound(rng, words, rng.choice((1, 2)))
        return Sample(
            calls.media_call(rng, kind, tool, " ".join(said), HELD_OUT), sounds=[samples], tools=tools
        )
    pictures, ((shape, colour),) = draw_images(rng, 1)
    value = shape if kind == "shape" else colour
    return Sample(calls.media_call(rng, kind, tool, value, HELD_OUT), images=pictures, tools=tools)


def tool_result(rng: random.Random, _words: WordBank) -> Sample:
    """What the model says of a result."""
    tool = calls.draw_tool(rng, "city", HELD_OUT)
    result = rng.choice(calls.SAID_RESULTS)
    asked = calls.asked_call(rng, "city", tool, HELD_OUT)
    return Sample(Turn(result, calls.result_answer(result)), before=[asked], tools=[tool], role="tool")


def unrelated_samples(rng: random.Random) -> list[Sample]:
    """Every unrelated question once, some beside an image."""
    samples = []
    for question in Wordings.load("elsewhere").templates("all", HELD_OUT):
        pictures, _ = draw_images(rng, int(rng.random() < IMAGE_RATIO))
        turn = Turn(question if rng.random() < 0.5 else typed(rng, question), ELSEWHERE_ANSWER)
        samples.append(Sample(turn, images=pictures))
    return samples


NATURAL_TASKS: dict[str, Maker] = {
    "new wordings: one image": one_image,
    "new wordings: yes or no": yes_or_no,
    "new wordings: several images": several_images,
    "new wordings: video": video,
    "new wordings: sound": sound,
    "new wordings: image and sound": image_and_sound,
    "new wordings: text": text,
    "plain words in any case": plain_words,
    "new wordings: follow-up": follow_up,
    "as others ask": as_others_ask,
    "media not sent": no_media,
    "JSON": json_object,
    "tool call": tool_call,
    "tool call from media": tool_call_from_media,
    "tool result": tool_result,
    "shapes and colors that no image has": unknown_names,
}
