"""What the decode engine tells of itself, stepped by hand: times, its load, and how fast its steps are."""

import pytest

from cluster.engine.state import LanguagePhase
from cluster.types.messages import Measured, Tokens
from cluster.types.timings import PrefillTiming
from tests.fakes.requests import make_request, salted


def test_the_first_token_says_where_its_time_went(rig, relay):
    """Two seconds without blocks, a second in which another request has its last step; then three steps of a
    second that compute a block of the prompt beside another request's answer."""
    relay.start(make_request("other", 19, max_tokens=3), prefills_locally=True)
    relay.start(make_request("third", 3, max_tokens=20), prefills_locally=True)
    while len(relay.stories["other"].tokens) < 2:
        relay.play(1)
    relay.start(salted(make_request("r", 11, max_tokens=2)), prefills_locally=True)
    relay.send_one("decode")
    rig.decode.inbox.run()
    rig.clock.at += 2.0
    runner = rig.runners["decode"]
    run = runner.run

    def timed(works, *rest):
        rig.clock.at += 1.0
        return run(works, *rest)

    runner.run = timed
    for _ in range(8):
        rig.decode.step()
    events = [event for said in rig.decode.said if isinstance(said, Tokens) for event in said.events]
    first, second = [event for event in events if event.request_id == "r"]
    assert first.timing == PrefillTiming(blocks_s=3.0, computing_s=3.0)
    assert second.timing is None and [first.token_ids, second.token_ids] == [(50,), (51,)]


def test_the_context_of_all_running_sequences_is_in_the_load(rig, relay):
    def expected() -> int:
        requests = rig.decode.engine.requests.values()
        running = [request for request in requests if request.phase is LanguagePhase.RUNNING]
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
    assert rig.decode.engine.load().totals.num_preempted > 0 and max(seen) > 20 and seen[-1] == 0


def test_steps_are_learnt_by_their_sequences_and_told(rig, relay):
    run = rig.runners["decode"].run

    def slowly(works, *rest):
        rig.clock.at += 0.25
        return run(works, *rest)

    rig.runners["decode"].run = slowly
    relay.start(make_request("r", 6, max_tokens=8, num_choices=2))
    curves = []
    for _ in range(30):
        rig.turn()
        curves += [m.curves.decode for m in rig.decode.said if isinstance(m, Measured)]
        relay.play(1)
    assert curves and curves[-1].seconds(2, 8) == pytest.approx(0.25, rel=0.1)
