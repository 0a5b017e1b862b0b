from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from cluster.text.pieces import TokenPieces

SAMPLE = "Grüße, 世界! 👩‍👩‍👧 naïve café\n\tdef f(x): return x"


def test_the_pieces_of_a_byte_level_tokenizer_are_the_text(text, tokenizer):
    token_ids = tokenizer.encode(SAMPLE)
    pieces = [text.pieces.of(token_id) for token_id in token_ids]
    assert b"".join(pieces).decode() == SAMPLE
    assert any(b"\xf0" in piece and len(piece) < 4 for piece in pieces)  # a part of a character
    special = tokenizer.eos_token_id
    assert text.pieces.of(special).decode() == tokenizer.decode([special])
    assert text.pieces.of(10**6) == b""  # the model may have more tokens than the tokenizer


def test_pieces_keep_their_space_and_bytes_of_a_fallback():
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: 257 + idx for idx, piece in enumerate(["a", "▁", "▁the", "é"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)  # type: ignore[assignment]
    pieces = TokenPieces(tokenizer.decode, tokenizer.id_to_token, 257)
    assert [pieces.of(i) for i in (259, 260, 0xF0 + 1, 0x41 + 1)] == [b" the", "é".encode(), b"\xf0", b"A"]


def test_a_word_is_found_at_a_beginning_and_behind_a_space(text, tokenizer):
    for word in ("red", " red"):
        found = text.word_ids([word])
        assert {tokenizer.decode(list(ids)).strip() for ids in found} == {"red"}
        bare, spaced = (tokenizer.encode(each) for each in ("red", " red"))
        assert set(found) == ({tuple(bare), tuple(spaced)} if len(bare) == len(spaced) else {tuple(bare)})
