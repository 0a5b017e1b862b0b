"""Frames of the side channel between a door and a worker. The door dials; workers never dial each other.

One request, in call order (D decode, P prefill, E encoder):

    door → P  StartPrefill
    P → door  FeatureGranted per item (at once, if there is room), or FeatureShared
    door → E  StartEncode per item, unless P is expected to have its tokens cached
    P → door  PrefillAdmitted (P holds the prompts' blocks)
    door → D  StartDecode
    D → door  DecodeGranted
    door → P  DecodeTarget (D's grant, as soon as it has come)
    door → E  EncodeTarget per item (P's grant)
    door → D, P  GrantPassed after each of these two, to the owner of the grant: these processes may write
    door → E  Cancel per shared item; if P later sends a grant for it, or for a cached one, StartEncode and
              EncodeTarget follow
    E → door  Encoded (the embeddings are in P's memory)
    P → door  Tokens (the first token)
    D → door  Tokens (one frame per decode step, for all requests of this door)

If one worker computes the prompt and generates the answer, it is D and P in one: `StartDecode.prefills` takes
the place of StartPrefill, PrefillAdmitted, DecodeGranted and DecodeTarget. Everything about media is as
above, and its first Tokens are those of P.

If the worker that computes the prompt encodes an item itself, it is E and P in one for that item: the start
of the prompt says so (`encodes`), and neither FeatureGranted nor EncodeTarget nor a lease is needed.

When something fails:

    E → door  Failed for an item: the door asks another encoder
    door → P  EncoderLost, if the lost encoder had P's grant, or if P itself was to encode the item: the door
              asks another encoder
    P → door  FeatureGranted once more, whenever a lease ends without embeddings
    D → door  Preempted: ends the request at that worker; the door starts the rest of it as a new request
    any → door  Failed; ends the request at that worker
    door → any  Cancel; may come in every state, may repeat, needs no answer. The worker frees what it holds.
                If it held the request, it answers with a `Tokens` entry of finish reason "cancelled"
    a door dials again after its connection broke: each `Hello` names the last message about a grant that was
                read, so those after it are lost (`cluster.rpc.sent_log`). The worker takes its lost grants
                back; for a lost DecodeTarget or EncodeTarget the door returns the grant to its owner; a lost
                GrantPassed or ReturnGrant is sent again
    door → any  Goodbye, before it closes the connection itself: as `Hello`, for a door that does not dial
                again

At any time:

    E → all doors  CacheChanged: items that its cache has gained and lost
    P, D → all doors  BlocksChanged: the same for the blocks of its prefix cache, if it has one
    any → all doors  Measured: how fast the worker is
    any → all doors  Stalled: the threads of the worker that have work and do not move
    any → all doors  PhasesAssigned: the phases that the worker shall do from now on
    P, D → all doors  AdaptersHeld: LoRA adapters that it shall hold, and does; a door that knows
              of newer ones answers with SetAdapters
    door → any  Ping, if a worker that has a request of this door has been silent for a while; the worker
                answers with Pong at once

A request gets memory at P first, and asks for memory at D only when it has memory at P. Therefore no two
requests wait for each other, whatever order each worker keeps.

A worker that sees end-of-file on a door's connection cancels all requests of that door.
Every message is a frozen struct, tagged by its class name. `Hello` has the `PROTOCOL_VERSION`; both check it.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cluster.errors import ErrorInfo
from cluster.types.adapters import AdapterFailure, AdapterSet
from cluster.types.curves import ServiceCurves
from cluster.types.logprobs import TokenLogprobs
from cluster.types.media import MediaItem
from cluster.types.members import Phase, ProcessId
from cluster.types.request import GenerateRequest
from cluster.types.timings import EncodeTiming, PrefillTiming
from cluster.types.transfer import Grant, ReceivedTotals, SentTotals, TierTotals

PROTOCOL_VERSION = 18


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token
    COMPLETE = "complete"  # nothing may follow under the request's structure; the last token is text
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # by the door


class ChannelMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of every frame."""


class RequestMessage(ChannelMessage, frozen=True):
    """Base of frames about one attempt of a request."""

    request_id: str


class ItemMessage(RequestMessage, frozen=True):
    """Base of frames about one of its media items."""

    item_idx: int  # position in the prompt's media


class Hello(ChannelMessage, frozen=True):
    """First frame in each direction."""

    protocol_version: int
    name: str  # of the process; no other process ever has it
    # `cluster.rpc.grant_name` of the last message that this process has read from the other, over all
    # connections. Empty: it has read none. None: it does not know the other one
    last_read: str | None = None


class Goodbye(ChannelMessage, frozen=True):
    """The last frame of a door that closes the connection: it reads nothing more."""

    last_read: str | None  # as in `Hello`


class StartDecode(ChannelMessage, frozen=True):
    """Reserve blocks for the prompts and wait for their KV, or compute it."""

    request: GenerateRequest
    timeout_s: float  # until the first step; without its KV by then the request fails
    # Local prefill: the worker computes the prompts and draws the first tokens; no KV comes
    prefills: bool = False
    codec: str = "raw"  # the codec in which KV shall travel where possible; raw: exactly as computed
    encodes: tuple[int, ...] = ()  # as in `StartPrefill`; if it prefills
    cached: tuple[int, ...] = ()  # the same


class DecodeGranted(RequestMessage, frozen=True):
    """The blocks of the grant: those of the prompt, then those of the negative prompt."""

    grant: Grant


class StartPrefill(ChannelMessage, frozen=True):
    request: GenerateRequest
    timeout_s: float  # until the first token
    # media items that this worker encodes itself (StartEncode): it grants no lease for their embeddings
    encodes: tuple[int, ...] = ()
    # media items whose tokens the door expects in the worker's prefix cache: no encoder is asked for these.
    # If the tokens are not there, FeatureGranted or another request's embeddings follow
    cached: tuple[int, ...] = ()


class PrefillAdmitted(RequestMessage, frozen=True):
    """Prefill holds the blocks of all prompts. The door may now ask decode for the same."""


class FeatureGranted(ItemMessage, frozen=True):
    """Destination of the embeddings of `prompt.media[item_idx]`. Sent when the prompt's worker has room."""

    grant: Grant


class FeatureShared(ItemMessage, frozen=True):
    """Another request in work gets, or got, the embeddings of `prompt.media[item_idx]`: nothing needs to be
    sent for this one. If the embeddings fail to come, `FeatureGranted` follows."""


class DecodeTarget(RequestMessage, frozen=True):
    """Decode's grant, passed on to prefill."""

    grant: Grant


class StartEncode(ItemMessage, frozen=True):
    """Encode (or find in the cache) one item and push its embeddings to a grant."""

    item: MediaItem
    timeout_s: float
    priority: int = 0  # the request's; lower goes sooner
    waited_s: float = 0.0  # time since the client asked, when the door sent this
    # rows, before pooling, of the request's items before this one in the prompt: prefill needs those sooner
    num_rows_before: int = 0
    keep: bool = True  # another use is expected; False: these embeddings are evicted before others


class EncodeTarget(ItemMessage, frozen=True):
    """Prefill's grant for one item, passed on to the encoder: before or after the end of encoding."""

    grant: Grant


class EncoderLost(ItemMessage, frozen=True):
    """A message to the worker that computes the prompt: the encoder that had this grant for one item is lost.
    The worker answers with another grant."""

    lease_id: str  # empty: the worker itself was to encode the item, and now another one does


class GrantPassed(ChannelMessage, frozen=True):
    """A message to the owner of a grant: the processes that received it. When all of them have ended, nothing
    can write any more."""

    lease_id: str
    processes: tuple[ProcessId, ...]


class ReturnGrant(ChannelMessage, frozen=True):
    """A message to the owner of a grant that reached the door after the request had ended. The owner may
    reuse the blocks at once: only the door passes grants on, so no writer ever had this one."""

    lease_id: str


class Encoded(ItemMessage, frozen=True):
    cached: bool  # the embeddings came from the encoder cache
    timing: EncodeTiming = EncodeTiming()


class CacheChanged(ChannelMessage, frozen=True):
    """Encoder → every door, once per step with changes. `added`: items, by media hash, that it has started or
    finished since the last such message. `evicted`: items that it no longer has. When a door connects, the
    first message lists everything. No hash is in both."""

    added: tuple[str, ...]
    evicted: tuple[str, ...]


class BlocksChanged(ChannelMessage, frozen=True):
    """Worker with a prefix cache → every door, once per step with changes: full blocks, by block hash, that
    the cache has gained and lost. When a door connects, the first message lists everything. No hash is in
    both."""

    added: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class Measured(ChannelMessage, frozen=True):
    """Worker → every door: how fast it is. Sent when a door connects, and again after a noticeable change."""

    curves: ServiceCurves
    is_of_encoder: bool = False  # as in `LoadReport`


class Stalled(ChannelMessage, frozen=True):
    """Worker → every door: names of its threads that have work and have not moved for a while. Empty: all
    move again."""

    threads: tuple[str, ...]


class PhasesAssigned(ChannelMessage, frozen=True):
    """Worker → every door: the part of its role that new requests shall use, as long as other workers do the
    rest. What it has begun it ends. `epoch`: how many times the worker has been assigned phases."""

    phases: tuple[Phase, ...]
    epoch: int


class SetAdapters(ChannelMessage, frozen=True):
    """Hold these adapters and no others, unless a newer set is known."""

    wanted: AdapterSet


class AdaptersHeld(ChannelMessage, frozen=True):
    """Worker → every door, when a door connects and after every change. held: digests of the adapters of the
    set that new requests may have here."""

    wanted: AdapterSet
    held: tuple[str, ...]
    failed: tuple[AdapterFailure, ...] = ()


class Ping(ChannelMessage, frozen=True):
    """Asks whether the worker's event loop runs."""


class Pong(ChannelMessage, frozen=True):
    """The worker's event loop runs."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """New tokens of one choice. Exactly one event with a finish reason ends a choice. If prefill has a part
    in the request, its event carries the first token, and a finish reason only if that token already ends the
    choice. The finish reason "cancelled" holds for the whole request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # with `timing`: prompt tokens whose KV came from the prefix cache
    choice_idx: int = 0
    # with the first token of the first choice, from the worker that computed the prompt
    timing: PrefillTiming | None = None
    step_s: float = 0.0  # with a request's first tokens from decode: seconds since its KV was complete
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if the request wants them
    # with the first token of the first choice that is read, if the request wants them: one per text token of
    # the prompt, but its first token, in order
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


class DecodeTotals(msgspec.Struct, frozen=True, array_like=True):
    """Totals of a decode worker since its start."""

    num_preempted: int = 0  # requests that lost their blocks
    num_drafted: int = 0  # tokens that speculation guessed
    num_accepted: int = 0  # guesses that were right


class EncodeTotals(msgspec.Struct, frozen=True, array_like=True):
    """Totals of an encode worker since its start."""

    num_encoded: int = 0  # items that went through the encoder
    num_cached: int = 0  # requested items that were in the cache already
    num_failed: int = 0  # items that could not be encoded
    num_rows: int = 0  # embedding rows computed


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """A worker's load at one instant."""

    num_running: int = 0  # requests (encoder: items) in work
    num_waiting: int = 0  # requests (items) that wait for memory, embeddings or KV
    # work that is left: sequences of a worker that decodes, else prompt tokens or embedding rows
    num_queued_units: int = 0
    num_used_blocks: int = 0  # blocks that a request holds; without blocks that only the cache holds
    num_open_leases: int = 0  # writes by or into this worker that are not closed
    num_cached_blocks: int = 0  # blocks kept for reuse
    totals: DecodeTotals = DecodeTotals()
    sent: SentTotals = SentTotals()
    # for media in work. Encoder: files, and tensors made from them; others: room for embeddings
    held_bytes: int = 0
    sending_bytes: int = 0  # encoder: embeddings that are being written to prefill workers
    encoded: EncodeTotals = EncodeTotals()
    num_context_tokens: int = 0  # of all sequences that are running
    received: ReceivedTotals = ReceivedTotals()
    # Of a worker that decodes: prompts that it has still to compute itself, and their tokens that are left
    num_prompts: int = 0
    num_prompt_tokens: int = 0
    tier: TierTotals = TierTotals()
    # A worker that encodes and does other phases, too, reports of its encoder and of the rest one by one
    is_of_encoder: bool = False
    busy_s: float = 0.0  # in which its engine computed steps, since the start
    num_pool_faults: int = 0  # times that its idle engine found its KV blocks not in order

    @property
    def is_idle(self) -> bool:
        """No request holds anything. Blocks that are kept for reuse do not count."""
        return self == LoadReport(
            num_cached_blocks=self.num_cached_blocks,
            totals=self.totals,
            sent=self.sent,
            encoded=self.encoded,
            received=self.received,
            tier=self.tier,
            is_of_encoder=self.is_of_encoder,
            busy_s=self.busy_s,
            num_pool_faults=self.num_pool_faults,
        )


class Tokens(ChannelMessage, frozen=True):
    """One frame per step for all requests of one door. `load` is set if it includes everything that had
    arrived by then."""

    events: tuple[TokenEvent, ...]
    load: LoadReport | None = None


class Failed(RequestMessage, frozen=True):
    """This worker has stopped the request and freed what it held."""

    error: ErrorInfo
    item_idx: int | None = None  # encoder only


class Preempted(RequestMessage, frozen=True):
    """Decode needed the blocks for an older request and has dropped this one."""


class Cancel(RequestMessage, frozen=True):
    choice_idx: int | None = None  # decode: only this choice; the others of the request go on
    item_idx: int | None = None  # encoder: only this item; the request goes on


AnyMessage = (
    Hello | StartDecode | DecodeGranted | StartPrefill | PrefillAdmitted | FeatureGranted | FeatureShared
    | DecodeTarget | StartEncode | EncodeTarget | EncoderLost | GrantPassed | ReturnGrant | Encoded
    | CacheChanged | BlocksChanged | Measured | Stalled | PhasesAssigned | SetAdapters | AdaptersHeld | Ping
    | Pong | Tokens | Failed | Preempted | Cancel | Goodbye
)  # fmt: skip
