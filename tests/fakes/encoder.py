"""An encoder engine stepped by hand; prefill's feature store stands at the other end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from cluster.types.media import MediaItem
from cluster.types.messages import AnyMessage, EncodeTarget, FeatureGranted, FeatureShared, StartEncode
from tests.fakes.engines import ENCODER_LIMITS, MARGIN_S, TIMEOUT_S, Rig

M = TypeVar("M", bound=AnyMessage)


class EncoderRig(Rig):
    def __init__(self, limits: dict[str, int] | None = None, **rig: Any):
        super().__init__(encoder_limits=replace(ENCODER_LIMITS, **(limits or {})), **rig)

    def start(self, item: MediaItem, request_id: str = "r", item_idx: int = 0, **more: Any) -> None:
        """The door asks for an item. `more`: see `StartEncode`."""
        self.receive("encoder", StartEncode(request_id, item_idx, item, TIMEOUT_S, **more))

    def target(self, item: MediaItem, request_id: str = "r", item_idx: int = 0) -> None:
        """Prefill makes room, the door passes the grant on; another one it ignores: it has given the request
        up."""
        key = (request_id, item_idx)
        grants: list[FeatureGranted] = []

        def pass_on(granted: FeatureGranted | FeatureShared) -> None:
            assert isinstance(granted, FeatureGranted)
            grants.append(granted)
            if len(grants) == 1:
                self.receive("encoder", EncodeTarget(request_id, item_idx, granted.grant))

        self.features.reserve(key, request_id, item.geometry.num_tokens, TIMEOUT_S, pass_on)

    def deliver(self, item: MediaItem, request_id: str = "r", **more: Any) -> None:
        self.start(item, request_id, **more)
        self.target(item, request_id)

    def prepare_all(self) -> None:
        """The threads work, the engine does not."""
        self.encoder.inbox.run()
        while self.executor.jobs:
            self.executor.run_one()

    def step(self) -> None:
        """The threads finish what they have, then one step of the encoder."""
        self.prepare_all()
        self.encoder.step()

    def said(self, kind: type[M]) -> list[M]:
        return [message for message in self.encoder.said if isinstance(message, kind)]

    @property
    def called(self) -> list[str]:
        """Names of the items of all encoder calls, in order; those that share a call are joined by +."""
        return ["+".join(name for name, _, _ in call) for call in self.encoder_calls]

    def finish(self) -> None:
        """Whatever is under way ends, by its deadline if need be; then nothing is held."""
        self.turn(20)
        for key in list(self.features.copies):
            self.features.release(key, has_ended=True)
        self.clock.at += 2 * (TIMEOUT_S + MARGIN_S)
        self.turn(5)
        self.audit()
