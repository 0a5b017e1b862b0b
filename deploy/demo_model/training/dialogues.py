"""Conversations of stages D to L, as people have them: many wordings, follow-up turns with or without new
media, questions that the model cannot answer, JSON, and calls of tools.

Each method of `DialogueMaker` draws one conversation and takes everything random from the generator.
"""

import random
from collections.abc import Callable, Sequence

from deploy.demo_model.training import calls, data, media, objects
from deploy.demo_model.training.build import Processor
from deploy.demo_model.training.calls import Tool
from deploy.demo_model.training.claims import Fact
from deploy.demo_model.training.conversations import (
    FRAME_COUNTS,
    SMALLEST_IMAGE_RATIO,
    TEXT_FIRST_RATIO,
)
from deploy.demo_model.training.data import COLOUR_NAMES, DIRECTIONS, SHAPES, WORDS, Turn
from deploy.demo_model.training.features import MediaFeatures
from deploy.demo_model.training.objects import JsonTurn
from deploy.demo_model.training.phrases import common_words
from deploy.demo_model.training.pretrain import draw_training_image
from deploy.demo_model.training.questions import FIXED_ANSWERS, Asker
from deploy.demo_model.training.rows import KEY_WEIGHT, RowWriter, TrainingRow
from deploy.demo_model.training.speech import WordBank, disturb, make_clip
from deploy.demo_model.training.tokenizer import COMMON_WORDS, SYSTEM_PROMPTS

SYSTEM_RATIO = 0.15
FIXED_HEAD, FIXED_HEAD_WEIGHT, FIXED_TAIL_WEIGHT = 3, 3.0, 0.2
NAMED_WEIGHT = 2.0  # of the keys of an object that the question names
CUT_LENGTH = 6  # tokens of a fixed answer at the end of a row that is cut there
MORE_SYSTEM_PROMPTS = (
    *SYSTEM_PROMPTS,
    "You are a helpful AI.",
    "Be brief.",
    "You are a friendly assistant who answers questions about images.",
    "Be honest and polite.",
    "You help people.",
    "Answer the question.",
)
STRAY_RATIO = 0.2
BESIDE_IMAGE_RATIO = 0.25  # of the questions that it cannot answer
OTHER_WORDS_RATIO = 0.25
KNOWN_WORDS = {"thing", *WORDS, *SHAPES, *COLOUR_NAMES, *DIRECTIONS}
OTHER_WORDS = sorted({word for word in common_words() if len(word) > 3}.difference(KNOWN_WORDS))
Ask = Callable[[random.Random], Turn]


class DialogueMaker:
    """Draws conversations in the training wordings."""

    def __init__(self, processor: Processor, features: MediaFeatures, words: WordBank) -> None:
        self._writer, self._words, self._ask = RowWriter(processor, features), words, Asker()

    @property
    def pad_id(self) -> int:
        """The id behind a row's end."""
        return self._writer.pad_id

    def image_row(self, rng: random.Random) -> TrainingRow:
        """One image and a few questions."""
        row = self._row(rng)
        self._about_image(rng, row, rng.choice((1, 2, 2, 3)))
        return row

    def claim_row(self, rng: random.Random) -> TrainingRow:
        """One image and questions of yes or no."""
        row = self._row(rng)
        ids, fact = self._image(rng, row)
        self._talk(rng, row, ids, [lambda rng: self._ask.claim(rng, fact)] * rng.choice((1, 1, 2)))
        return row

    def drill_row(self, rng: random.Random) -> TrainingRow:
        """Facts in text, each with a question that it decides."""
        row = self._row(rng)
        asks: list[Ask] = [self._ask.drill, self._ask.drill, self._look_up]
        self._talk(rng, row, [], rng.choices(asks, k=rng.choice((1, 1, 2))))
        return row

    def images_row(self, rng: random.Random) -> TrainingRow:
        """Two or three images in order."""
        row = self._row(rng)
        drawn = [self._image(rng, row) for _ in range(rng.choice((2, 2, 2, 3)))]
        facts = [fact for _, fact in drawn]
        ids = [token for image_ids, _ in drawn for token in image_ids]
        self._talk(rng, row, ids, [lambda rng: self._ask.images(rng, facts)] * rng.choice((1, 2, 2)))
        return row

    def video_row(self, rng: random.Random) -> TrainingRow:
        """One clip."""
        row = self._row(rng)
        self._about_video(rng, row, rng.choice((1, 2, 3)))
        return row

    def sound_row(self, rng: random.Random) -> TrainingRow:
        """One sound of one to four words."""
        row = self._row(rng)
        self._about_sound(rng, row, rng.choice((1, 2, 2)))
        return row

    def both_row(self, rng: random.Random) -> TrainingRow:
        """An image and a sound in either order, with questions about both or one."""
        row = self._row(rng)
        image_ids, fact = self._image(rng, row)
        audio_ids, words = self._sound(rng, row, rng.choice((1, 1, 1, 2)))
        ids = image_ids + audio_ids if rng.random() < 0.6 else audio_ids + image_ids
        ask = self._ask
        asks: list[Ask] = [lambda rng: ask.both(rng, *fact, words)]
        if rng.random() < 0.6:
            kinds = ("shape", "colour", "claim")
            extra: Sequence[Ask] = (
                lambda rng: ask.image(rng, *fact, rng.choice(kinds)),
                lambda rng: ask.sound(rng, words, rng.choice(("said", "heard"))),
            )
            asks.insert(rng.randrange(2), rng.choice(extra))
        self._talk(rng, row, ids, asks)
        return row

    def switch_row(self, rng: random.Random) -> TrainingRow:
        """New media in a later turn: questions are about the latest."""
        row = self._row(rng)
        about = (
            self._about_image,
            self._about_image,
            self._about_sound,
            self._about_video,
            self._about_nothing,
        )
        for make in rng.choices(about, k=rng.choice((2, 2, 3))):
            make(rng, row, rng.choice((1, 1, 2)))
        return row

    def text_row(self, rng: random.Random) -> TrainingRow:
        """Counts, sums, repeated words, chat; media that were not sent."""
        row = self._row(rng)
        asks: list[Ask] = [
            self._ask.text,
            self._ask.text,
            lambda rng: self._ask.text(rng, rng.choice(("chat", "chat", "repeat"))),
            self._repeat,
            self._ask.without_media,
        ]
        self._talk(rng, row, [], rng.choices(asks, k=rng.choice((1, 2, 2))))
        return row

    def plain_row(self, rng: random.Random) -> TrainingRow:
        """Greetings, thanks and the like, short and in any case."""
        row = self._row(rng)
        self._talk(rng, row, [], [lambda rng: self._ask.text(rng, "plain")] * rng.choice((1, 1, 2)))
        return row

    def copy_row(self, rng: random.Random) -> TrainingRow:
        """Names that nothing has, to be said back, and results of functions."""
        row = self._row(rng)
        for _ in range(rng.choice((1, 2, 2))):
            words = " ".join(calls.new_name(rng) for _ in range(rng.randrange(1, 5)))
            if rng.random() < 0.4:
                self._say_result(rng, row, words)
            else:
                self._say(rng, row, [], Turn(self._ask.word(rng, "repeat", words=words), words))
        return row

    def elsewhere_row(self, rng: random.Random) -> TrainingRow:
        """Questions that the model cannot answer, among those that it can."""
        row = self._row(rng)
        if rng.random() < BESIDE_IMAGE_RATIO:
            ids, fact = self._image(rng, row)
            asks: list[Ask] = [self._elsewhere] * 4 + [lambda rng: self._ask.image(rng, *fact)]
            self._talk(rng, row, ids, [rng.choice(asks) for _ in range(rng.choice((1, 1, 2)))])
            return row
        asks = [self._elsewhere] * 5 + [self._ask.text, self._ask.without_media]
        self._talk(rng, row, [], [rng.choice(asks) for _ in range(rng.choice((1, 1, 2)))])
        return row

    def json_row(self, rng: random.Random) -> TrainingRow:
        """An object about media, sometimes behind a question."""
        row = self._row(rng)
        ids, known, ask = self._known(rng, row)
        if rng.random() < 0.15:
            self._say(rng, row, ids, ask(rng))
            ids = []
        self._say_json(rng, row, ids, objects.json_turn(rng, known, ask(rng).question))
        return row

    def images_json_row(self, rng: random.Random) -> TrainingRow:
        """An array of objects."""
        row = self._row(rng)
        drawn = [self._image(rng, row) for _ in range(2)]
        ids = [token for image_ids, _ in drawn for token in image_ids]
        self._say_json(rng, row, ids, objects.images_json_turn(rng, [fact for _, fact in drawn]))
        return row

    def tool_row(self, rng: random.Random) -> TrainingRow:
        """Functions are offered: a call with its result, or an answer that needs none."""
        if rng.random() < 0.3:
            return self._row_without_call(rng)
        kind = rng.choice(tuple(calls.TOOL_KINDS))
        tool = calls.draw_tool(rng, kind)
        row = self._row(rng, calls.draw_tools(rng, tool, without=kind))
        if calls.TOOL_KINDS[kind].from_media and rng.random() < 0.5:
            ids, value = self._media_value(rng, row, kind)
            turn = calls.media_call(rng, kind, tool, value)
        else:
            ids, turn = [], calls.asked_call(rng, kind, tool)
        self._say(rng, row, ids, turn)
        if rng.random() < 0.5:
            self._say_result(rng, row, calls.draw_result(rng))
        return row

    def call_row(self, rng: random.Random, tool: Tool, turn: Turn, result: str) -> TrainingRow:
        """One tool, its call and its result."""
        row = TrainingRow()
        self._system(row, "", [tool])
        self._say(rng, row, [], turn)
        self._say_result(rng, row, result)
        return row

    def _say_result(self, rng: random.Random, row: TrainingRow, result: str) -> None:
        self._say(rng, row, [], Turn(result, calls.result_answer(result)), role="tool")

    def _row_without_call(self, rng: random.Random) -> TrainingRow:
        absent = rng.choice(tuple(calls.TOOL_KINDS))
        row = self._row(rng, calls.draw_tools(rng, None, without=absent))
        draw = rng.randrange(5)
        if draw == 0:
            self._about_image(rng, row, 1)
        elif draw == 1:
            self._about_sound(rng, row, 1)
        elif draw == 2:
            self._talk(rng, row, [], [self._ask.text])
        else:
            self._talk(rng, row, [], [self._elsewhere])
        return row

    def _media_value(self, rng: random.Random, row: TrainingRow, kind: str) -> tuple[list[int], str]:
        if kind == "direction":
            ids, _, direction = self._video(rng, row)
            return ids, direction
        if kind == "text":
            ids, words = self._sound(rng, row, rng.choice((1, 2, 3)))
            return ids, " ".join(words)
        ids, (shape, colour) = self._image(rng, row)
        return ids, shape if kind == "shape" else colour

    def _known(self, rng: random.Random, row: TrainingRow) -> tuple[list[int], objects.Known, Ask]:
        """Media, their values, and a question about them."""
        kind = rng.choice(("image", "image", "video", "sound"))
        if kind == "image":
            ids, fact = self._image(rng, row)
            return ids, objects.known_image(*fact), lambda rng: self._ask.image(rng, *fact)
        if kind == "video":
            ids, fact, direction = self._video(rng, row)
            return (
                ids,
                objects.known_video(*fact, direction),
                lambda rng: self._ask.video(rng, *fact, direction),
            )
        ids, words = self._sound(rng, row, rng.choice((1, 2, 3)))
        return ids, objects.known_sound(words), lambda rng: self._ask.sound(rng, words)

    def _about_image(self, rng: random.Random, row: TrainingRow, num_turns: int) -> None:
        ids, fact = self._image(rng, row)
        asks: list[Ask] = [lambda rng: self._ask.image(rng, *fact)] * num_turns
        for idx in range(1, num_turns):
            if rng.random() < 0.4:
                asks[idx] = lambda rng: self._ask.follow_up(rng, *fact)
        self._stray(rng, asks, lambda rng: self._ask.sound(rng, [rng.choice(WORDS)], "said"))
        self._talk(rng, row, ids, asks)

    def _about_video(self, rng: random.Random, row: TrainingRow, num_turns: int) -> None:
        ids, fact, direction = self._video(rng, row)
        asks: list[Ask] = [lambda rng: self._ask.video(rng, *fact, direction)] * num_turns
        if num_turns > 1 and rng.random() < 0.2:
            asks[-1] = lambda rng: self._ask.follow_up(rng, *fact)
        self._stray(rng, asks, lambda rng: self._ask.sound(rng, [rng.choice(WORDS)], "said"))
        self._talk(rng, row, ids, asks)

    def _about_sound(self, rng: random.Random, row: TrainingRow, num_turns: int) -> None:
        ids, words = self._sound(rng, row, rng.choice((1, 1, 2, 3, 3, 4)))
        asks: list[Ask] = [lambda rng: self._ask.sound(rng, words)] * num_turns
        fact = (rng.choice(SHAPES), rng.choice(COLOUR_NAMES))
        self._stray(rng, asks, lambda rng: self._ask.image(rng, *fact, rng.choice(("shape", "colour"))))
        self._talk(rng, row, ids, asks)

    def _about_nothing(self, rng: random.Random, row: TrainingRow, num_turns: int) -> None:
        self._talk(rng, row, [], [self._ask.text] * num_turns)

    def _stray(self, rng: random.Random, asks: list[Ask], missing: Ask) -> None:
        """Put in a question that these media do not answer."""
        if rng.random() < STRAY_RATIO:
            asks[rng.randrange(len(asks))] = self._elsewhere
        elif rng.random() < STRAY_RATIO / 3:
            at = rng.randrange(len(asks))
            asks[at] = lambda rng: Turn(missing(rng).question, self._ask.without_media(rng).answer)

    def _look_up(self, rng: random.Random) -> Turn:
        """One of several images, told in text."""
        facts = [(rng.choice(SHAPES), rng.choice(COLOUR_NAMES)) for _ in range(rng.choice((2, 2, 3)))]
        listed = " ".join(f"Image {idx}: {colour} {shape}." for idx, (shape, colour) in enumerate(facts, 1))
        turn = self._ask.images(rng, facts, rng.choice(("colour_of", "shape_of", "where")))
        return Turn(f"{listed} {turn.question}", turn.answer, turn.key)

    def _elsewhere(self, rng: random.Random) -> Turn:
        """A question that the model cannot answer, often with words that no other question has."""
        turn = self._ask.elsewhere(rng)
        if rng.random() < OTHER_WORDS_RATIO:
            words = turn.question.split(" ")
            longer = [idx for idx, word in enumerate(words) if len(word) > 3 and word.isalpha()]
            for idx in rng.sample(longer, min(len(longer), rng.choice((1, 1, 2)))):
                words[idx] = rng.choice((rng.choice(OTHER_WORDS), calls.new_name(rng).lower()))
            return Turn(" ".join(words), turn.answer)
        return turn

    def _repeat(self, rng: random.Random) -> Turn:
        """Words of any kind, to be copied."""
        kinds = (rng.choice(COMMON_WORDS.split()), calls.draw_name(rng), rng.choice(WORDS), rng.choice(WORDS))
        names = rng.sample(kinds, 3)
        words = " ".join(names[: rng.randrange(1, 4)])
        return Turn(self._ask.word(rng, "repeat", words=words), words)

    def _image(self, rng: random.Random, row: TrainingRow) -> tuple[list[int], Fact]:
        pixels, shape, colour = draw_training_image(rng, SMALLEST_IMAGE_RATIO)
        return self._writer.image(row, pixels), (shape, colour)

    def _video(self, rng: random.Random, row: TrainingRow) -> tuple[list[int], Fact, str]:
        frames, shape, colour, direction = data.make_video(
            rng, rng.choice(FRAME_COUNTS), direction=rng.choice(DIRECTIONS)
        )
        return self._writer.video(rng, row, media.disturb_video(rng, frames)), (shape, colour), direction

    def _sound(
        self, rng: random.Random, row: TrainingRow, num_words: int
    ) -> tuple[list[int], tuple[str, ...]]:
        clip = disturb(rng, make_clip(rng, self._words, num_words))
        return self._writer.audio(row, clip), clip.words

    def _row(self, rng: random.Random, tools: Sequence[Tool] = ()) -> TrainingRow:
        """A conversation with its system message, if it has one."""
        row = TrainingRow()
        prompt = rng.choice(MORE_SYSTEM_PROMPTS) if rng.random() < SYSTEM_RATIO else ""
        self._system(row, prompt, tools)
        return row

    def _system(self, row: TrainingRow, prompt: str, tools: Sequence[Tool]) -> None:
        text = (
            (f"{prompt}\n" if prompt else "") + "Tools:\n" + "".join(tool.line for tool in tools)
            if tools
            else prompt
        )
        if text:
            self._writer.append(row, self._writer.encode(f"<|im_start|>system\n{text}<|im_end|>\n"))

    def _talk(self, rng: random.Random, row: TrainingRow, ids: list[int], asks: Sequence[Ask]) -> None:
        """The media belong to the first turn."""
        for idx, ask in enumerate(asks):
            self._say(rng, row, ids if idx == 0 else [], ask(rng))

    def _say(
        self, rng: random.Random, row: TrainingRow, ids: list[int], turn: Turn, role: str = "user"
    ) -> None:
        self._prompt(rng, row, ids, turn.question, role)
        if turn.answer in FIXED_ANSWERS:
            tokens = self._writer.encode(turn.answer)
            tail = [FIXED_TAIL_WEIGHT] * (len(tokens) - FIXED_HEAD)
            row.num_needed = len(row.ids) + CUT_LENGTH
            self._writer.append_weighted(row, tokens, [FIXED_HEAD_WEIGHT] * FIXED_HEAD + tail)
        elif turn.answer.startswith(calls.CALL_BEGIN):
            self._append_object(row, turn.answer, 1.0)
            row.num_needed = 0
        else:
            self._writer.append_answer(row, turn)
            row.num_needed = 0
        self._writer.append(row, self._writer.encode("\n"))

    def _say_json(self, rng: random.Random, row: TrainingRow, ids: list[int], turn: JsonTurn) -> None:
        """Under a schema that the model does not see, keys and brackets are forced: only values count."""
        self._prompt(rng, row, ids, turn.question, "user")
        self._append_object(row, turn.answer, 0.0 if turn.is_forced else NAMED_WEIGHT)
        self._writer.append(row, self._writer.encode("\n"))

    def _append_object(self, row: TrainingRow, text: str, frame_weight: float) -> None:
        """Values weigh more than keys and brackets."""
        tokens, is_value = self._writer.encode_json(text)
        self._writer.append_weighted(
            row, tokens, [KEY_WEIGHT if value else frame_weight for value in is_value]
        )

    def _prompt(self, rng: random.Random, row: TrainingRow, ids: list[int], question: str, role: str) -> None:
        encode = self._writer.encode
        text = encode(question)
        content = text + ids if rng.random() < TEXT_FIRST_RATIO else ids + text
        self._writer.append(
            row, encode(f"<|im_start|>{role}\n") + content + encode("<|im_end|>\n<|im_start|>assistant\n")
        )
