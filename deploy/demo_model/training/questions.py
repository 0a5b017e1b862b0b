"""Questions in many wordings about media whose facts are known, each with the one answer that counts as
right.

The answers keep the forms of `data`: a name, a sentence, or a fact with the word that follows from it. A
`Turn`'s key is the end of its answer that is hard to get right. Pure, from the generator and the facts.
"""

import random
from collections.abc import Sequence

from deploy.demo_model.training import data
from deploy.demo_model.training.calls import draw_strange_name
from deploy.demo_model.training.claims import (
    STRANGE_RATIO,
    THING_RATIO,
    UNKNOWN_COLOURS,
    UNKNOWN_COLOURS_HELD_OUT,
    UNKNOWN_SHAPES,
    UNKNOWN_SHAPES_HELD_OUT,
    Claim,
    Fact,
    decided,
    draw_claim,
    draw_unknown_claim,
    with_article,
    yes_or_no,
)
from deploy.demo_model.training.data import (
    COLOUR_NAMES,
    DIRECTIONS,
    SHAPES,
    WORDS,
    Turn,
    describe_image,
    pick_other,
)
from deploy.demo_model.training.phrases import TRAINING, Wordings, everyday_things

ELSEWHERE_ANSWER = (
    "I cannot help with that. I am a small demo model: I can name shapes and colors in images, say which way "
    "they move in videos, and write down spoken words."
)
NO_MEDIA_ANSWER = "Send me the image, video or sound that you ask about."
THANKS_ANSWER = "You are welcome."
BYE_ANSWER = "Goodbye!"
FIXED_ANSWERS = (
    ELSEWHERE_ANSWER,
    NO_MEDIA_ANSWER,
    THANKS_ANSWER,
    BYE_ANSWER,
    data.GREETING_ANSWER,
    data.WHO_ANSWER,
    data.COLOUR_LIST_ANSWER,
    data.SHAPE_LIST_ANSWER,
)
FIXED_OF_KIND = {
    "greet": data.GREETING_ANSWER,
    "who": data.WHO_ANSWER,
    "colour_list": data.COLOUR_LIST_ANSWER,
    "shape_list": data.SHAPE_LIST_ANSWER,
    "thanks": THANKS_ANSWER,
    "bye": BYE_ANSWER,
}
RESERVED = frozenset((*SHAPES, *COLOUR_NAMES, *UNKNOWN_SHAPES_HELD_OUT, *UNKNOWN_COLOURS_HELD_OUT))
THINGS = tuple(name for name in everyday_things() if name not in RESERVED)
ORDINALS = ("first", "second", "third")
FORMER_WORDING_RATIO = 0.12
UNKNOWN_RATIO = 0.35  # of claims in training: no shape or color in the media is as they say
WRITTEN_RATIO = 0.6  # of the questions that it cannot answer, in training: as one of the writers put it
TRUE_RATIO = 0.7  # of the other claims, so that yes and no stay about equally likely
IMAGES_KINDS = (
    "describe",
    "describe",
    "count",
    "nth",
    "nth_colour",
    "nth_shape",
    "colour_of",
    "shape_of",
    "where",
    "same",
    "exist",
    "exist",
    "how_many",
)
VIDEO_KINDS = (
    "describe",
    "describe",
    "direction",
    "direction",
    "direction",
    "shape",
    "colour",
    "moves",
    "moves",
    "at_all",
    "choose",
    "claim",
)


PLAIN_KINDS = ("greet", "who", "thanks", "bye")


def unknown_names(rng: random.Random) -> tuple[Sequence[str], Sequence[str]]:
    """Shapes and colors that no image has, things of everyday life, or a word that nothing has."""
    draw = rng.random()
    if draw < STRANGE_RATIO:
        strange = (strange_word(rng),)
        return strange, strange
    return THINGS if draw < STRANGE_RATIO + THING_RATIO else UNKNOWN_SHAPES, UNKNOWN_COLOURS


def strange_word(rng: random.Random) -> str:
    """A word of syllables, or the beginning of one name and the end of another: it looks like a name."""
    if rng.random() < 0.5:
        return draw_strange_name(rng).split()[0].lower()
    while True:
        begin, end = (rng.choice(rng.choice((UNKNOWN_SHAPES, UNKNOWN_COLOURS, THINGS))) for _ in range(2))
        word = begin[: rng.randrange(2, max(3, len(begin)))].strip() + end[len(end) // 2 :]
        if word.isalpha() and word not in RESERVED:
            return word


class Asker:
    """Asks about facts in the wordings of one split."""

    def __init__(self, split: str = TRAINING, has_noise: bool = True) -> None:
        self._questions, self._elsewhere = Wordings.load("questions"), Wordings.load("elsewhere")
        self._split, self._has_noise = split, has_noise

    def word(self, rng: random.Random, kind: str, **slots: str) -> str:
        """One wording of a kind."""
        return self._questions.ask(rng, kind, self._split, slots, self._has_noise)

    def has(self, kind: str) -> bool:
        """Whether the split can ask a kind."""
        return kind in self._questions.kinds(self._split)

    def _draw_claim(self, rng: random.Random, facts: Sequence[Fact]) -> Claim:
        """Draws a claim; in training yes and no stay about equally likely."""
        if self._split != TRAINING:
            return draw_claim(rng, facts)
        if rng.random() < UNKNOWN_RATIO:
            return draw_unknown_claim(rng, facts, *unknown_names(rng))
        return draw_claim(rng, facts, true_ratio=TRUE_RATIO)

    def image(self, rng: random.Random, shape: str, colour: str, kind: str = "") -> Turn:
        """About one image."""
        kind = kind or rng.choice(
            ("describe", "describe", "shape", "colour", "claim", "claim", "claim", "choose", "how_many")
        )
        if self._split == TRAINING and rng.random() < FORMER_WORDING_RATIO:
            return data.image_question(rng, shape, colour)
        if kind == "claim":
            return self.claim(rng, (shape, colour))
        if kind == "choose":
            return self.choice(rng, shape, colour)
        if kind == "how_many":
            if rng.random() < 0.4:
                return Turn(self.word(rng, "how_many_shapes"), "1", key="1")
            claim = self._draw_claim(rng, [(shape, colour)])
            question = self.word(rng, "how_many_named", **claim.slots(rng))
            return decided(question, claim.fact((shape, colour)), str(int(claim.holds((shape, colour)))))
        answer = {"describe": describe_image(shape, colour), "shape": shape, "colour": colour}[kind]
        return Turn(self.word(rng, kind, shape=shape, colour=colour), answer)

    def claim(self, rng: random.Random, fact: Fact, claim: Claim | None = None) -> Turn:
        """Yes or no, in any form, about a claim or a drawn one."""
        claim = claim or self._draw_claim(rng, [fact])
        kinds = ["exist", "exist", "copula", "copula"]
        kinds += {"shape": ["copula_shape"], "colour": ["copula_colour"], "both": []}[claim.about]
        is_negated = rng.random() < 0.2 and self.has("not_copula")
        kind = rng.choice(("not_exist", "not_copula")) if is_negated else rng.choice(kinds)
        question = self.word(rng, kind, **claim.slots(rng))
        return decided(question, claim.fact(fact), yes_or_no(claim.holds(fact) != is_negated))

    def choice(self, rng: random.Random, shape: str, colour: str) -> Turn:
        """One of two."""
        is_shape = rng.random() < 0.5
        names, truth, with_word = (SHAPES, shape, with_article) if is_shape else (COLOUR_NAMES, colour, str)
        if self._split == TRAINING:
            unknown = unknown_names(rng)[0 if is_shape else 1]
            names = unknown if rng.random() < UNKNOWN_RATIO else names
        options = [with_word(name) for name in (truth, pick_other(rng, names, truth))]
        rng.shuffle(options)
        return Turn(self.word(rng, "choose", a=options[0], b=options[1]), truth, key=truth)

    def follow_up(self, rng: random.Random, shape: str, colour: str) -> Turn:
        """A question that needs the turns before it."""
        kind = rng.choice(("again_shape", "again_colour", "again_yes_no", "again_yes_no"))
        if kind != "again_yes_no":
            return Turn(self.word(rng, kind), shape if kind == "again_shape" else colour)
        claim = self._draw_claim(rng, [(shape, colour)])
        question = self.word(rng, kind, **claim.slots(rng))
        return decided(question, claim.fact((shape, colour)), yes_or_no(claim.holds((shape, colour))))

    def images(self, rng: random.Random, facts: Sequence[Fact], kind: str = "") -> Turn:
        """About several images, in order."""
        if self._split == TRAINING and not kind and rng.random() < FORMER_WORDING_RATIO:
            return data.images_question(rng, facts)
        kind = kind or rng.choice(IMAGES_KINDS)
        if kind in ("describe", "count"):
            parts = [f"Image {idx}: {colour} {shape}." for idx, (shape, colour) in enumerate(facts, start=1)]
            return Turn(
                self.word(rng, f"images_{kind}"), " ".join(parts) if kind == "describe" else str(len(facts))
            )
        if kind.startswith("nth"):
            idx = rng.randrange(len(facts))
            shape, colour = facts[idx]
            question = self.word(rng, f"images_{kind}", nth=ORDINALS[idx], n=str(idx + 1))
            answer = {"nth": f"Image {idx + 1}: {colour} {shape}.", "nth_colour": colour, "nth_shape": shape}[
                kind
            ]
            return Turn(question, answer, key=answer if kind != "nth" else f" {colour} {shape}.")
        if kind in ("colour_of", "shape_of", "where"):
            return self._which(rng, facts, kind)
        if kind == "same":
            about = rng.choice(("shape", "colour"))
            claim = Claim(about, *facts[0])
            is_same = all(claim.holds(fact) for fact in facts)
            return decided(self.word(rng, f"images_same_{about}"), claim.facts(facts), yes_or_no(is_same))
        claim = self._draw_claim(rng, facts)
        question = self.word(rng, "exist" if kind == "exist" else "how_many_named", **claim.slots(rng))
        holding = sum(claim.holds(fact) for fact in facts)
        return decided(
            question, claim.facts(facts), yes_or_no(holding > 0) if kind == "exist" else str(holding)
        )

    def _which(self, rng: random.Random, facts: Sequence[Fact], kind: str) -> Turn:
        """One image picked by what no other shares with it."""
        about = {"colour_of": "shape", "shape_of": "colour"}.get(kind) or rng.choice(
            ("shape", "colour", "both")
        )
        claims = [Claim(about, *fact) for fact in facts]
        single = [idx for idx, claim in enumerate(claims) if sum(map(claim.holds, facts)) == 1]
        if not single:
            return self.images(
                rng,
                facts,
                "nth_colour" if kind == "colour_of" else "nth_shape" if kind == "shape_of" else "nth",
            )
        idx = rng.choice(single)
        shape, colour = facts[idx]
        question = self.word(rng, f"images_{kind}", **claims[idx].slots(rng))
        if kind == "where":
            return Turn(question, f"Image {idx + 1}", key=str(idx + 1))
        return Turn(question, f"Image {idx + 1}: {colour} {shape}.", key=f"{idx + 1}: {colour} {shape}.")

    def video(self, rng: random.Random, shape: str, colour: str, direction: str, kind: str = "") -> Turn:
        """About one clip."""
        if self._split == TRAINING and not kind and rng.random() < FORMER_WORDING_RATIO:
            return data.video_question(rng, shape, colour, direction)
        kind = kind or rng.choice(VIDEO_KINDS)
        if kind == "claim":
            return self.claim(rng, (shape, colour))
        if kind == "moves":
            is_true, is_negated = rng.random() < 0.5, rng.random() < 0.2
            named = direction if is_true else pick_other(rng, DIRECTIONS, direction)
            question = self.word(rng, "moves_not" if is_negated else "moves", direction=named, shape=shape)
            return decided(question, f"It moves {direction}", yes_or_no(is_true != is_negated))
        if kind == "at_all":
            is_still = rng.random() < 0.5
            question = self.word(rng, "moves_not_at_all" if is_still else "moves_at_all", shape=shape)
            return decided(question, f"It moves {direction}", yes_or_no(not is_still))
        if kind == "choose":
            options = [direction, pick_other(rng, DIRECTIONS, direction)]
            rng.shuffle(options)
            return Turn(self.word(rng, "moves_choose", a=options[0], b=options[1], shape=shape), direction)
        name, answer = {
            "describe": ("video_describe", f"The video shows a {colour} {shape} moving {direction}."),
            "direction": ("direction", direction),
            "shape": ("video_shape", shape),
            "colour": ("video_colour", colour),
        }[kind]
        return Turn(self.word(rng, name, shape=shape, colour=colour), answer)

    def sound(self, rng: random.Random, words: Sequence[str], kind: str = "") -> Turn:
        """About one sound."""
        if self._split == TRAINING and not kind and rng.random() < FORMER_WORDING_RATIO:
            return data.audio_question(rng, words)
        kind = kind or rng.choice(
            ("said", "said", "said", "count", "first", "last", "heard", "heard", "choose")
        )
        if kind == "said":
            return Turn(self.word(rng, "said"), " ".join(words))
        if kind in ("count", "first", "last"):
            answer = {"count": str(len(words)), "first": words[0], "last": words[-1]}[kind]
            return Turn(self.word(rng, f"said_{kind}"), answer, key=answer)
        if kind == "choose" and len(words) == 1:
            options = [words[0], pick_other(rng, WORDS, words[0])]
            rng.shuffle(options)
            return Turn(self.word(rng, "heard_choose", a=options[0], b=options[1]), words[0])
        return self._heard(rng, words)

    def _heard(self, rng: random.Random, words: Sequence[str]) -> Turn:
        is_true, is_negated = rng.random() < 0.5, rng.random() < 0.2
        named = rng.choice(words) if is_true else rng.choice([word for word in WORDS if word not in words])
        fact = f"The word is {words[0]}" if len(words) == 1 else f"The words are {' '.join(words)}"
        question = self.word(rng, "heard_not" if is_negated else "heard", word=named)
        return decided(question, fact, yes_or_no(is_true != is_negated))

    def both(self, rng: random.Random, shape: str, colour: str, words: Sequence[str]) -> Turn:
        """About an image and a sound at once."""
        if self._split == TRAINING and len(words) == 1 and rng.random() < FORMER_WORDING_RATIO:
            return data.image_audio_question(rng, shape, colour, words[0])
        spoken = f"The word is {words[0]}." if len(words) == 1 else f"The words are {' '.join(words)}."
        return Turn(self.word(rng, "both"), f"{describe_image(shape, colour)} {spoken}")

    def text(self, rng: random.Random, kind: str = "") -> Turn:
        """Returns a turn without media."""
        if self._split == TRAINING and not kind and rng.random() < FORMER_WORDING_RATIO:
            return data.text_question(rng)
        kind = kind or rng.choice(
            ("count", "count", "add", "add", "repeat", "repeat", "chat", "chat", "chat")
        )
        if kind == "count":
            turn = data.count_question(rng)
            first, last = turn.answer.split(",")[0], turn.key.removesuffix(".")
            return Turn(self.word(rng, "count", first=first, last=last), turn.answer, turn.key)
        if kind == "add":
            left, right = rng.randrange(10), rng.randrange(10)
            return Turn(
                self.word(rng, "add", a=str(left), b=str(right)), str(left + right), key=str(left + right)
            )
        if kind == "repeat":
            words = " ".join(rng.choice(WORDS) for _ in range(rng.randrange(1, 5)))
            return Turn(self.word(rng, "repeat", words=words), words)
        kind = rng.choice({"chat": tuple(FIXED_OF_KIND), "plain": PLAIN_KINDS}.get(kind, (kind,)))
        return Turn(self.word(rng, kind), FIXED_OF_KIND[kind])

    def elsewhere(self, rng: random.Random) -> Turn:
        """A question that the model cannot answer."""
        kind = "written" if self._split == TRAINING and rng.random() < WRITTEN_RATIO else "all"
        return Turn(self._elsewhere.ask(rng, kind, self._split, {}, self._has_noise), ELSEWHERE_ANSWER)

    def without_media(self, rng: random.Random) -> Turn:
        """A question about media that were not sent."""
        fact = (rng.choice(SHAPES), rng.choice(COLOUR_NAMES))
        kind = rng.randrange(4)
        if kind == 0:
            question = self.image(rng, *fact).question
        elif kind == 1:
            question = self.video(rng, *fact, rng.choice(DIRECTIONS)).question
        elif kind == 2:
            question = self.sound(rng, [rng.choice(WORDS)]).question
        else:
            other = (rng.choice(SHAPES), rng.choice(COLOUR_NAMES))
            question = rng.choice(
                (self.both(rng, *fact, [rng.choice(WORDS)]), self.images(rng, [fact, other]))
            ).question
        return Turn(question, NO_MEDIA_ANSWER)

    def drill(self, rng: random.Random) -> Turn:
        """A question of yes or no, or how many, behind the fact that decides it, without media."""
        facts = [
            (rng.choice(SHAPES), rng.choice(COLOUR_NAMES)) for _ in range(rng.choice((1, 1, 1, 1, 2, 3)))
        ]
        words = [rng.choice(WORDS) for _ in range(rng.choice((1, 1, 2, 3)))]
        kind = rng.randrange(6)
        if len(facts) > 1:
            turn = self.images(rng, facts, rng.choice(("exist", "exist", "how_many", "same")))
        elif kind < 3:
            turn = self.claim(rng, facts[0])
        elif kind == 3:
            turn = self._heard(rng, words)
        elif kind == 4:
            turn = self.video(rng, *facts[0], rng.choice(DIRECTIONS), rng.choice(("moves", "at_all")))
        else:
            return data.comparison_drill(rng)
        fact = turn.answer.removesuffix(f", so{turn.key}")
        return Turn(f"{fact}. {turn.question}", turn.answer, turn.key)
