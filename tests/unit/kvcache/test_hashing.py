"""Block hashes: equal content, equal names; different media, different names from there on."""

from __future__ import annotations

from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cluster.kvcache.hashing import BlockHashes, block_hashes
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.request import Prompt

PLACEHOLDER = 99


def image(name: str, offset: int, num_tokens: int) -> PlacedMedia:
    return PlacedMedia(Modality.IMAGE, name, ((offset, num_tokens),), MediaGeometry(num_tokens))


def prompt_with(name: str, before: int, inside: int, after: int) -> Prompt:
    tokens = (*range(before), *[PLACEHOLDER] * inside, *range(after))
    return Prompt(tokens, (image(name, before, inside),))


def test_only_full_blocks_have_hashes():
    assert len(block_hashes(Prompt(tuple(range(11))), 4)) == 2


def test_the_salt_and_the_block_size_separate_caches():
    prompt, salted = Prompt(tuple(range(8))), Prompt(tuple(range(8)), cache_salt="x")
    assert len({block_hashes(prompt, 4)[0], block_hashes(salted, 4)[0], block_hashes(prompt, 8)[0]}) == 3


def test_blocks_that_start_at_different_rows_of_one_image_differ():
    one, two = block_hashes(prompt_with("a", 0, 8, 0), 4)
    shifted = Prompt((PLACEHOLDER,) * 4, (image("a", -4, 8),))
    assert one != two
    assert block_hashes(shifted, 4)[0] != one


def test_text_between_the_rows_of_an_image_names_the_blocks_behind_it_by_the_row_they_start_with():
    geometry = MediaGeometry(8)
    tokens = (PLACEHOLDER,) * 4 + (1, 2, 3, 4) + (PLACEHOLDER,) * 4
    one = Prompt(tokens, (PlacedMedia(Modality.IMAGE, "a", ((0, 4), (8, 4)), geometry),))
    other_rows = Prompt(tokens, (PlacedMedia(Modality.IMAGE, "a", ((-2, 6), (8, 2)), geometry),))
    two_images = Prompt(tokens, (image("a", 0, 4), image("b", 8, 4)))
    hashes = [block_hashes(prompt, 4) for prompt in (one, other_rows, two_images)]
    assert hashes[0][:2] == hashes[2][:2]
    assert len({each[2] for each in hashes}) == 3


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=5))
def test_every_placeholder_token_has_one_row_and_rows_come_in_order(block_size, gaps_and_lengths):
    ranges, end = [], 0
    for gap, length in gaps_and_lengths:
        ranges.append((end + gap, length))
        end += gap + length
    item = PlacedMedia(Modality.IMAGE, "a", tuple(ranges), MediaGeometry(sum(length for _, length in ranges)))
    tokens = [token for offset, length in ranges for token in range(offset, offset + length)]
    rows = {}
    for start in range(0, end, block_size):
        for token, row, count in item.pieces(start, start + block_size):
            rows |= {token + i: row + i for i in range(count)}
    assert list(rows.items()) == list(zip(tokens, range(item.geometry.num_tokens), strict=True))


def test_two_short_images_in_one_block_are_not_one_swapped_pair():
    tokens = (PLACEHOLDER,) * 4
    ab = Prompt(tokens, (image("a", 0, 2), image("b", 2, 2)))
    ba = Prompt(tokens, (image("b", 0, 2), image("a", 2, 2)))
    assert block_hashes(ab, 4) != block_hashes(ba, 4)


@settings(max_examples=100)
@given(st.integers(0, 20), st.integers(1, 20), st.integers(0, 20), st.integers(1, 8))
def test_other_media_change_every_hash_from_the_block_where_the_span_starts(
    before, inside, after, block_size
):
    one = block_hashes(prompt_with("one", before, inside, after), block_size)
    two = block_hashes(prompt_with("two", before, inside, after), block_size)
    first = before // block_size
    assert one[:first] == two[:first]
    assert all(a != b for a, b in zip(one[first:], two[first:], strict=True))


@settings(max_examples=100)
@given(st.lists(st.integers(0, 5), max_size=40), st.lists(st.integers(0, 5), max_size=40), st.integers(1, 8))
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(left, right, block_size):
    one, two = block_hashes(Prompt(tuple(left)), block_size), block_hashes(Prompt(tuple(right)), block_size)
    for i, (a, b) in enumerate(zip(one, two, strict=False), start=1):
        assert (a == b) == (left[: i * block_size] == right[: i * block_size])


def test_generated_placeholders_are_not_named_like_the_rows_of_an_item():
    """A resumed prompt whose answer holds the placeholder's id, and one that shows an item at that place."""
    shown = prompt_with("a", 4, 4, 0)
    generated = Prompt(shown.token_ids, num_generated=4)
    assert block_hashes(shown, 4)[0] == block_hashes(generated, 4)[0]
    assert block_hashes(shown, 4)[1] != block_hashes(generated, 4)[1]
    assert block_hashes(generated, 4) == block_hashes(Prompt(shown.token_ids), 4)


def named_by_hand(prompt: Prompt, block_size: int) -> list[bytes]:
    """What the module says, from the row that stands at each token."""
    row_at: dict[int, tuple[PlacedMedia, int]] = {}
    for item in prompt.media:
        tokens = [token for offset, length in item.ranges for token in range(offset, offset + length)]
        row_at |= {token: (item, row) for row, token in enumerate(tokens)}
    salt = prompt.cache_salt.encode() + block_size.to_bytes(8, "little")
    names = [blake2b(salt, digest_size=32).digest()]
    for start in range(0, len(prompt.token_ids) // block_size * block_size, block_size):
        content = b"".join(t.to_bytes(8, "little") for t in prompt.token_ids[start : start + block_size])
        for item in prompt.media:
            runs: list[list[int]] = []  # position in the block, first row, number of rows
            for place in range(block_size):
                shown, row = row_at.get(start + place, (None, 0))
                if shown is not item:
                    continue
                if runs and place == runs[-1][0] + runs[-1][2]:
                    runs[-1][2] += 1
                else:
                    runs.append([place, row, 1])
            name = f"{item.modality}:{item.media_hash}".encode()
            for run in runs:
                content += b"".join(n.to_bytes(8, "little") for n in (len(name), *run)) + name
        names.append(blake2b(names[-1] + content, digest_size=32).digest())
    return names[1:]


placements = st.lists(
    st.tuples(
        st.sampled_from(list(Modality)),
        st.sampled_from("ab"),
        st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=3),
    ),
    max_size=3,
)


def prompt_of(placed, num_behind: int, salt: str) -> Prompt:
    """Items of all kinds with text between their rows, and `num_behind` tokens of text at the end."""
    media, end = [], 0
    for modality, name, gaps_and_lengths in placed:
        ranges = []
        for gap, length in gaps_and_lengths:
            ranges.append((end + gap, length))
            end += gap + length
        geometry = MediaGeometry(sum(length for _, length in ranges))
        media.append(PlacedMedia(modality, name, tuple(ranges), geometry))
    return Prompt(tuple(range(7, 7 + end + num_behind)), tuple(media), salt)


prompts = st.builds(prompt_of, placements, st.integers(0, 5), st.sampled_from(["", "salt"]))


@given(prompts, st.integers(1, 5))
def test_a_block_is_named_by_the_rows_that_stand_in_it(prompt, block_size):
    assert block_hashes(prompt, block_size) == named_by_hand(prompt, block_size)


answers = st.lists(st.lists(st.integers(0, 2**40), max_size=7), max_size=6)


@given(prompts, st.integers(1, 5), answers, answers)
def test_an_answer_is_hashed_as_it_grows_like_the_next_turns_prompt(prompt, block_size, answer, other_answer):
    hashes = BlockHashes(prompt, block_size)
    other = hashes.fork()

    def expected(steps: list[list[int]]) -> list[bytes]:
        said = tuple(token for tokens in steps for token in tokens)
        return block_hashes(replace(prompt, token_ids=prompt.token_ids + said), block_size)

    for i, tokens in enumerate(answer):
        hashes.extend(tokens)
        assert hashes.hashes == expected(answer[: i + 1])
    for tokens in other_answer:
        other.extend(tokens)
    assert other.hashes == expected(other_answer)
    assert hashes.hashes == expected(answer)


def test_a_clip_and_a_sound_of_one_name_are_not_one_item():
    tokens, geometry = (PLACEHOLDER,) * 4, MediaGeometry(4)
    clip, sound = (
        Prompt(tokens, (PlacedMedia(modality, "a", ((0, 4),), geometry),))
        for modality in (Modality.VIDEO, Modality.AUDIO)
    )
    assert block_hashes(clip, 4) != block_hashes(sound, 4)
