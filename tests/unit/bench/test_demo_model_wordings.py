"""How the demo model is asked: the grammars of wordings, and that evaluation asks what training does not."""

import json
import random
import re

import pytest

from deploy.demo_model.training import calls, objects
from deploy.demo_model.training.claims import (
    UNKNOWN_COLOURS,
    UNKNOWN_COLOURS_HELD_OUT,
    UNKNOWN_SHAPES,
    UNKNOWN_SHAPES_HELD_OUT,
    Claim,
    draw_unknown_claim,
)
from deploy.demo_model.training.data import COLOUR_NAMES, DIRECTIONS, SHAPES, WORDS, Turn
from deploy.demo_model.training.phrases import HELD_OUT, OTHERS, TRAINING, Wordings
from deploy.demo_model.training.questions import ELSEWHERE_ANSWER, NO_MEDIA_ANSWER, Asker, unknown_names

ROUNDS = 300


def draw_turns(rng: random.Random, split: str) -> list[Turn]:
    """One of each kind of question."""
    asker = Asker(split)
    facts = [(rng.choice(SHAPES), rng.choice(COLOUR_NAMES)) for _ in range(3)]
    words = [rng.choice(WORDS) for _ in range(rng.randrange(1, 4))]
    return [
        asker.image(rng, *facts[0]),
        asker.claim(rng, facts[0]),
        asker.choice(rng, *facts[0]),
        asker.follow_up(rng, *facts[0]),
        asker.images(rng, facts),
        asker.images(rng, facts[:2]),
        asker.video(rng, *facts[0], rng.choice(DIRECTIONS)),
        asker.sound(rng, words),
        asker.both(rng, *facts[0], words),
        asker.text(rng),
    ]


@pytest.mark.parametrize("split", [TRAINING, HELD_OUT])
def test_every_wording_has_its_slots_filled(split: str) -> None:
    rng = random.Random(0)
    for _ in range(ROUNDS):
        for turn in draw_turns(rng, split):
            assert turn.question and not set("{}|()") & set(turn.question), turn
            assert turn.answer.endswith(turn.key)


def bare(text: str) -> str:
    return text.lower().strip("?.! ")


@pytest.mark.parametrize(
    ("name", "rounds"),
    [
        ("questions", 1000),
        ("elsewhere", 10_000),
        pytest.param("questions", 6000, marks=pytest.mark.slow),
        pytest.param("elsewhere", 100_000, marks=pytest.mark.slow),
    ],
)
def test_evaluation_asks_in_wordings_that_training_does_not_have(name: str, rounds: int) -> None:
    rng, wordings = random.Random(0), Wordings.load(name)
    for kind in wordings.kinds(TRAINING):
        trained = {bare(wordings.draw(rng, kind, TRAINING)) for _ in range(rounds)}
        for split in {HELD_OUT, OTHERS} & wordings.splits:
            if kind in wordings.kinds(split):
                asked = {bare(wordings.draw(rng, kind, split)) for _ in range(40)}
                assert not trained & asked, (split, kind)


def test_two_hundred_unrelated_questions_get_the_same_sentence() -> None:
    asked = Wordings.load("elsewhere").templates("all", HELD_OUT)
    assert len({bare(text) for text in asked}) == 200
    rng = random.Random(0)
    assert {Asker(HELD_OUT).elsewhere(rng).answer for _ in range(50)} == {ELSEWHERE_ANSWER}


def test_yes_and_no_are_equally_likely_and_follow_from_the_fact() -> None:
    rng, asker = random.Random(0), Asker()
    turns = [asker.claim(rng, (rng.choice(SHAPES), rng.choice(COLOUR_NAMES))) for _ in range(4000)]
    num_yes = sum(turn.key == " yes." for turn in turns)
    assert 0.46 < num_yes / len(turns) < 0.54
    assert all(turn.key in (" yes.", " no.") for turn in turns)


def test_a_claim_holds_for_what_it_names_only() -> None:
    claim = Claim("both", "circle", "red")
    assert claim.holds(("circle", "red"))
    assert not claim.holds(("circle", "blue")) and not claim.holds(("triangle", "red"))
    assert Claim("shape", "circle", "red").holds(("circle", "blue"))
    assert claim.fact(("triangle", "blue")) == "It is a blue triangle"
    assert (
        claim.facts([("circle", "red"), ("triangle", "blue")])
        == "The shapes are red circle and blue triangle"
    )


def test_a_shape_or_color_that_no_image_has_is_denied_by_its_fact() -> None:
    rng, facts = random.Random(0), [(shape, colour) for shape in SHAPES for colour in COLOUR_NAMES]
    for _ in range(ROUNDS):
        fact = rng.choice(facts)
        claim = draw_unknown_claim(rng, [fact])
        assert claim.shape in UNKNOWN_SHAPES or claim.colour in UNKNOWN_COLOURS
        assert not claim.holds(fact)
        assert fact[0] != "rectangle" or claim.shape != "square", "a rectangle may be one"
    assert Claim("shape", "octagon", "red").slots(rng)["x"] == "an octagon"


def test_only_training_asks_for_shapes_and_colors_that_no_image_has() -> None:
    rng = random.Random(0)
    for split in (TRAINING, HELD_OUT):
        asked = " ".join(Asker(split).claim(rng, ("circle", "red")).question for _ in range(ROUNDS))
        words = set(re.findall(r"\w+", asked.lower()))
        assert bool(words & {*UNKNOWN_SHAPES, *UNKNOWN_COLOURS}) == (split == TRAINING)


def test_training_never_has_the_unknown_names_that_evaluation_asks_for() -> None:
    rng, trained = random.Random(0), set()
    for _ in range(20_000):
        for names in unknown_names(rng):
            trained.add(rng.choice(names))
    held_out = {*UNKNOWN_SHAPES_HELD_OUT, *UNKNOWN_COLOURS_HELD_OUT}
    assert not trained & (held_out | {*SHAPES, *COLOUR_NAMES})
    assert len(trained) > 3000, "most of them occur once"


def test_a_question_about_media_that_were_not_sent_says_so() -> None:
    rng = random.Random(0)
    assert {Asker().without_media(rng).answer for _ in range(50)} == {NO_MEDIA_ANSWER}


def test_json_answers_are_objects_with_the_known_values() -> None:
    rng = random.Random(0)
    known = objects.known_video("circle", "red", "left")
    values = {str(value) for value in known.values.values()}
    for _ in range(ROUNDS):
        answer = json.loads(objects.json_turn(rng, known, "What happens?").answer)
        assert answer and {str(value) for value in answer.values()} <= values


def test_a_call_names_an_offered_tool_and_copies_its_argument() -> None:
    rng = random.Random(0)
    for kind in calls.TOOL_KINDS:
        for _ in range(50):
            tool = calls.draw_tool(rng, kind)
            assert tool in calls.draw_tools(rng, tool, without=kind)
            turn = calls.asked_call(rng, kind, tool)
            call = json.loads(turn.answer.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            assert call["name"] == tool.name and list(call["arguments"]) == list(tool.parameters)
            assert call["arguments"][tool.parameters[0]] in turn.question
