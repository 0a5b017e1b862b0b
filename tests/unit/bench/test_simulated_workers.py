"""Single simulated workers: they start new work, share and take turns when the real ones do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from bench.router.one_device import unpredicted
from cluster.errors import UnavailableError
from cluster.simulator.attempt import SimAttempt
from cluster.simulator.hardware import BLOCK_SIZE, H200, VL_7B, Accelerator
from cluster.simulator.layouts import Layout, workers
from cluster.simulator.simulation import SCHEDULING, Simulation
from cluster.simulator.workload import SimRequest, images
from cluster.types.messages import AnyMessage, Encoded, Failed, FeatureShared, Pong, TokenEvent, Tokens
from router.policy import ClusterView, Decision, ItemView, Placement, RequestView


class OneOfEach:
    """Places each request on the only worker of each phase; the prompt of the next one at decode, if told
    so."""

    def __init__(self, simulation: Simulation):
        self._simulation = simulation
        self.prefills_locally = False

    def decide(self, request: RequestView, cluster: ClusterView, now: float) -> Decision:
        (encoder,), (prefill,), (decode,) = (
            list(pool)
            for pool in (self._simulation.encoders, self._simulation.prefills, self._simulation.decodes)
        )
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
        (self.encoder,) = self.simulation.encoders.values()
        (self.prefill,) = self.simulation.prefills.values()
        (self.decode,) = self.simulation.decodes.values()
        self.door = self.simulation.doors[0]
        self.told: list[AnyMessage] = []
        self._receive = self.door.receive
        self.door.receive = self._note  # type: ignore[method-assign]

    def _make_policy(self, simulation: Simulation) -> OneOfEach:
        self.policies.append(OneOfEach(simulation))
        return self.policies[0]

    def _note(self, replica_id: str, *messages: AnyMessage) -> None:
        self.told += messages
        self._receive(replica_id, *messages)

    def encoded(self) -> list[str]:
        """Requests for which an encoder has brought an item."""
        return [message.request_id for message in self.told if isinstance(message, Encoded)]

    def shared(self) -> list[str]:
        """Requests that were told that an item comes for another one."""
        return [message.request_id for message in self.told if isinstance(message, FeatureShared)]

    def failures(self) -> list[tuple[str, str]]:
        """Requests that workers have given up, and the kinds of the errors."""
        return [(one.request_id, one.error.kind) for one in self.told if isinstance(one, Failed)]

    def first_token(self, attempt: SimAttempt) -> TokenEvent | None:
        """What the worker that computed its prompt has said."""
        events = [event for message in self.told if isinstance(message, Tokens) for event in message.events]
        return next((event for event in events if event.request_id == attempt.request_id), None)

    def start(
        self,
        name: str,
        image: str = "",
        text_tokens: int = 64,
        prefills_locally: bool = False,
        keys: Sequence[bytes] | None = None,
    ) -> SimAttempt:
        """Placed and under way at this very instant. `keys`: of its blocks; None: its own."""
        media = (replace(images(0, 1, 400, text_tokens)[0], media_hash=image),) if image else ()
        num_tokens = text_tokens + 400 * len(media)
        keys = keys or [f"{name} {i}".encode() for i in range(num_tokens // BLOCK_SIZE)]
        self.policies[0].prefills_locally = prefills_locally
        self.door.submit(SimRequest(name, self.simulation.loop.now, num_tokens, 8, keys, media))
        return self.door.client_of(name).attempts[0]

    def close(self, attempt: SimAttempt) -> None:
        """Its client hangs up."""
        self.door.flow.close(attempt.request_id, 0, self.simulation.loop.now)
        self.door.receive(self.decode.spec.replica_id, Pong())  # the door carries out what the flow wants

    def run_until(self, holds: Callable[[], object]) -> float:
        """The first instant, to 0.1 ms, at which it does."""
        loop = self.simulation.loop
        for step in range(1, 100_000):
            if holds():
                return loop.now
            loop.run(step * 1e-4)
            loop.now = step * 1e-4
        raise AssertionError("it never does")


def test_an_encoder_starts_new_items_between_its_calls() -> None:
    alone = Alone()
    alone.start("first", "a")
    began_at = alone.run_until(lambda: alone.encoder.batch)
    alone.start("second", "b")
    ended_at = alone.run_until(lambda: not alone.encoder.batch)
    assert ended_at > began_at and alone.encoder.jobs["b"].prepared_at > ended_at
    assert not alone.encoder.asked


def test_a_prompt_that_comes_during_a_step_reuses_what_the_step_computes() -> None:
    alone = Alone()
    first = alone.start("same", text_tokens=2000)
    alone.run_until(lambda: alone.prefill.batch)
    second = alone.start("other", text_tokens=2000, keys=first.request.block_hashes)
    alone.run_until(lambda: alone.first_token(second))
    event = alone.first_token(second)
    assert event is not None and event.num_cached_tokens == 2000 // BLOCK_SIZE * BLOCK_SIZE


def test_embeddings_travel_once_for_all_requests_with_an_item_at_the_same_time() -> None:
    alone = Alone()
    first, second = alone.start("one", "a"), alone.start("two", "a")
    alone.run_until(lambda: alone.first_token(first) and alone.first_token(second))
    alone.simulation.loop.run()
    assert alone.encoded() == [first.request_id]
    assert alone.shared() == [second.request_id]


def test_an_item_is_encoded_for_the_request_that_shares_it_when_the_other_leaves() -> None:
    alone = Alone()
    first, second = alone.start("one", "a"), alone.start("two", "a")
    alone.run_until(alone.shared)
    alone.close(first)
    alone.run_until(lambda: alone.first_token(second))
    alone.simulation.loop.run()
    assert alone.encoded() == [second.request_id]


def test_an_encoder_drops_an_item_that_no_request_waits_for_any_more() -> None:
    alone = Alone()
    alone.start("runs", "a")
    alone.run_until(lambda: alone.encoder.batch)
    attempt = alone.start("leaves", "b")
    alone.run_until(lambda: alone.encoder.asked)
    alone.close(attempt)
    alone.simulation.loop.run()
    assert alone.encoded() == ["runs/1"] and not alone.encoder.has("b") and not alone.encoder.jobs


def test_a_step_has_a_token_of_each_answer_beside_its_part_of_a_prompt() -> None:
    alone = Alone(may_prefill_locally=True)
    alone.start("runs")
    alone.run_until(lambda: alone.decode.answers.running)
    local = alone.start("local", text_tokens=1024, prefills_locally=True)
    (answer,) = alone.decode.answers.running.values()
    began_at = alone.run_until(lambda: alone.decode.batch)
    num_before, step_s = alone.decode.answers.num_generated(answer), alone.decode.true_step_s([(0, 1024)])
    ended_at = alone.run_until(lambda: local.request_id in alone.decode.answers.running)
    assert alone.decode.answers.num_generated(answer) == num_before + 1
    assert ended_at - began_at == pytest.approx(step_s, rel=0.02)


def test_prompts_beside_answers_take_no_longer_than_the_answers_may_wait() -> None:
    alone = Alone(may_prefill_locally=True, accelerator=replace(H200, peak_flops=H200.peak_flops / 10))
    language = alone.decode
    alone.start("runs", prefills_locally=True)
    alone.run_until(lambda: language.answers.running)
    alone.start("long", text_tokens=1000, prefills_locally=True)
    alone.run_until(lambda: language.batch)
    curve = language.spec.curves.prefill
    assert curve is not None
    added_s = curve.seconds(language.batch[0].num_tokens) - language.answers_fixed_s
    assert added_s == pytest.approx(SCHEDULING.prompt_pause_s, rel=0.05)


def test_blocks_that_the_receiver_has_do_not_travel() -> None:
    alone = Alone()
    first = alone.start("first", text_tokens=2000)
    alone.simulation.loop.run()
    second = alone.start("second", text_tokens=2000, keys=first.request.block_hashes)
    alone.run_until(lambda: second.request_id in alone.decode.answers.running)
    held = alone.decode.held[second.request_id]
    assert held.sequence.num_cached_tokens == 2000 // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("is_cached", [True, False])
def test_a_decode_worker_computes_a_turn_whose_image_it_has_or_gets(is_cached: bool) -> None:
    alone = Alone(may_prefill_locally=True)
    first = alone.start("first", "a", text_tokens=BLOCK_SIZE + -400 % BLOCK_SIZE)  # full blocks
    num_tokens = first.request.num_prompt_tokens
    alone.simulation.loop.run()
    keys = [*first.request.block_hashes, b"question"] if is_cached else [b"other"]
    turn = replace(
        first.request, request_id="turn", num_prompt_tokens=num_tokens + BLOCK_SIZE, block_hashes=keys
    )
    alone.policies[0].prefills_locally = True
    alone.door.submit(replace(turn, arrived_at=alone.simulation.loop.now))
    (attempt,) = alone.door.client_of("turn").attempts
    alone.simulation.loop.run()
    assert attempt.prefill is attempt.decode is alone.decode
    assert alone.failures() == []
    assert [outcome.status for outcome in alone.simulation.outcomes] == ["finished"] * 2
    assert alone.simulation.outcomes[-1].num_cached == (num_tokens if is_cached else 0)
