"""Single simulated workers: they look at newcomers, share and take turns when the real ones do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.simulator.flight import Flight
from cluster.simulator.hardware import BLOCK_SIZE, H200, VL_7B
from cluster.simulator.layouts import Layout, workers
from cluster.simulator.simulation import Simulation
from cluster.simulator.whole import unpredicted
from cluster.simulator.workload import SimRequest, images
from router.policy import Decision, Placement, make_policy


class Alone:
    """One worker of each phase; a decode worker that computes prompts, too, if asked for."""

    def __init__(self, may_prefill_locally: bool = False):
        layout = Layout(1, 1, 1, may_prefill_locally=may_prefill_locally)
        self.simulation = Simulation(
            workers(layout, VL_7B, H200), [lambda _: make_policy("joint")], VL_7B, noise=0.0
        )
        (self.encoder,) = self.simulation.encoders.values()
        (self.prefill,) = self.simulation.prefills.values()
        (self.decode,) = self.simulation.decodes.values()
        self.door = self.simulation.doors[0]

    def flight(
        self, name: str, image: str = "", text_tokens: int = 64, prefills_locally: bool = False
    ) -> Flight:
        """Placed and under way at this very instant."""
        media = (replace(images(0, 1, 400, text_tokens)[0], media_hash=image),) if image else ()
        num_tokens = text_tokens + 400 * len(media)
        keys = [f"{name} {i}".encode() for i in range(num_tokens // BLOCK_SIZE)]
        request = SimRequest(name, self.simulation.loop.now, num_tokens, 8, keys, media)
        prefill = None if prefills_locally else self.prefill.spec.replica_id
        encoders = (self.encoder.spec.replica_id,) * len(media)
        placement = Placement(encoders, prefill, self.decode.spec.replica_id)
        self.door.fly(request, decision=Decision(placement, unpredicted(len(media))))
        return self.door.flights[f"{name}/1"]

    def run_until(self, holds: Callable[[], object]) -> float:
        """The first instant, to 0.1 ms, at which it does."""
        loop = self.simulation.loop
        for step in range(1, 100_000):
            if holds():
                return loop.now
            loop.run(step * 1e-4)
            loop.now = step * 1e-4
        raise AssertionError("it never does")


def test_an_encoder_looks_at_newcomers_between_its_calls() -> None:
    alone = Alone()
    alone.flight("first", "a")
    began_at = alone.run_until(lambda: alone.encoder.batch)
    alone.flight("second", "b")
    ended_at = alone.run_until(lambda: not alone.encoder.batch)
    assert ended_at > began_at and alone.encoder.jobs["b"].prepared_at > ended_at
    assert not alone.encoder.asked


def test_prefill_reuses_what_a_step_computes_for_those_who_come_during_it() -> None:
    alone = Alone()
    first = alone.flight("same", text_tokens=2000)
    alone.run_until(lambda: alone.prefill.batch)
    second = alone.flight("other", text_tokens=2000)
    second.view = replace(second.view, block_hashes=first.view.block_hashes)
    alone.run_until(lambda: second.is_complete)
    assert second.num_cached == 2000 // BLOCK_SIZE * BLOCK_SIZE


def test_embeddings_travel_once_for_all_who_show_an_item_at_the_same_time() -> None:
    alone = Alone()
    first, second = alone.flight("one", "a"), alone.flight("two", "a")
    alone.run_until(lambda: first.is_complete and second.is_complete)
    assert second.is_shared == [True] and first.is_shared == [False]
    assert first.timings[0] is not None and second.timings == [None]


def test_who_waits_for_anothers_embeddings_gets_his_own_when_the_other_leaves() -> None:
    alone = Alone()
    first, second = alone.flight("one", "a"), alone.flight("two", "a")
    alone.run_until(lambda: second.is_shared == [True])
    alone.door.lost(first, 0)  # and flies again, behind the second
    alone.run_until(lambda: second.is_complete)
    assert second.is_shared == [False] and second.timings[0] is not None


def test_a_step_of_the_others_follows_each_stretch_of_a_prompt_in_decode() -> None:
    alone = Alone(may_prefill_locally=True)
    assert alone.decode.local is not None
    alone.flight("runs")
    alone.run_until(lambda: alone.decode.num_running)
    prefills_locally = alone.flight(
        "prefills_locally", text_tokens=2 * alone.decode.local.max_step_tokens, prefills_locally=True
    )
    began_at = alone.run_until(lambda: alone.decode.local and alone.decode.local.batch)
    ended_at = alone.run_until(lambda: prefills_locally.is_complete)
    size = alone.decode.local.max_step_tokens
    calls_s = sum(alone.decode.local.true_step_s([(done, size)]) for done in (0, size))
    assert ended_at - began_at == pytest.approx(calls_s + 2 * alone.decode.true_step_s(), rel=0.3)
