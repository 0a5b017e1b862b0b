"""Wordings: many ways to ask for one thing, from small grammars in `wordings/*.toml`.

A template has choices `(a|b)`, parts `{pic}` that are templates themselves, and slots that the question
fills. Templates for training and for evaluation are different lists: what evaluation asks was never trained,
though both share parts such as "the picture" and the noise of typing. Takes everything random from the
generator that it is given; thread-safe.
"""

import functools
import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "wordings"
TRAINING, HELD_OUT, OTHERS = "train", "held_out", "others"
PREFIXES = (
    "Please ",
    "Hey, ",
    "Hi, ",
    "OK, ",
    "So, ",
    "Quick question: ",
    "Hello, ",
    "Now ",
    "Next: ",
    "Question: ",
)
SUFFIXES = (", please", " please", ", thanks", " now")
LOWER_RATIO, BARE_RATIO, TYPO_RATIO, PREFIX_RATIO, SUFFIX_RATIO, LOUD_RATIO = (
    0.22,
    0.25,
    0.06,
    0.08,
    0.04,
    0.03,
)
SMALL_WORDS = frozenset(
    [
        "a",
        "an",
        "the",
        "is",
        "are",
        "was",
        "do",
        "does",
        "did",
        "of",
        "in",
        "it",
        "you",
        "can",
        "could",
        "would",
        "me",
        "that",
        "to",
        "there",
        "i",
    ]
)
NEGATIONS = frozenset({"no", "not", "never", "without", "wrong", "missing", "mistaken", "absent"})
WITHOUT_ASIDES = frozenset({"greet", "who", "thanks", "bye"})
LOOSE_RATIO, SYNONYM_RATIO, BEFORE_RATIO, AFTER_RATIO, SLIP_RATIO = 0.2, 0.15, 0.1, 0.06, 0.05
MIN_WORDS_OF_SLIP = 6
CASE_RATIOS, SHORT_CASE_RATIOS = (0.1, 0.05), (0.3, 0.25)  # all in small letters, all in capitals
_CHOICE = re.compile(r"\(([^()]*)\)")
_FRAMED = re.compile(r"@(\w+) (.*)")
_CONTENT = re.compile(r"\{(?:np|s)\}")
_NAME = re.compile(r"\{(\w+)\}")
_WORD = re.compile(r"(?<![{\w])[A-Za-z]{4,}(?![\w}])")
_ANY_WORD = re.compile(r"(?<![{\w])\w+(?![\w}])")
_SPACES = re.compile(r"  +")


class Wordings:
    """The grammars of one file."""

    def __init__(self, document: Mapping[str, Mapping[str, Sequence[str]]]) -> None:
        common = common_document()
        self._parts: Mapping[str, Any] = {**common["parts"], **document.get("parts", {})}
        self._frames = common["frames"]
        self._splits = {name: document[name] for name in (TRAINING, HELD_OUT, OTHERS) if name in document}

    @classmethod
    @functools.cache
    def load(cls, name: str) -> "Wordings":
        """The file `wordings/{name}.toml`."""
        return cls(tomllib.loads((FOLDER / f"{name}.toml").read_text()))

    @property
    def splits(self) -> frozenset[str]:
        """The lists that the file has."""
        return frozenset(self._splits)

    def kinds(self, split: str) -> tuple[str, ...]:
        """What a split can ask."""
        return tuple(self._splits[split])

    def templates(self, kind: str, split: str) -> Sequence[str]:
        """The templates of a kind."""
        return self._splits[split][kind]

    def ask(
        self, rng: random.Random, kind: str, split: str, slots: Mapping[str, str], has_noise: bool = True
    ) -> str:
        """One wording, with its slots filled. `has_noise`: typed as people type."""
        text = self.draw(rng, kind, split)
        is_loose = split == TRAINING and has_noise
        if is_loose:
            text = said_otherwise(rng, text, has_asides=kind not in WITHOUT_ASIDES)
        text = typed(rng, text) if has_noise else text[:1].upper() + text[1:]
        is_capital = text[:1].isupper() or (text[:1] == "{" and rng.random() > LOWER_RATIO)
        is_copied = "{words}" in text
        text = _NAME.sub(lambda match: slots[match[1]], text)
        text = text[:1].upper() + text[1:] if is_capital else text
        if is_copied or not is_loose:
            return text
        return in_one_case(rng, text, *(SHORT_CASE_RATIOS if kind in WITHOUT_ASIDES else CASE_RATIOS))

    def draw(self, rng: random.Random, kind: str, split: str) -> str:
        """One wording as it is written, with its slots open."""
        text = rng.choice(self.templates(kind, split))
        framed = _FRAMED.fullmatch(text)
        if framed:
            text = _CONTENT.sub(lambda _: framed[2], rng.choice(self._frames[framed[1]]))
        return self.expand(rng, text)

    def expand(self, rng: random.Random, text: str) -> str:
        """Returns a text without choices and parts; slots stay."""
        while True:
            chosen = _CHOICE.sub(lambda match: rng.choice(match[1].split("|")), text)
            named = _NAME.sub(self._part, chosen)
            if named == text:
                return _SPACES.sub(" ", text).strip()
            text = named

    def _part(self, match: re.Match[str]) -> str:
        return self._parts.get(match[1], match[0])


@functools.cache
def common_document() -> dict[str, Any]:
    """The file `wordings/common.toml`."""
    return tomllib.loads((FOLDER / "common.toml").read_text())


def common_words() -> list[str]:
    """The nouns, verbs and adjectives that `common.toml` has."""
    parts = common_document()["parts"]
    return [word for name in ("w", "v", "adj", "noun") for word in parts[name].strip("()").split("|")]


def everyday_things() -> tuple[str, ...]:
    """Animals and things that `common.toml` has."""
    parts = common_document()["parts"]
    return tuple(word for name in ("animal", "noun") for word in parts[name].strip("()").split("|"))


@functools.cache
def asides() -> Wordings:
    """Sentences that may stand before or behind any question."""
    return Wordings(common_document())


def said_otherwise(rng: random.Random, text: str, has_asides: bool) -> str:
    """The same question in other words: synonyms, small words, sentences beside it. Slots stay."""
    synonyms = common_document()["synonyms"]
    text = _ANY_WORD.sub(
        lambda match: (
            rng.choice(synonyms[match[0].lower()])
            if match[0].lower() in synonyms and rng.random() < SYNONYM_RATIO
            else match[0]
        ),
        text,
    )
    if "{words}" in text:
        return text
    if rng.random() < LOOSE_RATIO:
        text = loosened(rng, text)
    if rng.random() < SLIP_RATIO:
        text = slipped(rng, text)
    if has_asides and rng.random() < BEFORE_RATIO:
        text = f"{asides().draw(rng, 'before', TRAINING)} {text[:1].upper()}{text[1:]}"
    if has_asides and rng.random() < AFTER_RATIO:
        text = f"{text} {asides().draw(rng, 'after', TRAINING)}"
    return text


def in_one_case(rng: random.Random, text: str, lower_ratio: float, upper_ratio: float) -> str:
    """Now and then all in small letters, or all in capitals."""
    draw = rng.random()
    if draw < lower_ratio:
        return text.lower()
    return text.upper() if draw > 1 - upper_ratio else text


def loosened(rng: random.Random, text: str) -> str:
    """With a small word left out, or with one more that changes nothing."""
    words = text.split(" ")
    small = [idx for idx, word in enumerate(words) if word.lower() in SMALL_WORDS]
    if len(small) > 1 and rng.random() < 0.5:
        del words[rng.choice(small)]
    else:
        words.insert(rng.randrange(len(words)), asides().draw(rng, "fillers", TRAINING))
    return " ".join(words)


def slipped(rng: random.Random, text: str) -> str:
    """Returns the text with one word of a longer question exchanged for one that has nothing to do with it.
    Slots stay."""
    words = text.split(" ")
    plain = [idx for idx, word in enumerate(words) if word.isalpha() and word.lower() not in NEGATIONS]
    if len(words) < MIN_WORDS_OF_SLIP or not plain:
        return text
    words[rng.choice(plain)] = asides().expand(rng, rng.choice(("{w}", "{v}", "{adj}")))
    return " ".join(words)


def typed(rng: random.Random, text: str) -> str:
    """The text with a capital letter, or as people in a hurry type it. Slots stay as they are."""
    if text[-1] in "?." and rng.random() < SUFFIX_RATIO:
        text = text[:-1] + rng.choice(SUFFIXES) + text[-1]
    if rng.random() < PREFIX_RATIO:
        text = rng.choice(PREFIXES) + text[0].lower() + text[1:]
    text = text[0].upper() + text[1:]
    if rng.random() < LOWER_RATIO:
        text = "".join(
            part if part.startswith("{") else part.lower() for part in re.split(r"(\{\w+\})", text)
        )
    if text[-1] in "?." and rng.random() < BARE_RATIO:
        text = text[:-1]
    elif rng.random() < LOUD_RATIO:
        text += rng.choice("?!.")
    return mistyped(rng, text) if rng.random() < TYPO_RATIO else text


def mistyped(rng: random.Random, text: str) -> str:
    """With a letter of one word swapped, doubled or left out."""
    words = list(_WORD.finditer(text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    middle = rng.choice((text[at + 1] + text[at], text[at] + text[at] + text[at + 1], text[at + 1]))
    return text[:at] + middle + text[at + 2 :]
