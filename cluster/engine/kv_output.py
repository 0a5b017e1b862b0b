"""The engine's port for KV that goes out, to the worker that generates the answer: which blocks can be sent,
and when the transfer is complete.

Blocks of a cached prefix are sent at once, and the blocks that a step fills layer by layer while it runs. The
last, partly filled block is sent at the end of its prompt. If groups of blocks travel coded, a group is sent
when its last block is filled. A grant names the blocks of the prompt, then those of the negative prompt.
Posting returns immediately: the transfer thread copies. Blocks stay referenced until the sender reports the
end.

Over a slow link, decode may have the end of a prompt sooner if it computes the end itself
(`transfer.recompute`). `plan_end` decides that when the grant arrives, from the measured speeds of both
workers.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cluster.engine.sequence import TokenSequence
from cluster.engine.state import LanguagePhase, LanguageRequest, PromptWork
from cluster.errors import InternalError
from cluster.kvcache.memory import MemoryLayout
from cluster.scheduling.budget import StepBudget
from cluster.types.transfer import KvReady, ReceivedGrant
from kv_transfer.agents.agent import TransferError
from kv_transfer.lease.link_meter import MIN_MEASURED_BYTES
from kv_transfer.lease.prompt_places import PromptPlaces
from kv_transfer.lease.transfer import BlockTransfer, OutgoingLease

# A write costs the transfer thread about as much as copying this many bytes: smaller layers are sent
# together.
MIN_WRITE_BYTES = 256 << 10

MIN_SENT_BYTES = MIN_MEASURED_BYTES  # of every prompt: they show how fast the link is now
Ready = Callable[[], bool] | None  # whether the device has computed the layer; None: it has


class KvOutput:
    """Decode's grants, on their way from the event loop to their requests. `offer` may be called by any
    thread, everything else by the engine's thread."""

    def __init__(self, transfer_engine: BlockTransfer, budget: StepBudget, layout: MemoryLayout):
        self._transfer_engine = transfer_engine
        self._budget = budget
        self._layout = layout
        self._offered: deque[tuple[str, ReceivedGrant]] = deque()
        self._by_lease: dict[str, LanguageRequest] = {}  # requests whose transfer has not ended

    @property
    def num_open_leases(self) -> int:
        return len(self._by_lease)

    def pop_closed(self, lease_id: str) -> LanguageRequest | None:
        """The request whose transfer has ended. None: the lease is of no request here."""
        return self._by_lease.pop(lease_id, None)

    def offer(self, request_id: str, received: ReceivedGrant) -> None:
        self._offered.append((request_id, received))

    def take(
        self, requests: Mapping[str, LanguageRequest]
    ) -> Iterator[tuple[LanguageRequest, Exception | None]]:
        """The requests whose grants have come, with the error, if there is one. If a request has ended, its
        grant is returned at once."""
        while self._offered:
            request_id, received = self._offered.popleft()
            request = requests.get(request_id)
            try:
                if request is None or request.phase is LanguagePhase.CLOSING:
                    self._transfer_engine.open(received).abort("the request has ended")
                    continue
                self._accept(request, received)
            except Exception as error:  # the caller fails the request
                if request is not None:
                    yield request, error
            else:
                yield request, None

    def take_early(self, in_step: Mapping[str, LanguageRequest]) -> None:
        """Like `take`, between two layers of a step, for requests in the step. No request may end there: a
        grant with an error waits for `take`."""
        for _ in range(len(self._offered)):
            request_id, received = self._offered.popleft()
            try:
                request = in_step[request_id]
                self._accept(request, received)
            except Exception:
                self._offered.append((request_id, received))
                continue
            with suppress(TransferError):  # the lease has expired; its event follows
                send_computed(request, self._layout.segments[0].rows)

    def is_open(self, request: LanguageRequest) -> bool:
        """Whether a transfer of the request's KV has not ended."""
        return request.outgoing is not None and request.outgoing.lease_id in self._by_lease

    def abort(self, request: LanguageRequest, reason: str) -> None:
        """Stops the request's transfer; its end follows as an event."""
        if request.outgoing is not None:
            request.outgoing.abort(reason)

    def _accept(self, request: LanguageRequest, received: ReceivedGrant) -> None:
        grant = received.grant
        counts = [len(sequence.block_table) + len(sequence.state) for sequence in request.sequences]
        places = PromptPlaces(grant, counts)
        request.send_to(self._transfer_engine.open(received), places)
        self._by_lease[grant.lease_id] = request
        plan_end(request, grant.token_s, self._budget, self._layout)


def plan_end(
    request: LanguageRequest, token_s: float | None, budget: StepBudget, layout: MemoryLayout
) -> None:
    """Decides how much of the prompt travels, before any of it is sent. token_s: in which decode computes a
    token. Tokens up to the end of the last media item always travel, because decode gets no
    embeddings of it."""
    outgoing, main = request.outgoing, request.main
    if outgoing is None or token_s is None or (block_s := outgoing.block_s) is None:
        return
    block_size, unit = layout.segments[0].rows, outgoing.blocks_together
    least = max(-(-main.prompt.media_end // block_size), -(-MIN_SENT_BYTES // layout.block_bytes))
    missing = request.num_missing_tokens
    prefill_s = budget.predicted_s(missing, main.num_computed_tokens + missing / 2)
    num_blocks = num_blocks_to_send(
        main.num_prompt_tokens / block_size, block_s, token_s * block_size, prefill_s
    )
    first = 0 if request.places is None else request.places.first_block(0)  # those before it are there
    num_blocks = -(-max(num_blocks, least, first) // unit) * unit
    if num_blocks * block_size < main.num_prompt_tokens:
        main.leave_to_receiver(num_blocks * block_size)


def num_blocks_to_send(num_blocks: float, block_s: float, compute_s: float, prefill_s: float) -> int:
    """The n <= num_blocks with which the KV of a prompt is complete at decode soonest. Blocks [0, n) travel,
    block_s each, while the prompt is computed, which takes prefill_s. Then decode computes the others,
    compute_s each. All in seconds:

        max(0, n * block_s - prefill_s) + (num_blocks - n) * compute_s

    This falls while the transfer hides behind prefill. After that it falls if sending a block is faster than
    computing it, and rises otherwise."""
    if block_s <= compute_s:
        return math.ceil(num_blocks)
    return min(math.ceil(num_blocks), int(prefill_s / block_s))


def send_computed(request: LanguageRequest, block_size: int) -> None:
    """Posts what is computed and not posted yet. After the first tokens, finishes the transfer. Does nothing
    until decode's grant is there."""
    if request.outgoing is None:
        return
    for sequence in request.sequences:
        new = _new_blocks(request, sequence, sequence.num_computed_tokens, block_size)
        if new:
            local_ids, grant_indices = _places(request, sequence, new)
            if local_ids:
                request.outgoing.write(local_ids, grant_indices)
            sequence.sent(new.stop)
    if request.first_tokens:
        _write_states(request)
        deltas = tuple(s.position_delta for s in request.sequences)
        ready = KvReady(request.first_tokens, deltas, request.main.first_recomputed)
        request.outgoing.finish(msgspec.msgpack.encode(ready))


def _write_states(request: LanguageRequest) -> None:
    """Posts the state of each prompt: to the last places of the prompt in the grant."""
    if request.outgoing is None or request.places is None:
        raise InternalError("a grant is placed before it is used")
    for i, sequence in enumerate(request.sequences):
        num_kv = len(sequence.block_table)
        if sequence.state:
            _, indices = request.places.of(i, range(num_kv, num_kv + len(sequence.state)))
            request.outgoing.write(sequence.state, indices)


@dataclass
class _Push:
    """What the step sends of one sequence."""

    sequence: TokenSequence
    outgoing: OutgoingLease
    num_blocks_after: int
    local_ids: Sequence[int]
    grant_indices: Sequence[int]
    layers_per_write: int
    first_layer: int = 0  # first layer that has not been posted


class StepPush:
    """Sends the blocks that a step completes while it runs. Made before the forward. `on_layer` is called
    after each layer, in order; `close` after the forward. If a grant arrives during the step, its request
    joins, with the layers that are computed already. If a lease cannot be written any more, the request ends
    with the sender's event, like after any failed write."""

    def __init__(self, works: Sequence[PromptWork], layout: MemoryLayout, num_layers: int):
        self._layout = layout
        self._num_layers = num_layers
        self._segments_per_layer = len(layout.segments) // num_layers
        self._pushes: list[_Push] = []
        self._waiting = list(works)  # requests that may get their grants

    def on_layer(self, layer_idx: int, ready: Ready) -> None:
        """Layer `layer_idx` of all these blocks is final, once `ready()` is true."""
        self._join()
        for push in self._pushes:
            num_done = layer_idx + 1
            if num_done - push.first_layer < push.layers_per_write and num_done < self._num_layers:
                continue
            first, end = push.first_layer * self._segments_per_layer, num_done * self._segments_per_layer
            push.first_layer = num_done
            if not push.local_ids:  # the other worker has these blocks
                continue
            try:
                push.outgoing.write(push.local_ids, push.grant_indices, range(first, end), ready)
            except TransferError:  # the lease has expired; its event follows
                continue

    def close(self) -> None:
        for push in self._pushes:
            push.sequence.sent(push.num_blocks_after)

    def _join(self) -> None:
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            request, sequence = work.request, work.sequence
            if request.outgoing is None:
                self._waiting.append(work)
                continue
            end, block_size = sequence.num_computed_tokens + work.num_tokens, self._layout.segments[0].rows
            if new := _new_blocks(request, sequence, end, block_size):
                local_ids, indices = _places(request, sequence, new)
                num_bytes = max(1, len(local_ids)) * self._layout.block_bytes
                layers = min(-(-MIN_WRITE_BYTES * self._num_layers // num_bytes), self._num_layers)
                push = _Push(sequence, request.outgoing, new.stop, local_ids, indices, layers)
                self._pushes.append(push)


def _new_blocks(
    request: LanguageRequest, sequence: TokenSequence, num_computed_tokens: int, block_size: int
) -> range:
    """Blocks that are final when `num_computed_tokens` are computed, may be sent, and are not posted yet."""
    together = 1 if request.outgoing is None else request.outgoing.blocks_together
    end = sequence.num_prompt_tokens if sequence.first_recomputed is None else sequence.first_recomputed
    num_ready = min(num_computed_tokens, end) // block_size // together * together
    if num_computed_tokens >= end:
        num_ready = -(-end // block_size)
    return range(sequence.num_blocks_sent, max(num_ready, sequence.num_blocks_sent))


def _places(
    request: LanguageRequest, sequence: TokenSequence, blocks: range
) -> tuple[list[int], Sequence[int]]:
    """Returns those of these blocks that the other worker lacks: their ids here, and their indices in the
    grant."""
    if request.places is None:
        raise InternalError("a grant is placed before it is used")
    wanted, indices = request.places.of(request.sequences.index(sequence), blocks)
    return [sequence.block_table[i] for i in wanted], indices
