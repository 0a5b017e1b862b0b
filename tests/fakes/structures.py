"""Answers under a structure without a model: tokens are drawn from the masks alone."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from cluster.types.structure import Structure, StructureKind

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
NUM_IDS, END = 1024, 1014  # of the demo model; its tokenizer has 14 ids less


@cache
def demo_source(num_ids: int = NUM_IDS) -> VocabularySource:
    return VocabularySource((MODEL / "tokenizer.json").read_text(), num_ids, (END,))


@cache
def demo_vocabulary() -> Vocabulary:
    return Vocabulary(demo_source())


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL / "tokenizer.json"))


def ids_of(text: str) -> list[int]:
    return demo_tokenizer().encode(text).ids


def text_of(token_ids: list[int]) -> str:
    return demo_tokenizer().decode(token_ids)


def of_schema(schema: Any, **more: bool) -> Structure:
    return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema), "response_format", **more)


def of_regex(pattern: str) -> Structure:
    return Structure(StructureKind.REGEX, pattern, "guided_regex")


def of_choices(*choices: str) -> Structure:
    return Structure(StructureKind.CHOICE, json.dumps(choices), "guided_choice")


def of_grammar(text: str) -> Structure:
    return Structure(StructureKind.GRAMMAR, text, "guided_grammar")


def matcher_of(structure: Structure, ends: tuple[int, ...] = (END,)) -> Matcher:
    vocabulary = demo_vocabulary()
    return Matcher(compile_structure(structure, vocabulary), vocabulary, ends, structure.param)


def allowed(matcher: Matcher) -> list[int]:
    """The tokens that may come next."""
    return matcher.allowed().tolist()


@cache
def _ending() -> frozenset[int]:
    """Tokens that end something in JSON."""
    return frozenset({END, *(i for i in range(END) if {*'"}]'} & {*text_of([i])})})


def random_answer(matcher: Matcher, seed: int, max_tokens: int = 400) -> str | None:
    """The text of an answer; None: it was not complete after so many tokens. Tokens that end something are
    preferred, or few answers would end."""
    dice, tokens = random.Random(seed), []
    while len(tokens) < max_tokens:
        choice = allowed(matcher)
        ending = [token_id for token_id in choice if token_id in _ending()]
        token_id = dice.choice(ending if ending and dice.random() < 0.4 else choice)
        matcher.accept(token_id)
        if token_id != END:
            tokens.append(token_id)
        if matcher.is_complete:
            return text_of(tokens)
    return None


def check_valid(schema: Any, text: str) -> None:
    """By a library that has no part in making answers. Raises jsonschema.ValidationError or ValueError."""
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
