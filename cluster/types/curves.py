"""How fast a worker is, as it has measured itself: what the router predicts from."""

from __future__ import annotations

import msgspec

from cluster.types.media import Modality


class Curve(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one step (one call) over some units of work: fixed_s + (per_unit_s + per_pair_s · context) · units."""

    fixed_s: float
    per_unit_s: float
    per_pair_s: float = 0.0

    def seconds(self, units: float, context: float = 0.0) -> float:
        """`context`: what a unit sees, on average (earlier tokens of its sequence); without meaning for encoders."""
        return self.fixed_s + (self.per_unit_s + self.per_pair_s * context) * units


class Link(msgspec.Struct, frozen=True, array_like=True):
    """Of a writer to one other worker, or to any: seconds for some bytes = latency_s + bytes / bytes_per_s."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


class CodecSpeed(msgspec.Struct, frozen=True, array_like=True):
    """Of a worker that codes KV (prefill) or decodes it (decode)."""

    ratio: float  # of the bytes that travel to those of raw KV
    s_per_byte: float  # of raw KV


class ServiceCurves(msgspec.Struct, frozen=True):
    """Of one worker; what its phase does not do is absent."""

    encode: dict[Modality, Curve] = {}  # an encoder call; units: embedding rows before pooling
    prepare: dict[Modality, Curve] = {}  # decoding and preprocessing of an item on a CPU thread; units: rows
    prefill: Curve | None = None  # a step; units: prompt tokens, context: earlier tokens that each sees
    decode: Curve | None = None  # a step; units: sequences, context: tokens of a sequence, on average
    max_step_units: int = 0  # prompt tokens or embedding rows in one step, at most
    links: dict[str, Link] = {}  # to the workers that it writes to, by replica id; "": to any other
    codecs: dict[str, CodecSpeed] = {}  # in which KV can travel from or to it, beside raw
