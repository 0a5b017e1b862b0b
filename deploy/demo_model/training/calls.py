"""Tools: functions that a prompt offers, calls whose argument the user says or the media show, and
results. Pure."""

import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from deploy.demo_model.training.data import COLOUR_NAMES, DIRECTIONS, SHAPES, WORDS, Turn
from deploy.demo_model.training.phrases import FOLDER, HELD_OUT, TRAINING, asides, said_otherwise, typed

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
_FILE = tomllib.loads((FOLDER / "tools.toml").read_text())
SYLLABLES, CITIES, CITIES_HELD_OUT = _FILE["syllables"], _FILE["cities"], _FILE["cities_held_out"]
SAID_RESULTS = _FILE["results"]
VALUE = "{value}"  # where the value goes; {v} is a verb in the parts that training draws
NEW_PART_RATIO = 0.35  # of the names of functions in training
STRANGE_RATIO = 0.4  # of the cities and texts that training copies
CONSONANTS = (
    *"bcdfghjklmnpqrstvwxyz", "ch", "sh", "th", "st", "br", "gr", "kr", "pl", "sl", "tr", "kh", "nd", "rk",
    "ll", "ss",
)  # fmt: skip
VOWELS = (*"aaeeiioouuy", "ai", "ea", "ee", "ie", "oo", "ou", "ue")
ENDINGS = ("", "", *"dhklmnrstxz", "ck", "ng", "nt", "rd", "sk", "ff", "rg", "lm", "ns")


@dataclass(frozen=True)
class ToolKind:
    """Functions with the same argument, and how people ask for them; `from_media`: without saying the
    value. Only training draws what is in `more_names` and `more_from_media`."""

    names: Sequence[str]
    parameters: Sequence[str]
    asked: Sequence[str]
    held_out: Sequence[str]
    from_media: Sequence[str]
    more_names: Sequence[str]
    more_from_media: Sequence[str] = ()


TOOL_KINDS = {name: ToolKind(**kind) for name, kind in _FILE["kinds"].items()}


@dataclass(frozen=True)
class Tool:
    """A function that the prompt offers."""

    name: str
    parameters: tuple[str, ...]

    @property
    def line(self) -> str:
        """Returns it as the chat template shows it."""
        return f"{self.name}({', '.join(self.parameters)})\n"

    def function(self) -> dict:
        """Returns it as a request offers it."""
        properties = {name: {"type": "string"} for name in self.parameters}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        return {"type": "function", "function": {"name": self.name, "parameters": parameters}}

    def call(self, *values: str) -> str:
        """The answer that calls it."""
        arguments = dict(zip(self.parameters, values, strict=True))
        return f"{CALL_BEGIN}\n{json.dumps({'name': self.name, 'arguments': arguments})}\n{CALL_END}"


def new_name(rng: random.Random) -> str:
    """A word, a name or an identifier of syllables: it can only be copied."""
    parts = [
        "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2, 2))))
        if rng.random() < 0.6
        else "".join(rng.choices(ascii_lowercase, k=rng.randrange(2, 8)))
        for _ in range(rng.choice((1, 1, 2)))
    ]
    if rng.random() < 0.2:
        parts.append(str(rng.randrange(1000)))
    return rng.choice((str.lower, str.lower, str.capitalize, str.upper))(
        rng.choice(("_", "-", "")).join(parts)
    )


def draw_tool(rng: random.Random, kind: str, split: str = TRAINING) -> Tool:
    """A function of a kind; in training some names have a part that nothing has."""
    kinds = TOOL_KINDS[kind]
    name = rng.choice([*kinds.names, *kinds.more_names] if split == TRAINING else kinds.names)
    if split == TRAINING and rng.random() < NEW_PART_RATIO:
        name = rng.choice((f"{name}_{new_name(rng).lower()}", f"{new_name(rng).lower()}_{name}"))
    return Tool(name, (rng.choice(TOOL_KINDS[kind].parameters),))


def draw_tools(
    rng: random.Random, needed: Tool | None, without: str = "", split: str = TRAINING
) -> tuple[Tool, ...]:
    """The needed function among some of other kinds, in any order: up to two, in training three."""
    kinds = [kind for kind in TOOL_KINDS if kind != without]
    counts = (0, 1, 2, 2, 2, 3) if split == TRAINING else (0, 1, 1, 2)
    others = [
        draw_tool(rng, kind, split) for kind in rng.sample(kinds, rng.choice(counts if needed else (1, 1, 2)))
    ]
    tools = [*others, needed] if needed else others
    rng.shuffle(tools)
    return tuple(tools)


def draw_name(rng: random.Random, split: str = TRAINING) -> str:
    """A city, or a name that nothing has: arguments must be copied."""
    if split == HELD_OUT:
        return rng.choice(CITIES_HELD_OUT)
    if rng.random() < 0.35:
        return rng.choice(CITIES)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.choice((2, 2, 3)))).capitalize()


def draw_strange_name(rng: random.Random) -> str:
    """A name of one or two words with any letters, vowels and consonants in turn."""
    words = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        parts = [rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(rng.choice((1, 2, 2, 3)))]
        words.append("".join(parts) + rng.choice(ENDINGS))
    return " ".join(words).title()


def draw_value(rng: random.Random, kind: str, split: str = TRAINING) -> str:
    """An argument that the user says."""
    if split == TRAINING and kind in ("text", "city") and rng.random() < STRANGE_RATIO:
        name = draw_strange_name(rng)
        return name if kind == "city" else rng.choice((name.lower(), f"{rng.choice(WORDS)} {name.lower()}"))
    if kind == "text":
        return " ".join(
            rng.choice(WORDS) if rng.random() < 0.7 else draw_name(rng).lower()
            for _ in range(rng.randrange(1, 4))
        )
    if kind == "city":
        return draw_name(rng, split)
    return rng.choice({"colour": COLOUR_NAMES, "direction": DIRECTIONS, "shape": SHAPES}[kind])


def asked_call(rng: random.Random, kind: str, tool: Tool, split: str = TRAINING) -> Turn:
    """A call whose argument the user says."""
    value = draw_value(rng, kind, split)
    text = rng.choice(TOOL_KINDS[kind].asked if split == TRAINING else TOOL_KINDS[kind].held_out)
    if split == TRAINING:
        text = asides().expand(rng, text.replace("{v}", VALUE))
    if split == TRAINING and kind not in ("text", "city"):  # their values are copied to the end of the line
        text = said_otherwise(rng, text, has_asides=True)
    text = typed(rng, text) if kind != "text" else text
    return Turn(text.replace("{v}", value).replace(VALUE, value), tool.call(value))


def media_call(rng: random.Random, kind: str, tool: Tool, value: str, split: str = TRAINING) -> Turn:
    """A call whose argument the media show."""
    kinds = TOOL_KINDS[kind]
    if split != TRAINING:
        return Turn(typed(rng, rng.choice(kinds.from_media)), tool.call(value))
    text = asides().expand(rng, rng.choice([*kinds.from_media, *kinds.more_from_media]))
    return Turn(typed(rng, said_otherwise(rng, text, has_asides=True)), tool.call(value))


def draw_result(rng: random.Random) -> str:
    """What a function returned."""
    if rng.random() < 0.25:
        return json.dumps(
            {
                rng.choice(("result", "weather", "status", "temperature")): rng.choice(
                    (rng.randrange(40), rng.choice(SAID_RESULTS))
                )
            }
        )
    return (
        rng.choice(SAID_RESULTS)
        if rng.random() < 0.5
        else " ".join(
            rng.choice((rng.choice(WORDS), str(rng.randrange(100)), draw_name(rng)))
            for _ in range(rng.randrange(1, 4))
        )
    )


def result_answer(result: str) -> str:
    """How the model tells it."""
    return f"The tool says: {result}"
