"""Prompts that an engine computes for another worker, stepped by hand."""

import math
from contextlib import nullcontext
from types import SimpleNamespace

import msgspec
import pytest
import torch

from cluster.engine.sequence import TokenSequence
from cluster.engine.timing import Part
from cluster.scheduling.budget import StepBudget
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.messages import Failed, FeatureGranted, FinishReason, Tokens
from cluster.types.request import Prompt
from tests.fakes.engines import DOOR, FEATURE_LAYOUT, TIMEOUT_S, Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import UNPLACEABLE_TOKEN, item_value, make_item, make_request


@pytest.fixture
def rig():
    return Rig()


def only_to(relay, *names):
    """Messages to the others are held back."""
    for name in names:
        while relay.to_worker[name]:
            relay.send_one(name)


def events(rig):
    return [e for m in rig.prefill.said if isinstance(m, Tokens) for e in m.events]


def test_text_before_the_first_item_is_computed_while_its_embeddings_are_missing(rig, relay):
    relay.start(make_request("r", 3, [make_item("a", 5)]), [make_item("a", 5)])
    only_to(relay, "prefill")
    rig.turn(3)
    assert rig.prefill.engine.load().num_queued_units == 6
    relay.play()
    assert relay.stories["r"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("fixed_s", "other", "num_left"),
    [(5e-4, 0, 6), (5e-3, 0, 9), (5e-3, 8, 6)],
    ids=["a token takes a millisecond", "a step takes as long as five tokens", "another prompt is computed"],
)
def test_a_little_text_before_an_item_has_no_step_of_its_own(rig, relay, fixed_s, other, num_left):
    """It would read the weights twice, and the item would wait for the step."""
    for num_tokens in (1, 64, 1, 64):
        rig.prefill.engine.planner.budget.observe(num_tokens, 0, fixed_s + 1e-3 * num_tokens)
    item = make_item("a", 5)
    story = relay.start(make_request("r", 3, [item]), [item])
    if other:
        relay.start(make_request("other", other), [])
    only_to(relay, "prefill")
    rig.turn(3)
    assert rig.prefill.engine.load().num_queued_units == num_left
    assert rig.prefill.engine.requests.get("r").stopwatch.part is Part.MEDIA
    relay.play()
    assert story.finish_reason is FinishReason.LENGTH and story.tokens == [50, 51, 52, 53]


def test_a_prompt_that_the_model_cannot_place_is_refused_and_the_engine_lives_on(rig, relay):
    item = make_item("a", 5)
    request = make_request("odd", 3, [item])
    odd = msgspec.structs.replace(
        request.prompt, token_ids=(UNPLACEABLE_TOKEN, *request.prompt.token_ids[1:])
    )
    relay.start(msgspec.structs.replace(request, prompt=odd), [item])
    relay.play()
    assert relay.stories["odd"].error == "this prompt has no positions"
    relay.start(make_request("next", 3), [])
    relay.play()
    assert relay.stories["next"].finish_reason is FinishReason.LENGTH


def test_a_cached_prefix_makes_embeddings_unneeded_and_the_late_encoder_is_harmless(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    relay.play()
    relay.start(make_request("s", 12, [item]), [item])  # other text behind the item
    only_to(relay, "prefill", "decode")
    rig.turn(6)
    (event,) = [e for e in events(rig) if e.request_id == "s"]
    assert event.num_cached_tokens == 8
    assert rig.features.num_open_leases == 1
    relay.play()
    assert relay.stories["s"].finish_reason is FinishReason.LENGTH


def test_decode_hears_that_the_first_token_ended_the_answer_only_after_the_door(rig, relay):
    story = relay.start(make_request("r", 9, max_tokens=1))
    relay.send_one("decode")
    rig.turn()
    while rig.decode.said:
        relay.hear_one("decode")
    only_to(relay, "prefill")
    rig.turn(10)  # the door is slow to read
    assert events(rig)[0].finish_reason is FinishReason.LENGTH
    assert not any(isinstance(message, Failed) for message in rig.decode.said)
    relay.play()
    assert story.tokens == [50] and story.error is None


def test_a_request_that_fails_while_it_waits_for_blocks_is_not_admitted_later(rig, relay):
    rig.bad_items.add("bad")
    bad = make_item("bad", 4)
    relay.start(make_request("long", 80))
    only_to(relay, "prefill")
    rig.turn()
    story = relay.start(make_request("r", 30, [bad]), [bad])
    relay.play(2)
    relay.play()
    assert story.error is not None and relay.stories["long"].error is None
    assert relay.stories["long"].finish_reason is FinishReason.LENGTH


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers():
    rig = Rig(decode_blocks=40)
    relay = Relay(rig)
    story = relay.start(make_request("r", 24 * 4))
    relay.play(5)
    assert story.error is not None and "97 tokens" in story.error and "holds 96" in story.error
    rig.audit()


def test_the_deadline_names_what_was_waited_for(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    only_to(relay, "prefill")
    rig.turn(2)
    rig.clock.at += TIMEOUT_S
    rig.turn()
    (failed,) = [m for m in rig.prefill.said if isinstance(m, Failed)]
    assert "embeddings" in failed.error.message


def test_a_returned_grant_frees_its_room_at_once(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item]), [item])
    only_to(relay, "prefill")
    relay.to_worker["encoder"].clear()
    relay.land("r")
    relay.play(5)
    assert rig.features.num_used_blocks == 0 and rig.features.num_open_leases == 0


def share(rig, relay, *names):
    """One item in prompts that have no prefix in common; their starts have come to prefill."""
    item = make_item("a", 5)
    for number, name in enumerate(names):
        relay.start(make_request(name, 3 + number, [item]), [item])
    only_to(relay, "prefill")


def test_an_item_with_text_between_its_rows_is_kept_until_the_last_of_them_is_computed(rig, relay):
    item = make_item("a", 9)
    relay.start(make_request("r", 3, [item], is_split=True), [item])
    only_to(relay, "prefill")
    rig.prefill.step()  # the text before it
    sequence = rig.prefill.engine.requests["r"].main
    assert sequence.num_ready_tokens == sequence.num_computed_tokens == 3
    relay.play(1)
    while sequence.num_computed_tokens < sequence.prompt.media[0].end:
        assert rig.features.copies
        relay.play(1)
    assert not rig.features.copies
    relay.play()
    assert relay.stories["r"].finish_reason is FinishReason.LENGTH


def test_of_two_items_whose_rows_alternate_the_missing_one_stops_the_prompt_at_its_first_row():
    clip = PlacedMedia(Modality.VIDEO, "clip", ((2, 2), (6, 2)), MediaGeometry(4))
    sound = PlacedMedia(Modality.AUDIO, "sound", ((4, 2), (8, 1)), MediaGeometry(3))
    sequence = TokenSequence("r/0", Prompt(tuple(range(10)), (clip, sound)))
    assert sequence.num_ready_tokens == 2
    sequence.items_arrived([0])
    assert sequence.num_ready_tokens == 4
    sequence.computed(6)
    assert sequence.num_ready_tokens == 8
    sequence.items_arrived([1])
    assert sequence.num_ready_tokens == 10


def test_requests_that_show_one_item_share_its_embeddings(rig, relay):
    share(rig, relay, "r", "s")
    assert rig.features.num_used_blocks == 2 and rig.features.num_open_leases == 1
    relay.play()
    assert rig.encoder.transfer_engine.sent.raw_bytes == 2 * FEATURE_LAYOUT.block_bytes
    assert [relay.stories[name].tokens for name in "rs"] == [[50, 51, 52, 53]] * 2


def test_an_item_that_came_for_another_request_is_ready_when_a_request_starts(rig, relay):
    keeper, told, row = ("keeper", 0), [], 0
    rig.features.reserve(keeper, "a", 5, TIMEOUT_S, told.append)
    lease_id = told[0].grant.lease_id
    for rows in rig.features.rows(keeper, 0, 5):
        rows.copy_(torch.tensor([[item_value("a", row + i)] for i in range(len(rows))]))
        row += len(rows)
    rig.features.close_lease(lease_id, completed=True)
    rig.prefill.feature_transfer_engine.revoke(lease_id, "the test has brought them itself")
    share(rig, relay, "r")
    rig.prefill.step()
    assert rig.prefill.engine.requests["r"].main.items_ready == {0}
    relay.play()
    assert relay.stories["r"].finish_reason is FinishReason.LENGTH
    rig.features.release(keeper)


def test_a_lease_that_fails_harms_no_request(rig, relay):
    share(rig, relay, "r", "s", "t")
    relay.play(1)
    (lease_id,) = {copy.lease_id for copy in rig.features.copies.values()}
    rig.prefill.feature_transfer_engine.revoke(lease_id, "the writer is dead")
    relay.play()
    assert [relay.stories[name].finish_reason for name in "rst"] == [FinishReason.LENGTH] * 3


def test_a_door_that_goes_away_takes_its_requests_along_without_a_lease_for_each(rig, relay):
    share(rig, relay, "r", "s", "t")
    rig.prefill.step()
    granted = [m for m in rig.prefill.said if isinstance(m, FeatureGranted)]
    rig.prefill.tell(rig.prefill.engine.drop_door, DOOR)
    rig.prefill.step()
    assert [m for m in rig.prefill.said if isinstance(m, FeatureGranted)] == granted
    assert not rig.features.copies


def test_the_negative_prompt_is_computed_while_embeddings_are_missing(rig, relay):
    item = make_item("a", 5)
    relay.start(make_request("r", 3, [item], negative=7), [item])
    only_to(relay, "prefill")
    rig.turn(3)
    assert rig.prefill.engine.load().num_queued_units == 6  # the item and the text behind it
    relay.play()
    assert relay.stories["r"].tokens == [50, 51, 52, 53]


def test_first_tokens_come_for_every_choice_at_once(rig, relay):
    relay.start(make_request("r", 9, num_choices=3))
    only_to(relay, "prefill")
    rig.turn(2)
    assert [event.choice_idx for event in events(rig)] == [0, 1, 2]
    relay.play()


def test_prompts_that_came_during_a_step_go_in_the_order_in_which_their_clients_asked(rig, relay):
    """Both are looked at together; the second had waited at its door, but less than the first has waited
    here."""
    rig.prefill.engine.planner.budget = StepBudget(1.0, 1, 4)
    first, second = make_request("first", 4), make_request("second", 4)
    relay.start(first)
    only_to(relay, "prefill")
    rig.clock.at += 2.0
    relay.start(msgspec.structs.replace(second, waited_s=1.0))
    only_to(relay, "prefill")
    rig.turn(6)
    assert [event.request_id for event in events(rig)] == ["first", "second"]
    relay.play()


def test_the_load_that_is_told_after_a_step_counts_what_came_during_it(rig, relay):
    loads = []
    outbox = rig.prefill.outbox
    flush = outbox.flush

    def told(load=None):
        loads.append(load and load.num_queued_units)
        flush(load)

    outbox.flush = told
    relay.start(make_request("running", 8))
    only_to(relay, "prefill")
    rig.prefill.inbox.run()
    relay.start(make_request("comes during the step", 5))
    only_to(relay, "prefill")
    rig.prefill.engine.step()  # as the loop does: without what waits in the inbox
    assert loads == [9, None]
    rig.prefill.step()
    assert loads[2:] == [2, None], "four of its six tokens are cached"
    relay.play()


def test_a_text_prompt_does_not_wait_for_a_long_media_prompt(rig, relay):
    item = make_item("a", 20)
    relay.start(make_request("long", 40, [item]), [item])
    relay.play(3)
    relay.start(make_request("short", 4))
    only_to(relay, "prefill")
    rig.turn(2)
    assert "short" in [event.request_id for event in events(rig)]
    assert "long" not in [event.request_id for event in events(rig)]
    relay.play()


@pytest.mark.parametrize(("mean_slice_s", "usual"), [(math.inf, 20), (0.25, 5), (1e-3, 1)])
def test_layers_of_a_long_prompt_last_no_longer_than_their_slice(mean_slice_s, usual):
    """Five hundredths of a second a token, one layer; the largest step has 20 tokens."""
    sizes = []

    def run(works, *rest):
        sizes.append(sum(work.num_tokens for work in works))
        cpu_slots.ran_s = 0.05 * sizes[-1]
        return compute(works, *rest)

    cpu_slots = SimpleNamespace(
        acquire=lambda exclusive_s: nullcontext(),
        yield_between_layers=lambda: None,
        mean_slice_s=mean_slice_s,
        ran_s=0.0,
        busy_s=0.0,
    )
    rig = Rig(cpu_slots=cpu_slots)
    relay, runner = Relay(rig), rig.runners["prefill"]
    rig.prefill.engine.planner.budget = StepBudget(1.0, 1, 20)
    compute, runner.run = runner.run, run
    relay.start(make_request("long", 80))
    relay.play(100)
    assert relay.stories["long"].finish_reason is FinishReason.LENGTH
    assert sizes[0] == 1 and max(sizes) == usual
    assert sum(sizes) == 81
    assert sizes.count(usual) >= 2
    relay.finish()
