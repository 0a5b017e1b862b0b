"""Where the time of a request goes at the worker that computes its prompt: at each instant into exactly one
part of `PrefillTiming`. The stopwatch is set when a part begins; a request that waits costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from cluster.types.timings import PrefillTiming


class Part(StrEnum):
    """Fields of `PrefillTiming`."""

    BLOCKS = "blocks_s"
    MEDIA = "media_s"
    QUEUED = "queued_s"
    COMPUTING = "computing_s"


@dataclass(eq=False)
class Stopwatch:
    """Written by the engine's thread. Instants are seconds of the engine's clock. An instant before the last
    one counts as the last one."""

    since: float  # when the present part began
    part: Part = Part.QUEUED
    spent: dict[Part, float] = field(default_factory=lambda: dict.fromkeys(Part, 0.0))

    def turn_to(self, part: Part, at: float) -> None:
        self.spent[self.part] += max(0.0, at - self.since)
        self.since = max(at, self.since)
        self.part = part

    def timing(self, at: float) -> PrefillTiming:
        """Returns the parts up to the instant `at`."""
        self.turn_to(self.part, at)
        return PrefillTiming(**self.spent)
