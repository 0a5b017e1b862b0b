"""Single simulated workers: they start new work, share and take turns when the real ones do."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import pytest

from cluster.errors import UnavailableError
from cluster.simulator.attempt import SimAttempt
from cluster.simulator.hardware import BLOCK_SIZE, H200, VL_7B
from cluster.simulator.layouts import Layout, workers
from cluster.simulator.simulation import Simulation
from cluster.simulator.whole import unpredicted
from cluster.simulator.workload import SimRequest, images
from cluster.types.messages import AnyMessage, Encoded, FeatureShared, Pong
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

    def __init__(self, may_prefill_locally: bool = False):
        layout = Layout(1, 1, 1, may_prefill_locally=may_prefill_locally)
        self.policies: list[OneOfEach] = []
        self.simulation = Simulation(workers(layout, VL_7B, H200), [self._make_policy], VL_7B, noise=0.0)
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
    alone.run_until(lambda: second.is_complete)
    assert second.num_cached == 2000 // BLOCK_SIZE * BLOCK_SIZE


def test_embeddings_travel_once_for_all_requests_with_an_item_at_the_same_time() -> None:
    alone = Alone()
    first, second = alone.start("one", "a"), alone.start("two", "a")
    alone.run_until(lambda: first.is_complete and second.is_complete)
    alone.simulation.loop.run()
    assert alone.encoded() == [first.request_id]
    assert alone.shared() == [second.request_id]


def test_an_item_is_encoded_for_the_request_that_shares_it_when_the_other_leaves() -> None:
    alone = Alone()
    first, second = alone.start("one", "a"), alone.start("two", "a")
    alone.run_until(alone.shared)
    alone.close(first)
    alone.run_until(lambda: second.is_complete)
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


def test_a_decode_step_follows_each_piece_of_a_prompt_that_decode_computes() -> None:
    alone = Alone(may_prefill_locally=True)
    assert alone.decode.local is not None
    alone.start("runs")
    alone.run_until(lambda: alone.decode.num_running)
    local = alone.start("local", text_tokens=2 * alone.decode.local.max_step_tokens, prefills_locally=True)
    began_at = alone.run_until(lambda: alone.decode.local and alone.decode.local.batch)
    ended_at = alone.run_until(lambda: local.is_complete)
    size = alone.decode.local.max_step_tokens
    calls_s = sum(alone.decode.local.true_step_s([(done, size)]) for done in (0, size))
    assert ended_at - began_at == pytest.approx(calls_s + 2 * alone.decode.true_step_s(), rel=0.3)
