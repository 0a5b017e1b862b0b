"""The law of forced text: with every form of tokenizer, the tokens that a grammar forces decode to the wanted
text, byte for byte."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from cluster.types.structure import Structure
from tests.fakes.structures import (
    allowed,
    demo_vocabulary,
    matcher_of,
    of_choices,
    of_grammar,
    of_regex,
    of_schema,
)

END = "</s>"
ADDED = (
    AddedToken("<tool_call>"),
    AddedToken("<mask>", lstrip=True, rstrip=True),
    AddedToken("  ", normalized=True),
    AddedToken("yes", lstrip=True, rstrip=True),
)
TEXTS = (
    "Cafe\u0301 Vie\u0323\u0302t",  # as macOS writes names of files
    "\u1112\u1161\u11ab",  # jamo
    "\u212b \ufb01 \uff21",  # compatibility characters
    "ABC Def",
    " two  blanks ",
    "a\tb\r\nc",
    "\u4e16\u754c",
    "\u2581a",  # SentencePiece writes a blank so
    "<tool_call>x</s> <mask> y",
    "no yes no",
)
NFKC = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
SPACES = normalizers.Replace(" ", "\u2581")
PREPEND = normalizers.Prepend("\u2581")


def byte_level(normalizer=None, adds_space: bool = False) -> Tokenizer:
    """GPT-2's kind."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: idx for idx, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    tokenizer.decoder = decoders.ByteLevel()
    return _with(tokenizer, normalizer)


def byte_fallback(normalizer=None, pre_tokenizer=None) -> Tokenizer:
    """SentencePiece's kind."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    pieces = [*"\u2581abcdefnosxytwABCD\u00e9\u4e16", "\u2581a", "\u2581t"]
    vocab |= {piece: 257 + idx for idx, piece in enumerate(pieces)}
    merges = [("\u2581", "a"), ("\u2581", "t")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    return _with(tokenizer, normalizer)


def _with(tokenizer: Tokenizer, normalizer) -> Tokenizer:
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens(list(ADDED))
    return tokenizer


FORMS = {
    "byte-level": byte_level(),
    "byte-level, NFC": byte_level(normalizers.NFC()),
    "byte-level, NFKC, lower case": byte_level(NFKC),
    "byte-level, space in front": byte_level(adds_space=True),
    "byte fallback, Llama 2": byte_fallback(normalizers.Sequence([PREPEND, SPACES])),
    "byte fallback, Gemma": byte_fallback(SPACES, pre_tokenizers.Split(" ", "merged_with_previous")),
    "byte fallback, Metaspace first": byte_fallback(
        None, pre_tokenizers.Metaspace("\u2581", "first", split=False)
    ),
    "byte fallback, Metaspace always": byte_fallback(None, pre_tokenizers.Metaspace("\u2581", "always")),
    "byte fallback, NFKC, strip": byte_fallback(
        normalizers.Sequence([NFKC, normalizers.Strip(), PREPEND, SPACES])
    ),
}


def forced_bytes(structure: Structure, vocabulary: Vocabulary) -> bytes:
    """Of an answer that its structure leaves no choice."""
    matcher, token_ids = Matcher(compile_structure(structure, vocabulary), vocabulary), []
    while not matcher.is_complete:
        forced = matcher.drafts((), 8)
        assert matcher.legal(forced) == forced
        for token_id in forced or matcher.allowed()[:1].tolist():
            assert token_id in matcher.allowed()
            matcher.accept(token_id)
            token_ids.append(token_id)
    return vocabulary.native.decode_bytes(token_ids)


@pytest.mark.parametrize("form", FORMS)
def test_forced_tokens_decode_to_the_wanted_bytes(form: str):
    tokenizer = FORMS[form]
    end = tokenizer.token_to_id(END)
    assert end is not None
    vocabulary = Vocabulary(VocabularySource(tokenizer.to_str(), 512, (end,)))
    for text in TEXTS:
        assert forced_bytes(of_choices(text), vocabulary) == text.encode(), text


@pytest.mark.parametrize("text", TEXTS)
def test_names_and_values_of_json_are_held_byte_for_byte(text: str):
    schema = {
        "type": "object",
        "properties": {text: {"const": text}},
        "required": [text],
        "additionalProperties": False,
    }
    answer = forced_bytes(of_schema(schema, is_compact=True), demo_vocabulary())
    assert json.loads(answer) == {text: text}
    assert (
        forced_bytes(of_schema({"enum": [text]}), demo_vocabulary())
        == json.dumps(text, ensure_ascii=False).encode()
    )


def test_a_special_token_is_a_token_by_its_name_and_text_in_quotes():
    by_name = of_grammar('start: <|im_start|> "<|im_end|>" /<.im_start.>/ // <|im_end|>')
    matcher = matcher_of(by_name)
    assert allowed(matcher) == [1023]
    matcher.accept(1023)
    assert 1014 not in allowed(matcher) and 1023 not in allowed(matcher)
    assert forced_bytes(of_regex("<[|]im_end[|]>"), demo_vocabulary()) == b"<|im_end|>"


def test_a_model_that_names_no_end_token_gets_a_usual_one():
    tokenizer = byte_level()
    vocabulary = Vocabulary(VocabularySource(tokenizer.to_str(), 512, ()))
    assert vocabulary.end_id == tokenizer.token_to_id(END)


def test_added_tokens_that_are_text_are_allowed_as_text():
    tokenizer = byte_level()
    end = tokenizer.token_to_id(END)
    assert end is not None
    vocabulary = Vocabulary(VocabularySource(tokenizer.to_str(), 512, (end,)))
    matcher = Matcher(compile_structure(of_regex("(?s:.*)"), vocabulary), vocabulary)
    may_come = set(matcher.allowed().tolist())
    assert tokenizer.token_to_id("yes") in may_come and tokenizer.token_to_id("<tool_call>") not in may_come
