"""Frames of the side channel between a door and a worker. The door dials; workers never dial each other.

One request, in call order (D decode, P prefill, E encoder):

    door → P  StartPrefill           P → door  FeatureGranted per item (at once, if there is room), or FeatureShared
    door → E  StartEncode per item   P → door  PrefillAdmitted (it has the prompts' blocks)
    door → D  StartDecode            D → door  DecodeGranted (StartDecode with `prefills`: P has no part in the request)
    door → P  DecodeTarget (D's grant, as soon as it is there)
    door → E  EncodeTarget per item (P's grant)
    door → D, P  GrantPassed behind each of these two, to the grant's owner: who may write now
    door → E  Cancel per shared item; should P grant it later after all, StartEncode and EncodeTarget follow
    E → door  Encoded (the embeddings are in P's memory)
    E → door  Failed for an item, or the encoder is lost: the door asks another one, and if the lost one had P's grant tells P so
              (EncoderLost); whenever a lease ends without embeddings, P grants anew
    E → all doors  CacheChanged: what it has taken on, and what it does not have any more
    P → all doors  BlocksChanged: the same of its prefix cache
    any → all doors  Measured: how fast it is
    any → all doors  Stalled: which of its threads have work and do not move
    door → any  Ping, when nothing has come for a while from a worker that has a request of this door; answered at once with Pong
    P → door  Tokens (the first token)
    D → door  Tokens (one frame per decode step, for all requests of this door)
    D → door  Preempted; ends the request at that worker: the door starts what is left of it anew
    any → door  Failed; ends the request at that worker
    door → any  Cancel; may come in every state, may repeat, needs no answer: the worker frees and, if it held
                the request, answers with a `Tokens` entry of finish reason "cancelled"

Memory is taken at P first and at D only by those who have it at P: whatever order each keeps, no two requests wait for
each other.

A worker that sees end-of-file on a door's connection cancels everything that door asked for.
Every message is a frozen struct; the tag is its class name. `PROTOCOL_VERSION` is checked in `Hello`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cluster.errors import ErrorInfo
from cluster.types.curves import ServiceCurves
from cluster.types.media import MediaItem
from cluster.types.members import ProcessId
from cluster.types.request import GenerateRequest
from cluster.types.transfer import Grant, ReceivedTotals, SentTotals

PROTOCOL_VERSION = 9


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"  # the door asked


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of every frame."""


class Hello(Message, frozen=True):
    """First frame in each direction."""

    protocol_version: int
    name: str  # door: its id; worker: its replica id


class StartDecode(Message, frozen=True):
    """Reserve blocks for the prompts and wait for their KV."""

    request: GenerateRequest
    timeout_s: float  # until the first step; the request fails when its KV has not come by then
    prefills: bool = False  # compute the prompt there, a text without a companion: no KV comes, the first token is decode's
    codec: str = "raw"  # in which the KV is to come where it can; raw: exactly as computed


class DecodeGranted(Message, frozen=True):
    """The grant's blocks: the prompt's, then the companion's."""

    request_id: str
    grant: Grant


class StartPrefill(Message, frozen=True):
    request: GenerateRequest
    timeout_s: float  # until the first token


class PrefillAdmitted(Message, frozen=True):
    """Prefill holds the blocks of all prompts: it is time to ask decode for the same."""

    request_id: str


class FeatureGranted(Message, frozen=True):
    """Where the embeddings of `prompt.media[item_idx]` go. Sent as soon as prefill has room for them."""

    request_id: str
    item_idx: int
    grant: Grant


class FeatureShared(Message, frozen=True):
    """The embeddings of `prompt.media[item_idx]` come, or came, for another request in work: they are not needed again. If they
    fail to come, `FeatureGranted` follows."""

    request_id: str
    item_idx: int


class DecodeTarget(Message, frozen=True):
    """Decode's grant, passed on to prefill."""

    request_id: str
    grant: Grant


class StartEncode(Message, frozen=True):
    """Encode (or find in the cache) one item and push its embeddings to a grant."""

    request_id: str
    item_idx: int  # position in the prompt's media
    item: MediaItem
    timeout_s: float
    priority: int = 0  # class of the request; lower goes sooner
    waited_s: float = 0.0  # since the client asked, when the door sent this
    num_rows_before: int = (
        0  # before pooling, of the request's items that stand before it: they are needed sooner
    )
    keep: bool = True  # another use is expected; else the embeddings are the first to make room for others


class EncodeTarget(Message, frozen=True):
    """Prefill's grant for one item, passed on to the encoder; may come before or after encoding has finished."""

    request_id: str
    item_idx: int
    grant: Grant


class EncoderLost(Message, frozen=True):
    """To prefill: the encoder that was given this grant of one item is gone. Another grant follows."""

    request_id: str
    item_idx: int
    lease_id: str


class GrantPassed(Message, frozen=True):
    """To the owner of a grant: the processes that were given it. When all of them have ended, nothing can write any more."""

    lease_id: str
    processes: tuple[ProcessId, ...]


class ReturnGrant(Message, frozen=True):
    """To the owner of a grant that came after its request had landed: no writer was ever given it, so its blocks can be
    reused at once. Sound because the door is the only one who passes grants on."""

    lease_id: str


class EncodeTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one item at its encoder, from StartEncode's arrival there to the end of its transfer; they follow each other."""

    preparing_s: float = 0.0  # waiting for a thread, decoding, preprocessing
    queued_s: float = 0.0  # ready, while the device did something else
    encoding_s: float = 0.0  # first call begun to last call ended
    target_s: float = 0.0  # rows there, prefill's grant not
    sending_s: float = 0.0


class PrefillTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds of one request at its prefill worker, from StartPrefill's arrival there to the first token; their sum is that time."""

    blocks_s: float = 0.0  # waiting for KV blocks
    media_s: float = 0.0  # nothing could be computed before more embeddings came
    queued_s: float = 0.0  # could be computed, while the device did something else
    computing_s: float = 0.0  # in steps that computed some of it


class Encoded(Message, frozen=True):
    request_id: str
    item_idx: int
    cached: bool  # the embeddings were in the encoder cache
    timing: EncodeTiming = EncodeTiming()


class CacheChanged(Message, frozen=True):
    """Encoder → every door, once per step in which it holds: items (by media hash) that it has, or has taken on, since, and those that
    it does not have any more. A door that connects is told everything first. One hash is never in both."""

    added: tuple[str, ...]
    evicted: tuple[str, ...]


class BlocksChanged(Message, frozen=True):
    """Prefill → every door, once per step in which it holds: full blocks of prompts (by block hash) that its prefix cache has since,
    and those that it does not have any more. A door that connects is told everything first. One hash is never in both."""

    added: tuple[bytes, ...]
    evicted: tuple[bytes, ...]


class Measured(Message, frozen=True):
    """Worker → every door: how fast it is. When a door connects, and again when that has changed noticeably."""

    curves: ServiceCurves


class Stalled(Message, frozen=True):
    """Worker → every door: the names of its threads that have work and have not moved for a while; empty: all move again."""

    threads: tuple[str, ...]


class Ping(Message, frozen=True):
    """Does the worker's event loop run?"""


class Pong(Message, frozen=True):
    """It does."""


class TokenEvent(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one choice. Exactly one event with a finish reason ends a choice; prefill's event, where prefill has a part in
    the request, carries the first token, and a finish reason only if that token already ends the choice. "cancelled" is about the
    whole request."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prefill only: prompt tokens whose KV came from the prefix cache
    choice_idx: int = 0
    timing: PrefillTiming | None = (
        None  # with the first token of the first choice, of who computed the prompt
    )
    step_s: float = 0.0  # decode, with a request's first tokens from there: seconds since its KV was complete


class DecodeTotals(msgspec.Struct, frozen=True, array_like=True):
    """Of a decode worker since it started."""

    num_preempted: int = 0  # requests that lost their blocks
    num_drafted: int = 0  # tokens that speculation guessed
    num_accepted: int = 0  # guesses that were right


class EncodeTotals(msgspec.Struct, frozen=True, array_like=True):
    """Of an encode worker since it started."""

    num_encoded: int = 0  # items that went through the encoder
    num_cached: int = 0  # times that an item was asked for and was there already
    num_failed: int = 0  # items that could not be encoded
    num_rows: int = 0  # embedding rows made


class LoadReport(msgspec.Struct, frozen=True, array_like=True):
    """A worker's load at one instant."""

    num_running: int = 0  # requests (encoder: items) being worked on
    num_waiting: int = 0  # … waiting for memory, for embeddings or for KV
    num_queued_units: int = 0  # work not done yet: prefill tokens, decode sequences or embedding rows
    num_used_blocks: int = 0  # blocks that some request holds (cached blocks nobody holds do not count)
    num_open_leases: int = 0  # writes by or into this worker that are not closed
    num_cached_blocks: int = 0  # blocks kept for reuse
    totals: DecodeTotals = DecodeTotals()
    sent: SentTotals = SentTotals()
    held_bytes: int = (
        0  # for media in work. Encoder: files, and tensors made of them; prefill: room for embeddings
    )
    sending_bytes: int = 0  # encoder: embeddings that are being written to prefill workers
    encoded: EncodeTotals = EncodeTotals()
    num_context_tokens: int = 0  # decode: of all sequences that are running
    received: ReceivedTotals = ReceivedTotals()

    @property
    def is_idle(self) -> bool:
        """Nothing is held for anybody; what is kept for reuse does not count."""
        return self == LoadReport(
            num_cached_blocks=self.num_cached_blocks,
            totals=self.totals,
            sent=self.sent,
            encoded=self.encoded,
            received=self.received,
        )


class Tokens(Message, frozen=True):
    """One frame per step for all of one door's requests; load rides along where it counts all that had come by then."""

    events: tuple[TokenEvent, ...]
    load: LoadReport | None = None


class Failed(Message, frozen=True):
    """This worker has given the request up and freed what it held."""

    request_id: str
    error: ErrorInfo
    item_idx: int | None = None  # encoder only


class Preempted(Message, frozen=True):
    """Decode needed the blocks for an older request and has forgotten this one."""

    request_id: str


class Cancel(Message, frozen=True):
    request_id: str
    choice_idx: int | None = None  # decode: only this choice, if others of the request go on
    item_idx: int | None = None  # encoder: only this item; the request goes on


AnyMessage = (
    Hello | StartDecode | DecodeGranted | StartPrefill | PrefillAdmitted | FeatureGranted | FeatureShared | DecodeTarget
    | StartEncode | EncodeTarget | EncoderLost | GrantPassed | ReturnGrant | Encoded | CacheChanged
    | BlocksChanged | Measured | Stalled | Ping | Pong | Tokens | Failed | Preempted | Cancel
)  # fmt: skip


class Notice(msgspec.Struct, frozen=True, tag=True):
    """Base of what a writer tells the owner of the memory, through the agents' own notifications."""


class KvReady(Notice, frozen=True):
    """All KV that travels is written. Payload of prefill's last notification."""

    first_tokens: tuple[int, ...]  # per choice
    position_deltas: tuple[int, ...]  # per prompt; mRoPE: position = context length + delta; else 0
    first_recomputed: int | None = None  # of the prompt: from this token on decode computes the KV anew


class FeaturesReady(Notice, frozen=True):
    media_hash: str
