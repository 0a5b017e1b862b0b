"""Prefill's half of the hand-over to decode: which blocks can go, and when the transfer is complete.

Cached prefix blocks go at once, the blocks that a step fills layer by layer while it runs, the last, partly filled block with
the end of its prompt. Where groups of blocks travel coded, a group goes when its last block is filled. A grant names the
prompt's blocks, then the companion's. Posting returns immediately (the transfer thread copies); blocks stay referenced until
the sender reports the end.

Over a slow link the end of a prompt may be sooner at decode if decode computes it itself (`transfer.recompute`): `plan_end` weighs that
when the grant comes, with the speeds that were measured on either side.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cluster.kvcache.memory import MemoryLayout
from cluster.scheduling.budget import StepBudget
from cluster.types.messages import KvReady
from cluster.types.transfer import Grant, ReceivedGrant
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.link_meter import MIN_MEASURED_BYTES
from kv_transfer.lease.transfer import BlockTransfer, OutgoingLease
from prefill_service.state import Phase, PrefillRequest, PromptSequence

# A write costs the transfer thread about as long as copying this much: smaller layers wait for the next ones.
MIN_WRITE_BYTES = 256 << 10

MIN_SENT_BYTES = MIN_MEASURED_BYTES  # of every prompt: they show how fast the link is now
Ready = Callable[[], bool] | None  # whether the device has got so far; None: it has
StepWork = tuple[PrefillRequest, PromptSequence, int]  # … of which so many further tokens are computed


class Targets:
    """Decode's grants, on their way from the event loop to the requests they are for. `offer` is any thread's, the rest the engine's."""

    def __init__(self, transfer_engine: BlockTransfer, budget: StepBudget, layout: MemoryLayout):
        self._transfer_engine = transfer_engine
        self._budget = budget
        self._layout = layout
        self._offered: deque[tuple[str, ReceivedGrant]] = deque()
        self.by_lease: dict[str, PrefillRequest] = {}  # whose transfer has not ended

    def offer(self, request_id: str, received: ReceivedGrant) -> None:
        self._offered.append((request_id, received))

    def take(
        self, requests: Mapping[str, PrefillRequest]
    ) -> Iterator[tuple[PrefillRequest, Exception | None]]:
        """Whose grants have come, with what is wrong with them. Where the request has ended, the right is given back at once."""
        while self._offered:
            request_id, received = self._offered.popleft()
            request = requests.get(request_id)
            try:
                outgoing = self._transfer_engine.open(received)
                if request is None or request.phase is Phase.CLOSING:
                    outgoing.abort("the request has ended")
                    continue
                self._take_up(request, outgoing, received.grant)
            except Exception as error:  # the caller's to name
                if request is not None:
                    yield request, error
            else:
                yield request, None

    def take_early(self, in_step: Mapping[str, PrefillRequest]) -> None:
        """The same between two layers of a step, for requests in it. Nothing may end there: what goes wrong waits for `take`."""
        for _ in range(len(self._offered)):
            request_id, received = self._offered.popleft()
            try:
                request = in_step[request_id]
                self._take_up(request, self._transfer_engine.open(received), received.grant)
            except Exception:
                self._offered.append((request_id, received))
                continue
            with suppress(TransferError):  # its time is over, as its event will say
                send_computed(request, self._layout.segments[0].rows)

    def _take_up(self, request: PrefillRequest, outgoing: OutgoingLease, grant: Grant) -> None:
        request.outgoing = outgoing
        self.by_lease[grant.lease_id] = request
        plan_end(request, grant.token_s, self._budget, self._layout)


def plan_end(
    request: PrefillRequest, token_s: float | None, budget: StepBudget, layout: MemoryLayout
) -> None:
    """Decides how much of the prompt travels, before any of it has. token_s: in which decode computes a token. Tokens up to the last
    media item always travel, because decode has no embeddings."""
    outgoing, main = request.outgoing, request.main
    if outgoing is None or token_s is None or (block_s := outgoing.block_s) is None:
        return
    block_size, unit = layout.segments[0].rows, outgoing.blocks_together
    media_end = max((item.end for item in main.prompt.media), default=0)
    least = max(-(-media_end // block_size), -(-MIN_SENT_BYTES // layout.block_bytes))
    missing = request.num_missing_tokens
    prefill_s = budget.predicted_s(missing, main.num_computed_tokens + missing / 2)
    num_blocks = num_blocks_to_send(main.num_tokens / block_size, block_s, token_s * block_size, prefill_s)
    num_blocks = -(-max(num_blocks, least) // unit) * unit
    if num_blocks * block_size < main.num_tokens:
        main.first_recomputed = num_blocks * block_size


def num_blocks_to_send(num_blocks: float, block_s: float, compute_s: float, prefill_s: float) -> int:
    """The n <= num_blocks for which the KV of a prompt is at decode soonest. Blocks 0 … n - 1 travel, block_s each, while the prompt is
    computed, which takes prefill_s; then decode computes the others, compute_s each, all seconds:

        max(0, n * block_s - prefill_s) + (num_blocks - n) * compute_s

    Falls while blocks hide behind prefill; after that it falls or rises as a block is sent or computed sooner."""
    if block_s <= compute_s:
        return math.ceil(num_blocks)
    return min(math.ceil(num_blocks), int(prefill_s / block_s))


def send_computed(request: PrefillRequest, block_size: int) -> None:
    """Post what is computed and not posted yet; after the first tokens, finish. No-op until decode's grant is there."""
    if request.outgoing is None:
        return
    for sequence in request.sequences:
        new = _new_blocks(request, sequence, sequence.num_computed_tokens, block_size)
        if new:
            request.outgoing.write(*_places(request, sequence, new))
            sequence.num_blocks_sent = new.stop
    if request.first_tokens:
        deltas = tuple(s.positions.delta for s in request.sequences)
        ready = KvReady(request.first_tokens, deltas, request.main.first_recomputed)
        request.outgoing.finish(msgspec.msgpack.encode(ready))


@dataclass
class _Push:
    """What one sequence gets out of the step."""

    sequence: PromptSequence
    outgoing: OutgoingLease
    num_blocks_after: int
    local_ids: Sequence[int]
    grant_indices: Sequence[int]
    layers_per_write: int
    first_layer: int = 0  # that has not been posted


class StepPush:
    """The blocks that a step completes, on their way while it runs. Made before the forward; `on_layer` after each layer, in
    order; `close` behind it. Requests whose grant comes meanwhile join, with the layers that are done. What cannot be written any more
    ends with the sender's event, like any failed write."""

    def __init__(self, batch: Sequence[StepWork], layout: MemoryLayout, num_layers: int):
        self._layout = layout
        self._num_layers = num_layers
        self._segments_per_layer = len(layout.segments) // num_layers
        self._pushes: list[_Push] = []
        self._waiting = list(batch)  # for their grants

    def on_layer(self, layer_idx: int, ready: Ready) -> None:
        """Layer `layer_idx` of all these blocks is final, once `ready` says so."""
        self._join()
        for push in self._pushes:
            num_done = layer_idx + 1
            if num_done - push.first_layer < push.layers_per_write and num_done < self._num_layers:
                continue
            first, end = push.first_layer * self._segments_per_layer, num_done * self._segments_per_layer
            push.first_layer = num_done
            try:
                push.outgoing.write(push.local_ids, push.grant_indices, range(first, end), ready)
            except TransferError:  # its time is over, as its event will say
                continue

    def close(self) -> None:
        for push in self._pushes:
            push.sequence.num_blocks_sent = push.num_blocks_after

    def _join(self) -> None:
        waiting, self._waiting = self._waiting, []
        for request, sequence, count in waiting:
            if request.outgoing is None:
                self._waiting.append((request, sequence, count))
                continue
            end, block_size = sequence.num_computed_tokens + count, self._layout.segments[0].rows
            if new := _new_blocks(request, sequence, end, block_size):
                layers = -(-MIN_WRITE_BYTES * self._num_layers // (len(new) * self._layout.block_bytes))
                places = _places(request, sequence, new)
                layers = min(layers, self._num_layers)
                self._pushes.append(_Push(sequence, request.outgoing, new.stop, *places, layers))


def _new_blocks(
    request: PrefillRequest, sequence: PromptSequence, num_computed_tokens: int, block_size: int
) -> range:
    """Blocks that are final at so many tokens, can go, and are not posted yet."""
    together = 1 if request.outgoing is None else request.outgoing.blocks_together
    end = sequence.num_tokens if sequence.first_recomputed is None else sequence.first_recomputed
    num_ready = min(num_computed_tokens, end) // block_size // together * together
    if num_computed_tokens >= end:
        num_ready = -(-end // block_size)
    return range(sequence.num_blocks_sent, max(num_ready, sequence.num_blocks_sent))


def _places(request: PrefillRequest, sequence: PromptSequence, blocks: range) -> tuple[list[int], list[int]]:
    """Their ids here, and their places in the grant."""
    before = request.sequences[: request.sequences.index(sequence)]
    first = sum(len(earlier.block_table) for earlier in before)
    return [sequence.block_table[i] for i in blocks], [first + i for i in blocks]
