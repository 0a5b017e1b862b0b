"""The demo model's sample makers: deterministic, balanced, and free of torch and espeak-ng."""

import random
import subprocess
import sys

import numpy as np

from deploy.demo_model.training import data


def test_the_same_seed_gives_the_same_image() -> None:
    first, second = (data.make_image(random.Random(3)) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1:] == second[1:]


def test_the_same_seed_gives_the_same_video() -> None:
    first, second = (data.make_video(random.Random(3)) for _ in range(2))
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1:] == second[1:]


def test_an_image_has_the_asked_size_shape_and_colour() -> None:
    pixels, shape, colour = data.make_image(random.Random(0), (80, 96), "circle", "teal")
    assert (pixels.shape, pixels.dtype, shape, colour) == ((80, 96, 3), np.uint8, "circle", "teal")
    different = np.abs(pixels.astype(int) - pixels[0, 0].astype(int)).sum(-1) > 60
    assert 0.02 < different.mean() < 0.6


def test_a_video_moves_the_way_it_says_at_every_length() -> None:
    rng = random.Random(0)
    for num_frames in range(4, 17):
        for direction in data.DIRECTIONS:
            frames, *_ = data.make_video(rng, num_frames, direction=direction)
            assert frames.shape == (num_frames, 64, 64, 3)
            rows, columns = zip(*(centre_of_shape(frame) for frame in (frames[0], frames[-1])), strict=True)
            moved = {"down": rows[1] - rows[0], "right": columns[1] - columns[0]}
            moved |= {"up": -moved["down"], "left": -moved["right"]}
            assert max(moved, key=moved.__getitem__) == direction


def centre_of_shape(frame: np.ndarray) -> tuple[float, float]:
    different = np.abs(frame.astype(int) - frame[0, 0].astype(int)).sum(-1) > 60
    rows, columns = np.nonzero(different)
    return float(rows.mean()), float(columns.mean())


def test_yes_and_no_are_equally_likely_whatever_the_wording() -> None:
    rng = random.Random(0)
    answers: dict[str, list[bool]] = {}
    for _ in range(8000):
        for turn in yes_no_turns(rng):
            stem = " ".join(turn.question.split()[:2])
            answers.setdefault(stem, []).append(turn.answer.endswith("so yes."))
    for stem, is_yes in answers.items():
        assert abs(np.mean(is_yes) - 0.5) < 0.04, stem


def yes_no_turns(rng: random.Random) -> list[data.Turn]:
    return [
        data.yes_no_question(rng, rng.choice(data.SHAPES), rng.choice(data.COLOUR_NAMES)),
        data.video_yes_no_question(rng, rng.choice(data.DIRECTIONS)),
        data.audio_yes_no_question(rng, rng.choice(data.WORDS)),
        data.comparison_drill(rng),
    ]


def test_yes_follows_exactly_when_the_named_fact_is_the_asked_one() -> None:
    rng = random.Random(0)
    for _ in range(1000):
        for turn in yes_no_turns(rng):
            fact, word = turn.answer.removesuffix(".").split(", so ")
            asked = turn.question.split(". ")[-1].removesuffix("?").removesuffix(" said").split()[-1]
            assert (fact.split()[-1] == asked) == (word == "yes"), turn
            assert turn.answer.endswith(turn.key)


def test_a_drill_states_the_fact_that_its_answer_names() -> None:
    rng = random.Random(0)
    for _ in range(300):
        turn = data.comparison_drill(rng)
        assert turn.answer.startswith(turn.question.split(". ")[0] + ", so ")


def test_counts_have_three_to_eight_numbers_up_to_twelve_and_end_with_their_key() -> None:
    assert (3, 9) in data.COUNTS
    rng = random.Random(0)
    for _ in range(500):
        turn = data.count_question(rng)
        numbers = [int(number) for number in turn.answer.removesuffix(".").split(", ")]
        assert turn.question == f"Count from {numbers[0]} to {numbers[-1]}."
        assert numbers == list(range(numbers[0], numbers[-1] + 1))
        assert 3 <= len(numbers) <= 8 and numbers[-1] <= 12
        assert turn.key == f"{numbers[-1]}."


def test_every_question_has_one_answer_in_the_documented_form() -> None:
    rng = random.Random(0)
    for _ in range(300):
        shape, colour = rng.choice(data.SHAPES), rng.choice(data.COLOUR_NAMES)
        facts = (f"It is a {shape}", f"It is {colour}")
        decisions = {f"{fact}, so {word}." for fact in facts for word in ("yes", "no")}
        plain = {shape, colour, data.describe_image(shape, colour)}
        assert data.image_question(rng, shape, colour).answer in plain | decisions
        assert data.image_question(rng, shape, colour, is_early=True).answer in plain | {"yes", "no"}
        assert data.text_question(rng).answer


def test_the_sample_makers_import_neither_torch_nor_espeak() -> None:
    program = "import sys, deploy.demo_model.training.data; sys.exit('torch' in sys.modules or 'espeakng_loader' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
