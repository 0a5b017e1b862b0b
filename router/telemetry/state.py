"""The gauges and totals of a door's metrics: what the request flow holds, and the workers' last load reports.
Read when Prometheus scrapes; nothing is counted here. Runs on the door's event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cluster.types.members import Role
from cluster.types.messages import LoadReport
from router.flow.request_flow import RequestFlow
from router.members import Peer


class StateCollector(Collector):
    """Worker state from the last load reports."""

    _FIELDS: ClassVar = {
        "num_running": ("epdg_worker_running", "Requests (encoder: media items) being worked on"),
        "num_waiting": ("epdg_worker_waiting", "Requests waiting for memory, embeddings or KV"),
        "num_queued_units": (
            "epdg_worker_queued_units",
            "Work not done: prompt tokens (prefill), sequences (decode, language) or embedding rows (encode)",
        ),
        "num_prompt_tokens": (
            "epdg_worker_prompt_tokens",
            "Prompt tokens that a worker that decodes has still to compute itself",
        ),
        "num_used_blocks": ("epdg_worker_used_blocks", "Memory blocks held by requests"),
        "num_cached_blocks": ("epdg_worker_cached_blocks", "Memory blocks kept for reuse"),
        "num_open_leases": (
            "epdg_worker_open_leases",
            "Transfers by or into this worker that are not closed",
        ),
        "held_bytes": (
            "epdg_worker_media_bytes",
            "Held for media in work: files and tensors (encode), room for embeddings (all others)",
        ),
        "sending_bytes": (
            "epdg_worker_sending_bytes",
            "Embeddings that are being written to other workers",
        ),
    }

    _TOTALS: ClassVar = {
        "num_preempted": ("epdg_decode_preemptions", "Requests whose blocks went to older ones"),
        "num_drafted": ("epdg_decode_draft_tokens", "Tokens that speculation guessed"),
        "num_accepted": ("epdg_decode_accepted_tokens", "Guesses that were right"),
    }

    _ITEMS: ClassVar = {"num_encoded": "encoded", "num_cached": "cached", "num_failed": "failed"}

    _SENT: ClassVar = {
        "raw_bytes": ("epdg_transfer_raw_bytes", "Bytes sent as they are"),
        "coded_bytes": ("epdg_transfer_coded_bytes", "Bytes sent coded, as they travelled"),
        "coded_groups": ("epdg_transfer_coded_groups", "Groups of 64 tokens of KV sent coded"),
        "crowded_groups": (
            "epdg_transfer_crowded_groups",
            "Groups sent raw because there was no room to code them",
        ),
    }

    _RECEIVED: ClassVar = {
        "num_ignored": (
            "epdg_transfer_ignored_notifications",
            "Notifications about no open lease: duplicate, foreign, or late without a write",
        ),
        "num_late": ("epdg_transfer_late_writes", "Writes that came after their lease had been taken back"),
        "num_mismatched": (
            "epdg_transfer_mismatched_notifications",
            "Notifications that named other blocks or generations than their lease",
        ),
        "num_corrupt": (
            "epdg_transfer_corrupt_leases",
            "Leases that failed because other bytes arrived than were sent",
        ),
        "spared_bytes": (
            "epdg_transfer_spared_bytes",
            "KV of prompts that did not travel because the worker had it already",
        ),
    }

    _TIER: ClassVar = {
        "num_stored": ("epdg_tier_stored_blocks", "Blocks of KV copied to the second tier"),
        "num_loaded": ("epdg_tier_loaded_blocks", "Blocks of KV copied back from the second tier"),
        "num_evicted": ("epdg_tier_evicted_blocks", "Blocks of KV that the second tier had no room for"),
        "num_missed": (
            "epdg_tier_missed_blocks",
            "Blocks of KV whose memory was used again before it was copied to the second tier",
        ),
        "num_corrupt": ("epdg_tier_corrupt_blocks", "Blocks of KV that could not be read back as written"),
        "num_failed": ("epdg_tier_failed_blocks", "Blocks of KV that could not be written"),
    }

    _ERRORS: ClassVar = {"key": "key_error", "value": "value_error"}

    def __init__(
        self,
        peers: Callable[[], Iterable[Peer]],
        flow: RequestFlow,
        adapters: Callable[[], Mapping[str, str]],
    ):
        """adapters: digests of those that are served now, by name."""
        self._peers = peers
        self._flow = flow
        self._served_adapters = adapters

    def collect(self) -> Iterable[Metric]:
        flow = self._flow
        for name, text, value in (
            ("epdg_door_flights", "Requests in flight", flow.num_running),
            ("epdg_num_requests_running", "The same, by vLLM's name", flow.num_running),
            ("epdg_door_waiting", "Requests that wait at the door for admission", flow.num_waiting),
            ("epdg_num_requests_waiting", "The same, by vLLM's name", flow.num_waiting),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        yield from self._predictions()
        yield from self._adapters()
        peers = list(self._peers())
        parts = [(role, peer.member.replica_id, load) for peer in peers for role, load in peer.loads.items()]
        yield from self._troubles()
        for field, (name, text) in self._FIELDS.items():
            family = GaugeMetricFamily(name, text, labels=("pool", "replica"))
            for role, replica_id, load in parts:
                family.add_metric([role.value, replica_id], getattr(load, field))
            yield family
        yield from self._utilisation(peers)
        yield from self._assigned(peers)
        for field, (name, text) in self._TOTALS.items():
            counter = CounterMetricFamily(name, text, labels=("replica",))
            for role, replica_id, load in parts:
                if role.decodes:
                    counter.add_metric([replica_id], getattr(load.totals, field))
            yield counter
        yield from self._encoders([(name, load) for role, name, load in parts if role is Role.ENCODE])
        for field, (name, text) in self._SENT.items():
            counter = CounterMetricFamily(name, text, labels=("pool", "replica"))
            for role, replica_id, load in parts:
                if role.encodes or role.prefills:
                    counter.add_metric([role.value, replica_id], getattr(load.sent, field))
            yield counter
        for field, (name, text) in self._RECEIVED.items():
            counter = CounterMetricFamily(name, text, labels=("pool", "replica"))
            for role, replica_id, load in parts:
                if role.prefills or role.decodes:
                    counter.add_metric([role.value, replica_id], getattr(load.received, field))
            yield counter
        yield from self._links(peers)
        yield from self._tiers(parts)
        error = GaugeMetricFamily(
            "epdg_transfer_codec_error",
            "Mean change by the codec / mean size, of the group of KV that was last looked at",
            labels=("replica", "tensor"),
        )
        for role, replica_id, load in parts:
            if role.prefills:
                for tensor, field in self._ERRORS.items():
                    error.add_metric([replica_id, tensor], getattr(load.sent, field))
        yield error

    def _utilisation(self, peers: Sequence[Peer]) -> Iterable[Metric]:
        labels = ("pool", "replica")
        busy = CounterMetricFamily(
            "epdg_worker_busy_seconds", "Time in which the worker computed steps", labels=labels
        )
        blocks = GaugeMetricFamily(
            "epdg_worker_blocks",
            "Memory blocks that the worker has for requests and for reuse",
            labels=labels,
        )
        usage = GaugeMetricFamily(
            "epdg_kv_cache_usage_perc", "Part of the KV blocks that requests hold, 0 to 1", labels=labels
        )
        faults = CounterMetricFamily(
            "epdg_worker_pool_faults",
            "Times that an idle worker found its KV blocks not in order, and emptied its cache",
            labels=labels,
        )
        for peer in peers:
            num_blocks, own, replica_id = peer.member.num_blocks, peer.member.role, peer.member.replica_id
            for role, load in peer.loads.items():
                busy.add_metric([role.value, replica_id], load.busy_s)
                if role is own:  # not the encoder of a worker that does more
                    blocks.add_metric([role.value, replica_id], num_blocks)
                if role is own and role is not Role.ENCODE:
                    usage.add_metric([role.value, replica_id], load.num_used_blocks / max(1, num_blocks))
                if role is not Role.ENCODE:
                    faults.add_metric([role.value, replica_id], load.num_pool_faults)
        yield busy
        yield blocks
        yield usage
        yield faults

    def _links(self, peers: Sequence[Peer]) -> Iterable[Metric]:
        speed = GaugeMetricFamily(
            "epdg_transfer_link_bytes_per_second",
            "How fast a worker writes into the memory of another one, as it measured lately",
            labels=("replica", "reader"),
        )
        for peer in peers:
            for reader, link in peer.links.items():
                if reader:
                    speed.add_metric([peer.member.replica_id, reader], link.bytes_per_s)
        yield speed

    def _tiers(self, parts: Sequence[tuple[Role, str, LoadReport]]) -> Iterable[Metric]:
        language = [part for part in parts if part[0] is not Role.ENCODE]
        labels = ("pool", "replica")
        held = GaugeMetricFamily("epdg_tier_bytes", "KV in the second tier of the cache", labels=labels)
        for role, replica_id, load in language:
            held.add_metric([role.value, replica_id], load.tier.held_bytes)
        yield held
        for field, (name, text) in self._TIER.items():
            counter = CounterMetricFamily(name, text, labels=labels)
            for role, replica_id, load in language:
                counter.add_metric([role.value, replica_id], getattr(load.tier, field))
            yield counter

    def _troubles(self) -> Iterable[Metric]:
        flow = self._flow
        silent = GaugeMetricFamily(
            "epdg_door_silent_workers",
            "Workers without progress: avoided while there are others",
            labels=("pool",),
        )
        for role in Role:
            silent.add_metric([role.value], sum(w.is_silent for w in flow.workers if w.role is role))
        yield silent
        yield GaugeMetricFamily(
            "epdg_door_unplaced",
            "Requests, and rests of answers, that wait for a worker to join",
            value=len(flow.continuation.unplaced),
        )
        for name, text, value in (
            (
                "epdg_door_replays",
                "Times that other workers took over from ones that failed",
                flow.continuation.num_replays,
            ),
            ("epdg_door_silences", "Times that a worker stopped making progress", flow.num_silences),
            (
                "epdg_door_quarantined",
                "Media items and prompts that are not retried for now, because workers were lost with them",
                flow.quarantine.num_barred,
            ),
            (
                "epdg_door_crashed_requests",
                "Requests that ended by an error of the door itself",
                flow.num_crashed,
            ),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _assigned(self, peers: list[Peer]) -> Iterable[Metric]:
        assigned = GaugeMetricFamily(
            "epdg_worker_assigned",
            "1: new requests use the worker for this phase of its role; 0: only if no other worker is left",
            labels=("pool", "replica", "phase"),
        )
        epochs = GaugeMetricFamily(
            "epdg_worker_assignment_epoch",
            "How many times the worker has been assigned phases",
            labels=("pool", "replica"),
        )
        for peer in peers:
            role, replica_id = peer.member.role, peer.member.replica_id
            epochs.add_metric([role.value, replica_id], peer.assigned.epoch)
            for phase in sorted(role.phases):
                is_assigned = phase in peer.assigned.phases
                assigned.add_metric([role.value, replica_id, phase.value], is_assigned)
        yield assigned
        yield epochs

    def _adapters(self) -> Iterator[Metric]:
        """Counts requests of the adapters that are served now: so many are the series, also with 0."""
        served = self._served_adapters()
        counts = self._flow.num_by_adapter() if served else (Counter[str](), Counter[str]())
        for kind, text, found in zip(
            ("running", "waiting"), ("in work", "that wait for a worker"), counts, strict=True
        ):
            name = f"epdg_lora_requests_{kind}"
            family = GaugeMetricFamily(name, f"Requests of an adapter {text}", labels=("adapter",))
            for adapter, digest in served.items():
                family.add_metric([adapter], found[digest])
            yield family

    def _predictions(self) -> Iterable[Metric]:
        known = self._flow.calibration
        if known.accuracy.num_observed:
            yield GaugeMetricFamily(
                "epdg_ttft_prediction_error_ratio",
                "Mean absolute error of recent predicted times to first token, as a ratio to the actual ones",
                value=known.accuracy.mape,
            )
            yield GaugeMetricFamily(
                "epdg_ttft_prediction_coverage_ratio",
                "Share of times to first token inside their predicted 90 % interval; recent requests",
                value=known.accuracy.coverage,
            )
        factor = GaugeMetricFamily(
            "epdg_prediction_factor",
            "Learnt factor by which predicted durations of a phase are multiplied",
            labels=("pool", "hardware"),
        )
        for (role, hardware), value in known.factors.items():
            factor.add_metric([role.value, hardware], value)
        yield factor

    def _encoders(self, encoders: list[tuple[str, LoadReport]]) -> Iterable[Metric]:
        items = CounterMetricFamily(
            "epdg_encoder_items",
            "Media items that were encoded, that the encoder had already, or that could not be encoded",
            labels=("replica", "result"),
        )
        rows = CounterMetricFamily("epdg_encoder_rows", "Embedding rows made", labels=("replica",))
        for replica_id, load in encoders:
            for field, result in self._ITEMS.items():
                items.add_metric([replica_id, result], getattr(load.encoded, field))
            rows.add_metric([replica_id], load.encoded.num_rows)
        yield items
        yield rows
