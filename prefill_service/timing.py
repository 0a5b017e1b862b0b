"""Where a request's time at a prefill worker goes: at each instant into exactly one of the parts of `PrefillTiming`. Told at what
changes; who waits costs nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.types.messages import PrefillTiming


class Part(StrEnum):
    """Fields of `PrefillTiming`."""

    BLOCKS = "blocks_s"
    MEDIA = "media_s"
    QUEUED = "queued_s"
    COMPUTING = "computing_s"


@dataclass(eq=False)
class Stopwatch:
    """Written by the engine's thread. Instants are seconds of its clock; one that lies before the last counts as that."""

    since: float  # the part's beginning
    part: Part = Part.QUEUED
    spent: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))

    def turn_to(self, part: Part, at: float) -> None:
        self.spent[self.part] += max(0.0, at - self.since)
        self.since = max(at, self.since)
        self.part = part

    def timing(self, at: float) -> PrefillTiming:
        """Up to now."""
        self.turn_to(self.part, at)
        return PrefillTiming(**self.spent)
