"""The values of placement: a request as policies see it, a placement, and its prediction.

Pure values. Durations are seconds from the decision unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types.media import Modality
from cluster.types.members import Role


@dataclass(frozen=True, slots=True)
class Worker:
    """One replica that may be chosen; the fields are those of `Member`."""

    replica_id: str
    role: Role
    num_blocks: int
    hardware: str = ""
    modalities: tuple[str, ...] = ()  # that it encodes, if it does; empty: all
    device: str = ""


@dataclass(frozen=True, slots=True)
class ItemView:
    """One media item of a request."""

    media_hash: str
    modality: Modality
    num_rows: int  # that the encoder computes, before pooling
    num_bytes: int  # of its embeddings, as they travel
    start: int  # first prompt token that needs it
    end: int  # one past its last token


@dataclass(frozen=True, slots=True)
class RequestView:
    """The facts of a request that a placement depends on."""

    request_id: str
    num_prompt_tokens: int
    block_size: int
    block_hashes: Sequence[bytes]  # one per full block of the prompt
    media: Sequence[ItemView] = ()  # in prompt order
    num_negative_tokens: int = 0  # of the negative prompt, computed beside it (guidance)
    num_sequences: int = 1  # in decode
    num_prefill_blocks: int = 0  # that a prefill worker must be able to hold
    num_decode_blocks: int = 0  # that a decode worker must be able to hold
    priority: int = 0  # class; lower goes sooner
    waited_s: float = 0.0  # since the client asked
    adapter: str = ""  # digest of the LoRA adapter that workers must hold
    avoided: frozenset[str] = frozenset()  # replica ids of workers that are chosen only if there is no other
    # One per block, or none: a prompt goes on behind a block only where this is known, too (hybrid models)
    snapshots: Sequence[bytes] = ()

    @property
    def media_end(self) -> int:
        """The place after the last token of any item; 0: there is none. Tokens from here on need no
        embeddings."""
        return max((item.end for item in self.media), default=0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Replica ids."""

    encoders: tuple[str, ...]  # per media item
    prefill: str  # computes the prompt
    decode: str
    codec: str = "raw"  # of the KV on the wire, where it can be coded

    @property
    def is_local(self) -> bool:
        """The worker that computes the prompt generates the answer: no KV travels."""
        return self.prefill == self.decode


@dataclass(frozen=True, slots=True)
class ItemPrediction:
    """One media item. All zero if prefill has its tokens cached, or an encoder its embeddings."""

    queue_s: float = 0.0  # until the encoder begins with the item
    encode_s: float = 0.0  # preparation and encoder calls
    transfer_s: float = 0.0
    work_s: float = 0.0  # of the encoder's device alone

    @property
    def arrival_s(self) -> float:
        return self.queue_s + self.encode_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is predicted of one placement. The first three sum to the time to first token."""

    media_s: float  # prefill waits for embeddings, not hidden behind other work
    queue_s: float  # at prefill
    prefill_s: float
    ttft_s: float
    transfer_s: float  # of KV, as far as it is not hidden
    first_step_s: float  # decode's wait for blocks, as far as it is not hidden, and its first step
    low_s: float  # the first token comes between these with a probability of 90 %
    high_s: float
    items: tuple[ItemPrediction, ...] = ()  # per media item
    work_s: float = 0.0  # of the prompt alone, at the worker that computes it


@dataclass(frozen=True, slots=True)
class Decision:
    placement: Placement
    prediction: Prediction
    # A few of the next best, with their predicted ttft_s
    alternatives: tuple[tuple[Placement, float], ...] = ()
