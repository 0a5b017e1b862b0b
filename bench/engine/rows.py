"""The load: the dialogues of each row of the table. Pure; everything follows from a seed and a key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bench.engine.models import CONV_MODEL, DELTA_MODEL, TEXT_MODEL, USUAL_MODELS, VISION_MODEL
from bench.engine.prompts import Message, Prompts, user

IMAGE_SIDE = 224  # pixels; 64 placeholder tokens
NUM_REQUESTS = {1: 6, 4: 16, 16: 32}  # by concurrency; otherwise REQUESTS_PER_SLOT times the concurrency
REQUESTS_PER_SLOT = 2
TURNS = 4  # of a session


@dataclass(frozen=True)
class DialogueTurn:
    message: Message
    num_tokens: int  # of the answer
    kind: str


@dataclass(frozen=True)
class Dialogue:
    """Turns asked one after the other; each request repeats the dialogue so far. A single request is a
    dialogue of one turn.
    """

    opening: tuple[Message, ...]
    turns: tuple[DialogueTurn, ...]


Key = tuple[object, ...]
Maker = Callable[[Prompts, Key, int], Dialogue]  # the last argument numbers the dialogues of one measurement


@dataclass(frozen=True)
class LoadRow:
    name: str
    model: str
    make: Maker
    num_turns: int = 1

    def num_dialogues(self, concurrency: int) -> int:
        requests = NUM_REQUESTS.get(concurrency, REQUESTS_PER_SLOT * concurrency)
        return max(concurrency, requests // self.num_turns)

    def dialogues(
        self, prompts: Prompts, concurrency: int, repetition: int, num_dialogues: int
    ) -> list[Dialogue]:
        key = (self.name, concurrency, repetition)
        return [self.make(prompts, key, idx) for idx in range(num_dialogues)]


def text(num_prompt_tokens: int, num_tokens: int) -> Maker:
    def make(prompts: Prompts, key: Key, idx: int) -> Dialogue:
        return _single(DialogueTurn(user(prompts.text(num_prompt_tokens, *key, idx)), num_tokens, "text"))

    return make


def image(prompts: Prompts, key: Key, idx: int) -> Dialogue:
    """A new 224² image and 16 tokens of text; 32 tokens of answer."""
    picture = prompts.image(IMAGE_SIDE, *key, idx)
    return _single(DialogueTurn(user(prompts.text(16, *key, idx), picture), 32, "image"))


def mixed(prompts: Prompts, key: Key, idx: int) -> Dialogue:
    """Exactly one image in five requests."""
    return image(prompts, key, idx) if idx % 5 == 2 else text(128, 64)(prompts, key, idx)


def session(prompts: Prompts, key: Key, idx: int) -> Dialogue:
    """A system prompt that all dialogues share, one of two images in the first turn, four turns of 32
    tokens.
    """
    opening = {"role": "system", "content": prompts.text(256, *key, "system")}
    picture = prompts.image(IMAGE_SIDE, *key, idx % 2)
    turns = []
    for number in range(TURNS):
        question = prompts.text(32, *key, idx, number)
        message = user(question) if number else user(question, picture)
        turns.append(DialogueTurn(message, 32, "later turn" if number else "first turn"))
    return Dialogue((opening,), tuple(turns))


def _single(turn: DialogueTurn) -> Dialogue:
    return Dialogue((), (turn,))


ROWS = (
    LoadRow("text-128/64", TEXT_MODEL, text(128, 64)),
    LoadRow("text-1024/32", TEXT_MODEL, text(1024, 32)),
    LoadRow("image/32", VISION_MODEL, image),
    LoadRow("mixed-80/20", VISION_MODEL, mixed),
    LoadRow("session", VISION_MODEL, session, TURNS),
    LoadRow("delta-128/64", DELTA_MODEL, text(128, 64)),
    LoadRow("delta-1024/32", DELTA_MODEL, text(1024, 32)),
    LoadRow("conv-128/64", CONV_MODEL, text(128, 64)),
    LoadRow("conv-1024/32", CONV_MODEL, text(1024, 32)),
)
USUAL_ROWS = tuple(row for row in ROWS if row.model in USUAL_MODELS)
