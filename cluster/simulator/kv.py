"""KV on its way from a simulated language worker to others: layer by layer while it is computed, as soon as
the receiver has granted its blocks. Blocks that the receiver has do not travel."""

from __future__ import annotations

from collections.abc import Callable

from cluster.simulator.attempt import Held
from cluster.simulator.device import SimLink
from cluster.simulator.events import EventLoop
from cluster.simulator.hardware import Model


class KvSender:
    def __init__(self, loop: EventLoop, model: Model, on_sent: Callable[[Held], None]):
        """`on_sent`: all of it is at the receiver."""
        self._loop, self._model, self._on_sent, self._link = loop, model, on_sent, SimLink()

    def granted(self, held: Held) -> None:
        receiver = held.attempt.decode.held.get(held.attempt.request_id)
        if receiver is not None:  # else it is gone
            held.is_granted, held.num_sent = True, receiver.sequence.num_cached_tokens
            self._send(held, self._loop.now, 0.0)

    def computed(self, held: Held, took_s: float) -> None:
        """A step that took so long has computed tokens of it."""
        if held.is_granted:
            first_layer_s = took_s / self._model.num_layers
            self._send(held, self._loop.now - took_s + first_layer_s, self._loop.now)

    def _send(self, held: Held, ready_at: float, all_ready_at: float) -> None:
        """What is computed and not sent: the first layer's share is ready at one instant, the last layer's at
        another."""
        attempt, num_computed = held.attempt, held.sequence.num_computed_tokens
        num_bytes = max(0, num_computed - held.num_sent) * self._model.kv_bytes_per_token
        held.num_sent = max(held.num_sent, num_computed)
        link = attempt.prefill.spec.link(attempt.decode.spec.replica_id)
        last_layer_s = num_bytes / self._model.num_layers / link.bytes_per_s
        there_at = self._link.send(ready_at, num_bytes, link, all_ready_at + last_layer_s)
        if held.sequence.is_complete:
            self._loop.at(max(there_at, self._loop.now), self._on_sent, held)
