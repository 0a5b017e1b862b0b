"""Single simulated workers: the real engines, on a device of curves, start new work, share and take turns
when they should; and a rest gives what its steps would have given one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from bench.router.one_device import unpredicted
from bench.router.policies import maker
from cluster.engine.state import LanguagePhase, LanguageRequest
from cluster.errors import UnavailableError
from cluster.types.members import Phase
from cluster.types.messages import AnyMessage, Encoded, Failed, FeatureShared, Pong, TokenEvent, Tokens
from deploy.simulator.encoder import SimEncoder
from deploy.simulator.hardware import BLOCK_SIZE, H200, VL_7B, Accelerator
from deploy.simulator.language import SimLanguage
from deploy.simulator.layouts import Layout, throttled, workers
from deploy.simulator.simulation import SCHEDULING, Simulation
from deploy.simulator.workload import WORKLOADS, SimRequest, images
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView


class OneOfEach:
    """Places each request on the only worker of each phase; the prompt of the next one at decode, if told
    so."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self.prefills_locally = False

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        (encoder,), (prefill,), (decode,) = (list(self._simulation.alive(phase)) for phase in Phase)
        encoders = (encoder,) * len(request.media)
        placement = Placement(encoders, decode if self.prefills_locally else prefill, decode)
        return Decision(placement, unpredicted(len(request.media)))

    def place_item(self, item: ItemView, cluster: ClusterView, now: float, excluded: Collection[str]) -> str:
        raise UnavailableError("there is no other encoder")


class Alone:
    """One worker of each phase; a decode worker that computes prompts, too, if asked for. `told`: what
    workers told the door."""

    def __init__(self, may_prefill_locally: bool = False, accelerator: Accelerator = H200):
        layout = Layout(1, 1, 1, may_prefill_locally=may_prefill_locally)
        self.policies: list[OneOfEach] = []
        specs = workers(layout, VL_7B, accelerator)
        self.simulation = Simulation(specs, [self._make_policy], VL_7B, noise=0.0)
        encoder, prefill, decode = self.simulation.workers.values()
        assert encoder.encoder and prefill.language and decode.language
        self.encoder: SimEncoder = encoder.encoder
        self.prefill: SimLanguage = prefill.language
        self.decode: SimLanguage = decode.language
        self.door = self.simulation.doors[0]
        self.told: list[tuple[float, AnyMessage]] = []
        self._receive = self.door.receive
        self.door.receive = self._note  # type: ignore[method-assign]

    def _make_policy(self, simulation: Simulation) -> OneOfEach:
        self.policies.append(OneOfEach(simulation))
        return self.policies[0]

    def _note(self, replica_id: str, *messages: AnyMessage) -> None:
        self.told += [(self.simulation.loop.now, message) for message in messages]
        self._receive(replica_id, *messages)

    def encoded(self) -> list[str]:
        """Requests for which an encoder has brought an item."""
        return [message.request_id for _, message in self.told if isinstance(message, Encoded)]

    def shared(self) -> list[str]:
        """Requests that were told that an item comes for another one."""
        return [message.request_id for _, message in self.told if isinstance(message, FeatureShared)]

    def failures(self) -> list[tuple[str, str]]:
        """Requests that workers have given up, and the kinds of the errors."""
        return [(one.request_id, one.error.kind) for _, one in self.told if isinstance(one, Failed)]

    def events(self, name: str) -> list[tuple[float, TokenEvent]]:
        """When the door was told which tokens of the request's first attempt."""
        frames = [(at, message) for at, message in self.told if isinstance(message, Tokens)]
        return [
            (at, event) for at, frame in frames for event in frame.events if event.request_id == f"{name}/1"
        ]

    def running(self, name: str) -> LanguageRequest | None:
        """The answer, where it is generated."""
        request = self.decode.engine.requests.get(f"{name}/1")
        return request if request is not None and request.phase is LanguagePhase.RUNNING else None

    def start(
        self,
        name: str,
        image: str = "",
        text_tokens: int = 64,
        prefills_locally: bool = False,
        keys: Sequence[bytes] | None = None,
        num_output: int = 8,
    ) -> SimRequest:
        """Placed and under way at this very instant. `keys`: of its blocks; None: its own."""
        media = (replace(images(0, 1, 400, text_tokens)[0], media_hash=image),) if image else ()
        num_tokens = text_tokens + 400 * len(media)
        keys = keys or [f"{name} {i}".encode() for i in range(num_tokens // BLOCK_SIZE)]
        self.policies[0].prefills_locally = prefills_locally
        request = SimRequest(name, self.simulation.loop.now, num_tokens, num_output, keys, media)
        self.door.submit(request)
        return request

    def close(self, name: str) -> None:
        """Its client hangs up."""
        self.door.flow.close(f"{name}/1", 0, self.simulation.loop.now)
        self.door.receive(self.prefill.replica_id, Pong())  # the door carries out what the flow wants

    def run_until(self, holds: Callable[[], object]) -> float:
        """The first instant, to 0.1 ms, at which it does."""
        loop = self.simulation.loop
        for step in range(round(loop.now * 1e4), 100_000):
            if holds():
                return loop.now
            loop.run(step * 1e-4)
            loop.now = step * 1e-4
        raise AssertionError("it never does")


def test_an_encoder_starts_new_items_between_its_calls() -> None:
    alone = Alone()
    alone.start("first", "a")
    alone.run_until(lambda: alone.encoder.busy_until > alone.simulation.loop.now)
    ends_at = alone.encoder.busy_until
    alone.start("second", "b")
    alone.run_until(lambda: alone.encoder.asked)
    assert not alone.encoder.threads.ends_at
    assert alone.run_until(lambda: "b" in alone.encoder.threads.ends_at) == pytest.approx(ends_at, abs=2e-4)


def test_a_prompt_that_comes_during_a_step_reuses_what_the_step_computes() -> None:
    alone = Alone()
    first = alone.start("same", text_tokens=2000)
    alone.run_until(lambda: alone.prefill.busy_until > alone.simulation.loop.now)
    alone.start("other", text_tokens=2000, keys=first.block_keys)
    alone.run_until(lambda: alone.events("other"))
    assert alone.events("other")[0][1].num_cached_tokens == 2000 // BLOCK_SIZE * BLOCK_SIZE


def test_embeddings_travel_once_for_all_requests_with_an_item_at_the_same_time() -> None:
    alone = Alone()
    alone.start("one", "a")
    alone.start("two", "a")
    alone.simulation.loop.run()
    assert alone.events("one") and alone.events("two")
    assert alone.encoded() == ["one/1"] and alone.shared() == ["two/1"]


def test_an_item_is_encoded_for_the_request_that_shares_it_when_the_other_leaves() -> None:
    alone = Alone()
    alone.start("one", "a")
    alone.start("two", "a")
    alone.run_until(alone.shared)
    alone.close("one")
    alone.run_until(lambda: alone.events("two"))
    alone.simulation.loop.run()
    assert alone.encoded() == ["two/1"]


def test_an_encoder_drops_an_item_that_no_request_waits_for_any_more() -> None:
    alone = Alone()
    alone.start("runs", "a")
    alone.run_until(lambda: alone.encoder.busy_until > alone.simulation.loop.now)
    alone.start("leaves", "b")
    alone.run_until(lambda: alone.encoder.asked)
    alone.close("leaves")
    alone.simulation.loop.run()
    assert alone.encoded() == ["runs/1"]
    assert "b" not in alone.encoder.cache and not alone.encoder.engine.items


def test_a_step_has_a_token_of_each_answer_beside_its_part_of_a_prompt() -> None:
    alone = Alone(may_prefill_locally=True)
    alone.start("runs", num_output=100)
    alone.run_until(lambda: alone.running("runs"))
    alone.start("local", text_tokens=256, prefills_locally=True)
    alone.run_until(lambda: alone.events("local"))
    (at, _), frames = alone.events("local")[0], alone.events("runs")
    (beside,) = (event for when, event in frames if when == at)
    before_at = max(when for when, _ in frames if when < at)
    assert len(beside.token_ids) == 1
    assert at - before_at == pytest.approx(alone.decode.runner.step_s([(0, 256)], 1, 64), rel=0.02)


def test_prompts_beside_answers_take_no_longer_than_the_answers_may_wait() -> None:
    alone = Alone(may_prefill_locally=True, accelerator=replace(H200, peak_flops=H200.peak_flops / 10))
    alone.start("runs", prefills_locally=True, num_output=100)
    alone.run_until(lambda: alone.running("runs"))
    alone.start("long", text_tokens=1000, prefills_locally=True)
    alone.run_until(lambda: "long/1" in alone.decode.engine.requests)
    long = alone.decode.engine.requests["long/1"]
    alone.run_until(lambda: long.main.num_computed_tokens)
    curve = alone.simulation.workers[alone.decode.replica_id].spec.curves.prefill
    assert curve is not None
    added_s = curve.seconds(long.main.num_computed_tokens) - alone.decode.runner.fixed_s
    assert added_s == pytest.approx(SCHEDULING.prompt_pause_s, rel=0.05)


def test_blocks_that_the_receiver_has_do_not_travel() -> None:
    alone = Alone()
    first = alone.start("first", text_tokens=2000)
    alone.simulation.loop.run()
    alone.start("second", text_tokens=2000, keys=first.block_keys)
    alone.run_until(lambda: alone.running("second"))
    request = alone.running("second")
    assert request is not None
    (sequence,) = request.choices[0].sequences
    assert sequence.num_cached_tokens == 2000 // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_decode_worker_computes_a_turn_whose_image_it_has_or_gets(is_cached: bool) -> None:
    alone = Alone(may_prefill_locally=True)
    first = alone.start("first", "a", text_tokens=BLOCK_SIZE + -400 % BLOCK_SIZE)  # full blocks
    num_tokens = first.num_prompt_tokens
    alone.simulation.loop.run()
    keys = [*first.block_keys, b"question"] if is_cached else [b"other"]
    turn = replace(first, request_id="turn", num_prompt_tokens=num_tokens + BLOCK_SIZE, block_keys=keys)
    alone.policies[0].prefills_locally = True
    alone.door.submit(replace(turn, arrived_at=alone.simulation.loop.now))
    alone.simulation.loop.run()
    assert alone.failures() == []
    assert [outcome.status for outcome in alone.simulation.outcomes] == ["finished"] * 2
    assert alone.simulation.outcomes[-1].num_cached == (num_tokens if is_cached else 0)


# --- rests


LAYOUTS = (
    Layout(1, 2, 2),
    Layout(1, 1, 1, may_prefill_locally=True),
    Layout(num_encode_prefill=1, num_decode=1),
    Layout(num_encode=1, num_language=2),
    Layout(num_whole=2),
)


def served(layout: Layout, may_rest: bool) -> tuple[dict[str, tuple[float, float, float]], int]:
    """When each of 60 turns of dialogues, some with an image, had its first, its second and its last token;
    and how many events that took."""
    simulation = Simulation(workers(layout, VL_7B, H200), [maker("round_robin")], VL_7B, noise=0.0)
    for worker in simulation.workers.values():
        if worker.language is not None and not may_rest:
            worker.language.runner.plan = lambda began_at: None  # type: ignore[method-assign]
    outcomes = simulation.run(WORKLOADS["multi-turn"].requests(8, 60, 1))
    return {o.request.request_id: (o.ttft_s, o.second_s, o.finished_at) for o in outcomes}, (
        simulation.loop.num_run
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_rest_gives_the_same_tokens_at_the_same_instants_as_its_steps_one_by_one(layout: Layout) -> None:
    (rested, num_events), (stepped, num_single) = served(layout, True), served(layout, False)
    assert len(rested) == 60 and rested.keys() == stepped.keys()
    for name, instants in rested.items():
        assert instants == pytest.approx(stepped[name], rel=1e-9)
    assert num_events < 0.6 * num_single


def test_a_rest_ends_when_the_worker_becomes_slower() -> None:
    ends = []
    for factor in (1.0, 3.0):
        specs = throttled(workers(Layout(0, 1, 1), VL_7B, H200), "d:h200-1", since=1.0, factor=factor)
        simulation = Simulation(specs, [maker("round_robin")], VL_7B, noise=0.0)
        (outcome,) = simulation.run([SimRequest("answer", 0.0, 64, 400, [])])
        ends.append(outcome.finished_at)
    usual_s, slow_s = (end - 1.0 for end in ends)
    assert slow_s == pytest.approx(3 * usual_s, rel=0.02)


def test_a_worker_that_is_killed_in_a_rest_has_told_the_tokens_of_the_steps_before() -> None:
    alone = Alone()
    alone.start("runs", num_output=500)
    alone.run_until(lambda: alone.running("runs"))
    began_at = alone.simulation.loop.now
    alone.run_until(lambda: alone.simulation.loop.now > began_at + 1.0)
    alone.simulation.workers[alone.decode.replica_id].kill()
    alone.run_until(lambda: alone.simulation.loop.now > began_at + 1.1)
    num_tokens = sum(len(event.token_ids) for _, event in alone.events("runs"))
    step_s = alone.decode.runner.step_s((), 1, 64)
    assert num_tokens == pytest.approx(1.0 / step_s, rel=0.03)
