from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from cluster.text.detokenizer import MAX_WINDOW, Detokenizer

SAMPLE = "Grüße, 世界! 👩‍👩‍👧 naïve café\n\tdef f(x): return x\n" + "🙂🙃" * 5
RELAXED = settings(max_examples=75, deadline=None, derandomize=True)


def streamed(text, token_ids, sizes):
    detokenizer, out, position = text.detokenizer(), "", 0
    for size in sizes:
        out += detokenizer.push(token_ids[position : position + size])
        position += size
    return out + detokenizer.push(token_ids[position:]) + detokenizer.flush()


@RELAXED
@given(content=st.text(max_size=60), sizes=st.lists(st.integers(0, 4), max_size=80))
def test_any_split_gives_the_text_back(text, tokenizer, content, sizes):
    token_ids = tokenizer.encode(content, split_special_tokens=True)
    assert streamed(text, token_ids, sizes) == tokenizer.decode(token_ids)


@RELAXED
@given(token_ids=st.lists(st.integers(0, 1023), max_size=120), sizes=st.lists(st.integers(0, 3), max_size=80))
def test_any_tokens_give_what_decoding_them_at_once_gives(text, tokenizer, token_ids, sizes):
    expected = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert streamed(text, token_ids, sizes) == expected


def test_no_half_character_is_ever_shown(text, tokenizer):
    detokenizer = text.detokenizer()
    pieces = [detokenizer.push([token_id]) for token_id in tokenizer.encode(SAMPLE)]
    assert "".join(pieces) == SAMPLE
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def byte_fallback():
    """A tokenizer like Llama 2's: characters outside the vocabulary become one token per byte."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: 257 + idx for idx, piece in enumerate(["▁", "▁a", "▁the", "a", "b", "é", "世"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    return tokenizer


@RELAXED
@given(content=st.text("▁abé世界🙂🙃ñ", max_size=40), sizes=st.lists(st.integers(0, 4), max_size=80))
def test_characters_of_several_byte_tokens_are_shown_whole(byte_fallback, content, sizes):
    token_ids = byte_fallback.encode(content).ids
    detokenizer, pieces, position = Detokenizer(byte_fallback.decode, ()), [], 0
    for size in [*sizes, len(token_ids)]:
        pieces.append(detokenizer.push(token_ids[position : position + size]))
        position += size
    assert "".join(pieces) == byte_fallback.decode(token_ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_token_costs_the_same_at_the_end_of_a_long_text(tokenizer):
    """Counted in tokens that are decoded."""
    rng, num_decoded = random.Random(1), []

    def decode(token_ids: list[int]) -> str:
        num_decoded.append(len(token_ids))
        return tokenizer.decode(token_ids)

    detokenizer = Detokenizer(decode, ())
    for _ in range(5000):
        detokenizer.push([rng.randrange(1000)])
    assert max(num_decoded) <= MAX_WINDOW + 1
    assert 5000 <= len(num_decoded) <= 2 * 5000
