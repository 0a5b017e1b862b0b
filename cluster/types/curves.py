"""How fast a worker is, as measured by the worker itself. The router predicts from these curves."""

from __future__ import annotations

import msgspec

from cluster.types.media import Modality


class Curve(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one step or call over some units of work: fixed_s + (per_unit_s + per_pair_s · context) ·
    units."""

    fixed_s: float
    per_unit_s: float
    per_pair_s: float = 0.0

    def seconds(self, units: float, context: float = 0.0) -> float:
        """`context`: earlier tokens of its sequence that a unit sees, on average. Encoders ignore it."""
        return self.fixed_s + (self.per_unit_s + self.per_pair_s * context) * units


class Link(msgspec.Struct, frozen=True, array_like=True):
    """The way from a writer to one other worker, or to any: seconds for some bytes = latency_s + bytes /
    bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class CodecSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Measured at a worker that codes KV (prefill) or decodes it (decode)."""

    ratio: float  # bytes that travel ÷ bytes of raw KV
    s_per_byte: float  # per byte of raw KV


class ServiceCurves(msgspec.Struct, frozen=True):
    """All curves of one worker. Work that its phase does not do has no curve."""

    encode: dict[Modality, Curve] = {}  # an encoder call; units: embedding rows before pooling
    prepare: dict[Modality, Curve] = {}  # decoding and preprocessing of an item on a CPU thread; units: rows
    prefill: Curve | None = None  # a step; units: prompt tokens; context: earlier tokens that each one sees
    decode: Curve | None = None  # a step; units: sequences; context: tokens of a sequence, on average
    max_step_units: int = 0  # most prompt tokens or embedding rows in one step
    links: dict[str, Link] = {}  # to the workers that this one writes to, by replica id; "": to any other
    codecs: dict[str, CodecSpeed] = {}  # codecs in which KV can travel from or to this worker, besides raw
