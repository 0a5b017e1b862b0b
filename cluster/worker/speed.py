"""How fast this worker is, as reported to its doors: when a door connects, and whenever the prediction for
recent steps has changed noticeably. The engine feeds the fits and calls `report` once per step. All of it
runs on the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cluster.clock import Clock
from cluster.scheduling.fit import StepFit
from cluster.types.curves import CodecSpeed, Curve, Link, ServiceCurves
from cluster.types.media import Modality
from cluster.types.messages import Measured
from cluster.worker.outbox import Outbox

NOTICEABLE_RATIO = 0.1  # of what was reported last
PAUSE_S = 1.0  # between two reports, at least
LOOK_EVERY_S = 0.1  # for news: a look costs more the more workers this one writes to, and steps may be short
LINK_BYTES = 1 << 20  # of a typical write

NO_FITS: Mapping[Modality, StepFit] = {}
NO_CODECS: Mapping[str, CodecSpeed] = {}


class SpeedReporter:
    def __init__(
        self,
        outbox: Outbox,
        clock: Clock,
        *,
        encode: Mapping[Modality, StepFit] = NO_FITS,
        prepare: Mapping[Modality, StepFit] = NO_FITS,
        prefill: StepFit | None = None,
        decode: StepFit | None = None,
        max_step_units: int = 0,
        links: Callable[[], Mapping[str, Link]],
        codecs: Mapping[str, CodecSpeed] = NO_CODECS,
    ):
        """The fits belong to the engine; see `ServiceCurves` for what each describes. `links`: to every
        worker that was written to."""
        self._outbox = outbox
        self._clock = clock
        self._encode, self._prepare, self._prefill, self._decode = encode, prepare, prefill, decode
        self._max_step_units = max_step_units
        self._links, self._codecs = links, codecs
        self._reported: ServiceCurves | None = None
        self._look_at = -math.inf
        outbox.greet_with(self._greeting)

    def curves(self) -> ServiceCurves:
        """What is known now."""
        return ServiceCurves(
            _curves(self._encode),
            _curves(self._prepare),
            self._prefill and self._prefill.curve(),
            self._decode and self._decode.curve(),
            self._max_step_units,
            _with_mean(self._links()),
            dict(self._codecs),
        )

    def report(self) -> None:
        """Tells all doors, if the curves have changed noticeably since they were told last."""
        now = self._clock.now()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        if self._has_news():
            self._reported, self._look_at = self.curves(), now + PAUSE_S
            self._outbox.broadcast(self._measured(self._reported))

    def _greeting(self) -> Measured:
        """What the other doors know: all doors get the same reports."""
        if self._reported is None:
            self._reported = self.curves()
        return self._measured(self._reported)

    def _measured(self, curves: ServiceCurves) -> Measured:
        return Measured(curves, is_of_encoder=bool(self._encode))

    def _has_news(self) -> bool:
        reported = self._reported or ServiceCurves()
        pairs: list[tuple[StepFit | None, Curve | None]] = [
            (self._prefill, reported.prefill),
            (self._decode, reported.decode),
            *((fit, reported.encode.get(modality)) for modality, fit in self._encode.items()),
            *((fit, reported.prepare.get(modality)) for modality, fit in self._prepare.items()),
        ]
        return any(
            fit is not None and fit.has_deviated(curve, NOTICEABLE_RATIO) for fit, curve in pairs
        ) or _have_deviated(self._links(), reported.links)


def _curves(fits: Mapping[Modality, StepFit]) -> dict[Modality, Curve]:
    curves = {modality: fit.curve() for modality, fit in fits.items()}
    return {modality: curve for modality, curve in curves.items() if curve is not None}


def _with_mean(links: Mapping[str, Link]) -> dict[str, Link]:
    """The links, and "" for their mean: of their latencies and of their times per byte."""
    if not links:
        return {}
    latency_s = sum(link.latency_s for link in links.values()) / len(links)
    byte_s = sum(1 / link.bytes_per_s for link in links.values()) / len(links)
    return {**links, "": Link(latency_s, 1 / byte_s)}


def _have_deviated(links: Mapping[str, Link], reported: Mapping[str, Link]) -> bool:
    if links.keys() != reported.keys() - {""}:
        return True
    seconds = ((link.seconds(LINK_BYTES), reported[peer].seconds(LINK_BYTES)) for peer, link in links.items())
    return any(abs(now_s - before_s) > NOTICEABLE_RATIO * before_s for now_s, before_s in seconds)
