"""The decode engine, stepped by hand."""

import msgspec
import pytest

from cluster.types.messages import (
    Cancel,
    DecodeGranted,
    Failed,
    FinishReason,
    Measured,
    Preempted,
    PrefillTiming,
    ReturnGrant,
    StartDecode,
    Tokens,
)  # fmt: skip
from tests.fakes.engines import DOOR, MARGIN_S, TIMEOUT_S, Rig
from tests.fakes.relay import Relay
from tests.fakes.requests import make_item, make_request


@pytest.fixture
def rig():
    return Rig(decode_blocks=10)


@pytest.fixture
def relay(rig):
    relay = Relay(rig)
    yield relay
    relay.finish()


def ask_decode(rig, relay):
    """Prefill has blocks for every request that was started; decode hears of that and of nothing else."""
    while relay.to_worker["prefill"]:
        relay.send_one("prefill")
    rig.prefill.step()
    while rig.prefill.said:
        relay.hear_one("prefill")
    while relay.to_worker["decode"]:
        relay.send_one("decode")
    rig.decode.inbox.run()


def granted(rig):
    return [m for m in rig.decode.said if isinstance(m, DecodeGranted)]


def test_a_small_pool_serves_all_requests(rig, relay):
    for i in range(8):
        relay.start(make_request(f"r{i}", 9 + i, max_tokens=5))
        rig.clock.at += 0.01
    relay.play(200)
    assert [relay.stories[f"r{i}"].tokens for i in range(8)] == [[50, 51, 52, 53, 54]] * 8
    assert len(rig.ended) == len(set(rig.ended)) and {f"r{i}" for i in range(8)} <= set(rig.ended)


def test_no_request_overtakes_a_large_one(rig, relay):
    for request_id, num_tokens in (("a", 20), ("large", 30), ("small", 3)):
        relay.start(make_request(request_id, num_tokens))
        ask_decode(rig, relay)
        rig.clock.at += 0.1
    rig.turn(2)
    assert [message.request_id for message in granted(rig)] == ["a"]


def test_a_better_class_goes_first_and_media_no_sooner_than_text(rig, relay):
    for request_id, priority, items in (("text", 1, ()), ("media", 1, [make_item("a", 1)]), ("best", 0, ())):
        request = make_request(request_id, 24 - len(items), items)  # 7 blocks of 10
        relay.start(msgspec.structs.replace(request, priority=priority), items)
        ask_decode(rig, relay)
        rig.clock.at += 0.1
    order = []
    for _ in range(9):
        rig.turn()
        for message in granted(rig):
            order.append(message.request_id)
            rig.receive("decode", Cancel(message.request_id))
            rig.receive("decode", ReturnGrant(message.grant.lease_id))
        rig.decode.said.clear()
    assert order == ["best", "text", "media"]


def test_a_cancelled_grant_keeps_its_blocks_until_the_writer_has_spoken(rig, relay):
    relay.start(make_request("r", 20))
    ask_decode(rig, relay)
    rig.turn()
    rig.receive("decode", Cancel("r"))
    rig.turn(3)
    assert rig.pools["decode"].num_referenced > 0 and rig.ended == []
    rig.receive("decode", ReturnGrant(granted(rig)[0].grant.lease_id))
    rig.turn(2)
    assert rig.pools["decode"].num_referenced == 0 and rig.ended == ["r"]
    rig.decode.said.clear()


def test_kv_that_does_not_come_ends_the_request_by_name_and_its_blocks_with_the_lease(rig, relay):
    relay.start(make_request("r", 20))
    ask_decode(rig, relay)
    rig.turn()
    relay.to_worker["prefill"].clear()
    rig.clock.at += TIMEOUT_S
    rig.turn()
    (failed,) = [m for m in rig.decode.said if isinstance(m, Failed)]
    assert "the prompt's KV cache" in failed.error.message
    assert rig.pools["decode"].num_referenced > 0
    rig.clock.at += MARGIN_S
    rig.turn(2)
    assert rig.pools["decode"].num_referenced == 0
    rig.decode.said.clear()


@pytest.mark.parametrize("num_rounds", range(8))
@pytest.mark.parametrize("how", ["cancel", "drop"])
def test_leaving_at_any_moment_ends_the_request_once(rig, relay, num_rounds, how):
    relay.start(make_request("r", 12, max_tokens=5))
    relay.play(num_rounds)
    if how == "drop":
        for worker in rig.workers.values():
            worker.tell(worker.engine.drop_door, DOOR)
    relay.land("r")
    relay.play(10)
    rig.clock.at += TIMEOUT_S + MARGIN_S
    relay.play(3)
    assert rig.ended == (["r"] if num_rounds > 0 else [])  # before that decode has not heard of it


def test_a_stop_token_ends_the_answer(rig, relay):
    relay.start(make_request("r", 12, max_tokens=9, stop=(52,)))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51, 52]
    assert relay.stories["r"].finish_reason is FinishReason.STOP


def test_the_newest_is_preempted_when_blocks_run_out_and_all_answers_are_whole(rig, relay):
    for i in range(3):  # 3 × (2 prompt blocks + 5 of the answer) do not fit into 10
        relay.start(make_request(f"r{i}", 6, max_tokens=20))
    relay.play(300)
    assert rig.decode.engine.num_preempted > 0
    for i in range(3):
        assert relay.stories[f"r{i}"].tokens == list(range(50, 70))
        assert relay.stories[f"r{i}"].finish_reason is FinishReason.LENGTH


def test_the_oldest_is_never_preempted(rig, relay):
    relay.start(make_request("old", 6, max_tokens=20))
    relay.play(3)
    for i in range(4):
        rig.clock.at += 0.1
        relay.start(make_request(f"young{i}", 6, max_tokens=20))
    preempted = []
    for _ in range(300):
        rig.turn()
        preempted += [m.request_id for m in rig.decode.said if isinstance(m, Preempted)]
        relay.play(1)
    assert preempted and "old" not in preempted


def test_nothing_is_run_for_a_request_that_preempted_itself(rig, relay):
    """Two rows fill a step, so each request runs alone, and the newer one asks for the last blocks."""
    runner, sizes = rig.decode.engine._runner, []
    run = runner.run
    runner.run = lambda batch: sizes.append(len(batch)) or run(batch)
    relay.start(make_request("old", 6, max_tokens=12, num_choices=2))
    rig.clock.at += 0.1
    relay.start(make_request("new", 6, max_tokens=12, num_choices=2))
    relay.play(200)
    assert rig.decode.engine.num_preempted > 0
    assert set(sizes) == {1, 2} and relay.stories["new"].is_over


def test_choices_share_the_prompt_and_each_has_its_own_answer(rig, relay):
    story = relay.start(make_request("r", 8, max_tokens=5, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 2 + 3  # two full blocks shared, the third one copied
    relay.play()
    assert [line.tokens for line in story.lines] == [[50, 51, 52, 53, 54]] * 3


def test_a_choice_that_is_cancelled_leaves_the_others_alone(rig, relay):
    story = relay.start(make_request("r", 6, max_tokens=8, num_choices=3))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    rig.receive("decode", Cancel("r", 1))
    relay.play(1)
    assert rig.decode.engine.load().num_queued_units == 2
    relay.play()
    assert [len(line.tokens) for line in story.lines][::2] == [8, 8]
    assert len(story.lines[1].tokens) < 8 and rig.decode.engine.load().num_running == 0
    relay.land("r")


def test_choices_are_preempted_and_resumed_one_by_one(rig, relay):
    first = relay.start(make_request("a", 6, max_tokens=20))
    rig.clock.at += 0.1
    story = relay.start(make_request("r", 6, max_tokens=12, num_choices=2))
    relay.play(300)
    assert rig.decode.engine.num_preempted > 0
    assert first.tokens == list(range(50, 70))
    assert [line.tokens for line in story.lines] == [list(range(50, 62))] * 2


def test_a_negative_prompt_has_kv_of_its_own_and_counts_as_a_sequence(rig, relay):
    story = relay.start(make_request("r", 8, max_tokens=5, negative=5))
    while not rig.decode.engine.load().num_running:
        relay.play(1)
    assert rig.pools["decode"].num_referenced == 3 + 2
    assert rig.decode.engine.load().num_queued_units == 2
    relay.play()
    assert story.tokens == [50, 51, 52, 53, 54]


def test_a_pair_that_cannot_fit_is_refused_with_the_numbers(rig, relay):
    story = relay.start(make_request("r", 20, max_tokens=4, negative=20))
    relay.play(5)
    assert "52 tokens" in story.error and "holds 40" in story.error


def test_the_engine_does_not_sleep_on_blocks_that_the_last_runner_has_freed(rig, relay):
    """A step that ends its only request says that it has more to do, because a request may wait for the blocks."""
    engine, waits = rig.decode.engine, []
    step = engine.step
    engine.step = lambda: waits.append(step())
    relay.start(make_request("r", 8, max_tokens=2))
    relay.play()
    assert relay.stories["r"].tokens == [50, 51]
    assert waits.count(0) == 1  # the one step in which it ran, and ended


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 6, 7, 8, 15])  # but for one
@pytest.mark.parametrize("num_choices", [1, 3])
def test_a_prompt_computed_here_needs_no_prefill_worker(rig, relay, num_tokens, num_choices):
    story = relay.start(
        make_request("r", num_tokens, max_tokens=6, num_choices=num_choices), prefills_locally=True
    )
    relay.play()
    assert [line.tokens for line in story.lines] == [[50, 51, 52, 53, 54, 55]] * num_choices
    assert rig.ended == ["r"] and not rig.prefill.engine._requests


def test_a_prompt_is_computed_a_block_at_a_time_and_the_others_go_on(rig, relay):
    running = relay.start(make_request("old", 3, max_tokens=20), prefills_locally=True)
    relay.play(2)
    parts, compute = [], rig.decode.engine._local_prefill._runner.compute
    rig.decode.engine._local_prefill._runner.compute = lambda batch: parts.extend(batch) or compute(batch)
    story = relay.start(make_request("new", 18, max_tokens=2), prefills_locally=True)
    num_before = len(running.tokens)
    while not story.tokens:
        relay.play(1)
    assert [(part.start, len(part.token_ids)) for part in parts] == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 3)]
    assert len(running.tokens) - num_before == len(parts)


def test_short_prompts_share_a_local_prefill_step_and_go_before_long_ones(rig, relay):
    batches, compute = [], rig.decode.engine._local_prefill._runner.compute
    rig.decode.engine._local_prefill._runner.compute = lambda batch: (
        batches.append(len(batch)) or compute(batch)
    )
    for request_id, num_tokens in (("long", 15), ("a", 2), ("b", 0), ("c", 1)):
        relay.start(make_request(request_id, num_tokens, max_tokens=1), prefills_locally=True)
    relay.play(1)
    assert batches == [3] and sorted(rig.ended) == ["b", "c"]  # the first token of a is yet to be computed
    relay.play()
    assert all(story.tokens == [50] for story in relay.stories.values())


def test_a_first_token_does_not_wait_for_the_step_that_follows(rig, relay):
    relay.start(make_request("r", 3, max_tokens=5), prefills_locally=True)
    relay.send_one("decode")
    run, told = rig.decode.engine._runner.run, []
    rig.decode.engine._runner.run = lambda batch: told.extend(rig.decode.said) or run(batch)
    rig.decode.step()
    assert [event.token_ids for said in told for event in said.events] == [(50,)]


@pytest.mark.parametrize("num_rounds", range(9))
def test_a_prompt_computed_here_may_be_cancelled_at_any_moment(rig, relay, num_rounds):
    relay.start(make_request("r", 17, max_tokens=3, num_choices=2), prefills_locally=True)
    relay.play(num_rounds)
    rig.receive("decode", Cancel("r", 1))
    relay.play(1)
    relay.land("r")
    relay.play(2)
    assert rig.ended == ["r"] and rig.pools["decode"].num_referenced == 0


def test_prompts_computed_here_are_preempted_and_computed_again(rig, relay):
    for i in range(3):
        relay.start(make_request(f"r{i}", 6, max_tokens=20), prefills_locally=True)
    relay.play(300)
    assert rig.decode.engine.num_preempted > 0
    assert [relay.stories[f"r{i}"].tokens for i in range(3)] == [list(range(50, 70))] * 3


@pytest.mark.parametrize("choice_idx", [0, 1])
def test_blocks_are_kept_for_those_that_wait_no_longer_than_they_do(rig, relay, choice_idx):
    """A choice that leaves before the request has blocks was never counted among those that have."""
    relay.start(make_request("large", 30, max_tokens=2), prefills_locally=True)
    rig.clock.at += 0.1
    relay.start(make_request("r", 20, max_tokens=3, num_choices=2), prefills_locally=True)
    relay.play(1)
    rig.receive("decode", Cancel("r", choice_idx))
    relay.play(1)
    assert rig.decode.engine._num_admitted_sequences == 1
    relay.play()
    assert rig.decode.engine._num_admitted_sequences == 0


def test_a_prompt_that_waits_too_long_to_be_computed_fails_by_name(rig, relay):
    story = relay.start(make_request("r", 17), prefills_locally=True)
    relay.play(2)
    rig.clock.at += TIMEOUT_S
    relay.play(1)
    assert story.error == "decode waited too long for its turn to compute the prompt"


@pytest.mark.parametrize("changes", [{"items": [make_item("a", 3)]}, {"negative": 3}])
def test_what_decode_cannot_compute_is_not_begun(rig, relay, changes):
    story = relay.start(make_request("r", 6, **changes), prefills_locally=True)
    relay.play(2)
    assert "without a negative prompt" in story.error and rig.ended == ["r"]


def test_the_first_token_says_where_its_time_went(rig, relay):
    """Two seconds without blocks, a second in which another request has its last step; then three local prefill
    steps of a second, and between them two steps of another request."""
    relay.start(make_request("other", 19, max_tokens=3), prefills_locally=True)
    relay.start(make_request("third", 3, max_tokens=20), prefills_locally=True)
    while len(relay.stories["other"].tokens) < 2:
        relay.play(1)
    relay.start(make_request("r", 11, max_tokens=2), prefills_locally=True)
    relay.send_one("decode")
    rig.decode.inbox.run()
    rig.clock.at += 2.0
    runner = rig.decode.engine._runner
    for name in ("compute", "run"):
        original = getattr(runner, name)

        def timed(batch, original=original):
            rig.clock.at += 1.0
            return original(batch)

        setattr(runner, name, timed)
    for _ in range(8):
        rig.decode.step()
    events = [event for said in rig.decode.said if isinstance(said, Tokens) for event in said.events]
    first, second = [event for event in events if event.request_id == "r"]
    assert first.timing == PrefillTiming(blocks_s=3.0, queued_s=2.0, computing_s=3.0)
    assert second.timing is None and [first.token_ids, second.token_ids] == [(50,), (51,)]


def test_the_context_of_all_running_sequences_is_in_the_load(rig, relay):
    def expected() -> int:
        running = rig.decode.engine._running
        return sum(
            len(prompt.token_ids) + choice.num_generated - 1  # the last token's KV is not computed yet
            for request in running
            for choice in request.live_choices
            for prompt in request.request.prompts
        )

    relay.start(make_request("r", 6, max_tokens=10, num_choices=2))
    relay.start(make_request("guided", 4, max_tokens=9, negative=3))
    rig.clock.at += 0.1
    relay.start(make_request("new", 5, max_tokens=20))  # will be preempted
    seen = []
    for _ in range(100):
        relay.play(1)
        seen.append(rig.decode.engine.load().num_context_tokens)
        assert seen[-1] == expected()
    assert rig.decode.engine.num_preempted > 0 and max(seen) > 20 and seen[-1] == 0


def test_steps_are_learnt_by_their_sequences_and_told(rig, relay):
    run = rig.decode.engine._runner.run

    def slowly(batch):
        rig.clock.at += 0.25
        return run(batch)

    rig.decode.engine._runner.run = slowly
    relay.start(make_request("r", 6, max_tokens=8, num_choices=2))
    curves = []
    for _ in range(30):
        rig.turn()
        curves += [m.curves.decode for m in rig.decode.said if isinstance(m, Measured)]
        relay.play(1)
    assert curves and curves[-1].seconds(2, 8) == pytest.approx(0.25, rel=0.1)


def test_a_lost_door_takes_all_its_requests_along_and_no_other_doors(rig, relay):
    for n in range(3):
        relay.start(make_request(f"r{n}", 3, max_tokens=9), prefills_locally=True)
    relay.play(2)
    other = StartDecode(make_request("other", 3, max_tokens=9), TIMEOUT_S, prefills=True)
    rig.decode.tell(rig.decode.engine.start, DOOR + 1, other)
    relay.play(2)
    rig.decode.tell(rig.decode.engine.drop_door, DOOR)
    rig.decode.step()
    assert list(rig.decode.engine._requests) == ["other"] and sorted(rig.ended) == ["r0", "r1", "r2"]
    rig.decode.tell(rig.decode.engine.drop_door, DOOR + 1)
    rig.decode.step()
    assert rig.decode.engine.load().is_idle


@pytest.mark.parametrize(
    "ends", ["at its length", "by a stop token", "by a cancel", "by preemption", "at its first token"]
)
def test_speculation_forgets_every_choice_that_has_ended(rig, relay, ends):
    forgotten, begun, runner = [], set(), rig.decode.engine._runner
    run = runner.run
    runner.forget = lambda choice: forgotten.append(choice.request_id)
    runner.run = lambda batch: begun.update(c.request_id for r in batch for c in r.live_choices) or run(batch)
    stop = {"by a stop token": (52,), "at its first token": (50,)}.get(ends, ())
    for n in range(3 if ends == "by preemption" else 1):
        relay.start(make_request(f"r{n}", 6, max_tokens=9, num_choices=2, stop=stop))
        rig.clock.at += 0.1
    relay.play(4)
    if ends == "by a cancel":
        rig.receive("decode", Cancel("r0", 1))
        relay.play(1)
        assert forgotten == ["r0/1"]
        relay.land("r0")
    relay.play(300)
    assert begun <= set(forgotten) and len(forgotten) == len(set(forgotten))
    assert (rig.decode.engine.num_preempted > 0) == (ends == "by preemption")
    assert bool(begun) == (ends != "at its first token") and {"r0/0", "r0/1"} <= set(forgotten)


def test_a_new_request_does_not_get_the_block_that_a_running_one_needs_next(rig, relay):
    """The newcomer's prompt would fill the pool, and lose its blocks at once."""
    old = relay.start(make_request("old", 7, max_tokens=12), prefills_locally=True)
    relay.play(2)
    rig.clock.at += 0.1
    new = relay.start(make_request("new", 27, max_tokens=2), prefills_locally=True)
    relay.play(100)
    assert old.tokens == list(range(50, 62)) and new.tokens == [50, 51]
    assert rig.decode.engine.num_preempted == 0
