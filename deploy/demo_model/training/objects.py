"""JSON objects about media, as a question asks for them. Pure.

The keys come as the question names them, or as a schema demands that the model does not see; then only
the values count.
"""

import functools
import json
import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.demo_model.training.claims import listed
from deploy.demo_model.training.phrases import FOLDER, TRAINING, asides, said_otherwise, typed

NAMED_RATIO = 0.6
NAMES_OF_VALUE = {
    "shape": ("shape", "shape", "shape", "form", "object", "figure"),
    "color": ("color", "color", "color", "colour"),
    "direction": ("direction", "direction", "movement", "motion"),
    "words": ("words", "words", "spoken_words"),
    "word": ("word",),
    "text": ("text", "transcript", "transcription"),
    "description": ("description", "caption"),
    "count": ("count", "number"),
}


@dataclass(frozen=True)
class Known:
    """What a prompt's media show, as values of JSON; `it` is what people call them."""

    it: Sequence[str]
    values: dict[str, object]
    default: Sequence[str]


def known_image(shape: str, colour: str) -> Known:
    """Returns what is known of one image."""
    values = {"shape": shape, "color": colour, "description": f"The image shows a {colour} {shape}."}
    return Known(("the image", "this picture", "the photo"), values, ("shape", "color"))


def known_video(shape: str, colour: str, direction: str) -> Known:
    """Returns what is known of one clip."""
    description = f"The video shows a {colour} {shape} moving {direction}."
    values = {"shape": shape, "color": colour, "direction": direction, "description": description}
    return Known(("the video", "this clip", "the video"), values, ("shape", "color", "direction"))


def known_sound(words: Sequence[str]) -> Known:
    """Returns what is known of one sound."""
    values = {"words": list(words), "text": " ".join(words), "count": len(words)}
    return Known(
        ("the sound", "this audio", "the recording"),
        values | ({"word": words[0]} if len(words) == 1 else {}),
        ("words",),
    )


@dataclass(frozen=True)
class JsonTurn:
    """`is_forced`: a schema that the model does not see demands the keys; only the values are its own."""

    question: str
    answer: str
    is_forced: bool = False


@functools.cache
def forms() -> dict[str, dict[str, list[str]]]:
    """The file `wordings/objects.toml`."""
    return tomllib.loads((FOLDER / "objects.toml").read_text())


def json_turn(rng: random.Random, known: Known, question: str, split: str = TRAINING) -> JsonTurn:
    """An object about the media. `question`: one about them, which may go before."""
    if rng.random() > NAMED_RATIO:
        slots = {"q": question, "it": rng.choice(known.it)}
        text = _form(rng, "plain", split).format(**slots)
        return JsonTurn(typed(rng, text), json.dumps({kind: known.values[kind] for kind in known.default}))
    most = min(4, len(known.values))
    least = rng.choice((1, 2, most)) if split == TRAINING else 1
    kinds = rng.sample(list(known.values), rng.randrange(least, most + 1))
    if rng.random() < 0.5:
        kinds = [kind for kind in kinds if kind != "description"] or ["description"]
    names = [rng.choice(NAMES_OF_VALUE[kind]) for kind in kinds]
    answer = json.dumps({name: known.values[kind] for name, kind in zip(names, kinds, strict=True)})
    if split == TRAINING and rng.random() < 0.35:
        return JsonTurn(question, answer, is_forced=True)
    quoted = [f'"{name}"' for name in names] if rng.random() < 0.25 else names
    keys = rng.choice(("{}", "{}", "the keys {}", "the {}", "keys {}")).format(
        listed(quoted) if rng.random() < 0.6 else ", ".join(quoted)
    )
    form = json.dumps(dict.fromkeys(names, "..."))
    text = _form(rng, "named", split)
    slots = {"q": question, "it": rng.choice(known.it), "keys": keys, "form": form, "object": form}
    text = text.format(**slots)
    return JsonTurn(text[:1].upper() + text[1:] if rng.random() < 0.8 else text.lower(), answer)


def _form(rng: random.Random, kind: str, split: str) -> str:
    text = rng.choice(forms()[split][kind])
    if split != TRAINING:
        return text
    text = asides().expand(rng, text.replace("{form}", "{object}"))  # `form` is the name of a part, too
    return said_otherwise(rng, text, has_asides=True)


def images_json_turn(rng: random.Random, facts: Sequence[tuple[str, str]]) -> JsonTurn:
    """An array of objects, one for each image."""
    question = rng.choice(
        (
            "Describe the images as JSON.",
            "Give me JSON about the images.",
            "Describe each image as JSON.",
            "JSON please.",
        )
    )
    rows = [{"shape": shape, "color": colour} for shape, colour in facts]
    return JsonTurn(question, json.dumps({"images": rows}), is_forced=rng.random() < 0.3)
