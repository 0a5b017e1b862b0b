"""How long each stage of one request took until its first two tokens, and what was predicted when it was
placed.

The door takes the instants of its own actions. A worker reports what happens inside it as durations
(`PrefillTiming`, `EncodeTiming`), so clocks of different machines are never compared. The stages follow each
other along the request's critical path, so they sum to the time to first token. Overlapping work is in the
items' own timings.

    fetch → probe → admission → route → prefill_blocks → encode_queue → encode → embedding_transfer →
    prefill_queue → prefill → delivery, until the first token
    kv_transfer → first_step, until decode's first token

`encode_queue`, `encode` and `embedding_transfer` are the time in which prefill only waited for embeddings,
split by the timing of the item that arrived last. `delivery` is the rest: messages between door and worker,
event loops, lost attempts.
"""

from __future__ import annotations

from typing import Any

from cluster.types.timings import EncodeTiming, PrefillTiming
from router.policy import Decision, Placement


class RequestTimeline:
    """The timeline of one request. Instants are seconds of the door's clock; each `…_at` is set at its
    event."""

    def __init__(self, arrived_at: float, trace_parent: str = ""):
        """`trace_parent`: the client's span (W3C Trace Context), if it sent one."""
        self.arrived_at = arrived_at
        self.trace_parent = trace_parent
        self.fetched_at = self.prepared_at = self.admitted_at = self.started_at = arrived_at
        self._is_started = False
        self.first_token_at: float | None = None
        self.second_token_at: float | None = None
        self.decision: Decision | None = None
        self.prefill = PrefillTiming()
        self.step_s = 0.0  # reported by decode: from the complete KV to its first tokens
        # Item index → (timing, was cached), in the order of arrival
        self._items: dict[int, tuple[EncodeTiming, bool]] = {}

    def prepared(self, fetched_at: float, prepared_at: float) -> None:
        self.fetched_at, self.prepared_at = fetched_at, prepared_at
        self.admitted_at = self.started_at = prepared_at

    def placed(self, admitted_at: float, decision: Decision) -> None:
        """Notes a placement. If there are several attempts, the first one's instants and the last one's
        decision count."""
        if self.decision is None:
            self.admitted_at = self.started_at = admitted_at
        self.decision = decision

    def started(self, started_at: float) -> None:
        """Is called when the first messages are on their way to the workers. May be repeated: the first call
        counts."""
        if not self._is_started:
            self.started_at = started_at
            self._is_started = True

    def encoded(self, item_idx: int, timing: EncodeTiming, cached: bool) -> None:
        self._items.pop(item_idx, None)
        self._items[item_idx] = timing, cached

    def token(self, at: float, timing: PrefillTiming | None, step_s: float) -> bool:
        """Is called when tokens of one choice are ready for the client. Returns whether they are the first
        ones, with which `stages` is complete."""
        if self.first_token_at is None:
            self.first_token_at = at
            self.prefill = timing or PrefillTiming()
            return True
        if self.second_token_at is None:
            self.second_token_at = at
            self.step_s = step_s
        return False

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival at the door."""
        return None if self.first_token_at is None else self.first_token_at - self.arrived_at

    @property
    def predicted_ttft_s(self) -> float | None:
        """`ttft_s` as predicted when the request was placed."""
        if self.decision is None:
            return None
        return self.started_at - self.arrived_at + self.decision.prediction.ttft_s

    def stages(self) -> dict[str, float]:
        """Returns seconds by stage, in order. After the first token they sum to `ttft_s`."""
        work = self.prefill
        spent_s = work.blocks_s + work.media_s + work.queued_s + work.computing_s
        waited = _split_wait(work.media_s, self._last_item())
        end = self.started_at + spent_s if self.first_token_at is None else self.first_token_at
        return {
            "fetch": self.fetched_at - self.arrived_at,
            "probe": self.prepared_at - self.fetched_at,
            "admission": self.admitted_at - self.prepared_at,
            "route": self.started_at - self.admitted_at,
            "prefill_blocks": work.blocks_s,
            "encode_queue": waited[0],
            "encode": waited[1],
            "embedding_transfer": waited[2],
            "prefill_queue": work.queued_s,
            "prefill": work.computing_s,
            "delivery": end - self.started_at - spent_s,
        }

    def tail(self) -> dict[str, float]:
        """Returns the stages from the first token to the second; empty before the second."""
        if self.first_token_at is None or self.second_token_at is None:
            return {}
        gap_s = self.second_token_at - self.first_token_at
        step_s = min(self.step_s, gap_s)
        return {"kv_transfer": gap_s - step_s, "first_step": step_s}

    def fields(self) -> dict[str, Any]:
        """Returns the fields of an answer, in milliseconds."""
        fields: dict[str, Any] = {
            "ttft_ms": _ms(self.ttft_s or 0.0),
            "actual_ms": {name: _ms(seconds) for name, seconds in (self.stages() | self.tail()).items()},
        }
        if self._items:
            fields["items_ms"] = [self._item_fields(item_idx) for item_idx in sorted(self._items)]
        if self.decision is not None:
            fields |= _decision_fields(self.decision, self.started_at - self.arrived_at)
        return fields

    def header(self) -> str:
        """Writes the stages until the first token as a Server-Timing header (W3C): durations in
        milliseconds."""
        parts = [f"ttft;dur={_ms(self.ttft_s or 0.0)}"]
        if self.decision is not None:
            parts.append(f"predicted;dur={_ms(self.predicted_ttft_s or 0.0)}")
        return ", ".join(parts + [f"{name};dur={_ms(seconds)}" for name, seconds in self.stages().items()])

    def timings(self, num_items: int) -> list[EncodeTiming | None]:
        """The timing of each media item; None if no encoder encoded it for this request."""
        found = (self._items.get(item_idx) for item_idx in range(num_items))
        return [None if known is None or known[1] else known[0] for known in found]

    def _last_item(self) -> EncodeTiming | None:
        """The timing of the item whose embeddings arrived last."""
        timings = [timing for timing, _ in self._items.values()]
        return timings[-1] if timings else None

    def _item_fields(self, item_idx: int) -> dict[str, Any]:
        timing, cached = self._items[item_idx]
        return {
            "item": item_idx,
            "cached": cached,
            "prepare": _ms(timing.preparing_s),
            "queue": _ms(timing.queued_s),
            "encode": _ms(timing.encoding_s),
            "target": _ms(timing.target_s),
            "transfer": _ms(timing.sending_s),
        }


def _split_wait(media_s: float, last: EncodeTiming | None) -> tuple[float, float, float]:
    """Splits the wait for embeddings into (queue, encode, transfer): it ended with the last item's transfer,
    before that the item was encoded, and before that it was queued."""
    if last is None:
        return media_s, 0.0, 0.0
    transfer_s = min(media_s, last.target_s + last.sending_s)
    encode_s = min(media_s - transfer_s, last.preparing_s + last.encoding_s)
    return media_s - transfer_s - encode_s, encode_s, transfer_s


def _decision_fields(decision: Decision, elapsed_s: float) -> dict[str, Any]:
    """Returns the decision's fields. `elapsed_s`: the time from arrival to placement. The reported times to
    first token contain it."""
    prediction = decision.prediction
    return {
        "placement": _placement_fields(decision.placement),
        "predicted_ms": {
            "ttft": _ms(elapsed_s + prediction.ttft_s),
            "low": _ms(elapsed_s + prediction.low_s),
            "high": _ms(elapsed_s + prediction.high_s),
            "prefill_queue": _ms(prediction.queue_s),
            "media": _ms(prediction.media_s),
            "prefill": _ms(prediction.prefill_s),
            "kv_transfer": _ms(prediction.transfer_s),
            "first_step": _ms(prediction.first_step_s),
            "items": [
                {"queue": _ms(item.queue_s), "encode": _ms(item.encode_s), "transfer": _ms(item.transfer_s)}
                for item in prediction.items
            ],
        },
        "alternatives": [
            {**_placement_fields(placement), "predicted_ttft_ms": _ms(elapsed_s + ttft_s)}
            for placement, ttft_s in decision.alternatives
        ],
    }


def _placement_fields(placement: Placement) -> dict[str, Any]:
    return {
        "encoders": list(placement.encoders),
        "prefill": placement.prefill,
        "decode": placement.decode,
        "codec": placement.codec,
    }


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
