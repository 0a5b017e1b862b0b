"""Block hashes: equal content, equal names; different media, different names from there on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.kvcache.hashing import block_hashes
from cluster.types.media import MediaGeometry, MediaSpan, Modality
from cluster.types.request import Prompt

PLACEHOLDER = 99


def image(name: str, offset: int, num_tokens: int) -> MediaSpan:
    return MediaSpan(Modality.IMAGE, name, offset, MediaGeometry(num_tokens))


def prompt_with(name: str, before: int, inside: int, after: int) -> Prompt:
    tokens = (*range(before), *[PLACEHOLDER] * inside, *range(after))
    return Prompt(tokens, (image(name, before, inside),))


def test_only_full_blocks_have_hashes():
    assert len(block_hashes(Prompt(tuple(range(11))), 4)) == 2


def test_the_salt_and_the_block_size_separate_caches():
    prompt = Prompt(tuple(range(8)))
    assert (
        len({block_hashes(prompt, 4)[0], block_hashes(prompt, 4, b"x")[0], block_hashes(prompt, 8)[0]}) == 3
    )


def test_blocks_that_start_at_different_rows_of_one_image_differ():
    one, two = block_hashes(prompt_with("a", 0, 8, 0), 4)
    shifted = Prompt((PLACEHOLDER,) * 4, (MediaSpan(Modality.IMAGE, "a", -4, MediaGeometry(8)),))
    assert one != two
    assert block_hashes(shifted, 4)[0] != one


def test_two_short_images_in_one_block_are_not_one_swapped_pair():
    tokens = (PLACEHOLDER,) * 4
    ab = Prompt(tokens, (image("a", 0, 2), image("b", 2, 2)))
    ba = Prompt(tokens, (image("b", 0, 2), image("a", 2, 2)))
    assert block_hashes(ab, 4) != block_hashes(ba, 4)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 8))
def test_other_media_change_every_hash_from_the_block_where_the_span_starts(
    before, inside, after, block_size
):
    one = block_hashes(prompt_with("one", before, inside, after), block_size)
    two = block_hashes(prompt_with("two", before, inside, after), block_size)
    first = before // block_size
    assert one[:first] == two[:first]
    assert all(a != b for a, b in zip(one[first:], two[first:], strict=True))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40), st.integers(1, 8))
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(left, right, block_size):
    one, two = block_hashes(Prompt(tuple(left)), block_size), block_hashes(Prompt(tuple(right)), block_size)
    for i, (a, b) in enumerate(zip(one, two, strict=False), start=1):
        assert (a == b) == (left[: i * block_size] == right[: i * block_size])
