"""What a placement is made of: a request as the router sees it, where it goes, and what that is predicted to take.

Pure values. Durations in seconds from the decision, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cluster.types.media import Modality
from cluster.types.members import Role


@dataclass(frozen=True, slots=True)
class Worker:
    """One replica that may be chosen; the fields mean what they mean in `Member`."""

    replica_id: str
    role: Role
    num_blocks: int
    hardware: str = ""
    modalities: tuple[str, ...] = ()  # encode only; none named: any


@dataclass(frozen=True, slots=True)
class ItemView:
    """One media item of a request."""

    media_hash: str
    modality: Modality
    num_rows: int  # that the encoder computes, before pooling
    num_bytes: int  # of its embeddings, as they travel
    start: int  # first prompt token that needs it
    end: int  # behind its last token


@dataclass(frozen=True, slots=True)
class RequestView:
    """What a placement depends on."""

    request_id: str
    num_prompt_tokens: int
    block_size: int
    block_hashes: Sequence[bytes]  # one per full block of the prompt
    media: Sequence[ItemView] = ()  # in prompt order
    num_companion_tokens: int = 0  # prompts computed beside it (guidance)
    num_sequences: int = 1  # in decode
    num_prefill_blocks: int = 0  # that a prefill worker must be able to hold
    num_decode_blocks: int = 0  # that a decode worker must be able to hold
    priority: int = 0  # class; lower goes sooner
    waited_s: float = 0.0  # since the client asked
    may_prefill_locally: bool = False  # decode may compute the prompt itself (text, no guidance, one choice)


@dataclass(frozen=True, slots=True)
class Placement:
    """Replica ids."""

    encoders: tuple[str, ...]  # per media item
    prefill: str | None  # None: the decode worker computes the prompt itself
    decode: str
    codec: str = "raw"  # of the KV on the wire, where it can be coded


@dataclass(frozen=True, slots=True)
class ItemPrediction:
    """One media item; all zero where prefill has the tokens that it stands for, or an encoder the embeddings."""

    queue_s: float = 0.0  # until the encoder begins with it
    encode_s: float = 0.0  # preparation and encoder calls
    transfer_s: float = 0.0

    @property
    def arrival_s(self) -> float:
        return self.queue_s + self.encode_s + self.transfer_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one placement. The sum of the first three is the time to the first token."""

    media_s: float  # that prefill waits for embeddings, not hidden behind other work
    queue_s: float  # at prefill
    prefill_s: float
    ttft_s: float
    transfer_s: float  # of KV that is not hidden
    first_step_s: float  # decode's wait for blocks that is not hidden, and its first step
    low_s: float  # the first token comes between these with a probability of 90 %
    high_s: float
    items: tuple[ItemPrediction, ...] = ()  # per media item


@dataclass(frozen=True, slots=True)
class Decision:
    placement: Placement
    prediction: Prediction
    alternatives: tuple[
        tuple[Placement, float], ...
    ] = ()  # a few of the next best, with their predicted ttft_s
