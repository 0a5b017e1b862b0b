"""What the API needs of the door. The fake in `tests/fakes/fake_door.py` implements it, too. And what a call
depends on besides the body of its request.

One call, in order: `chat` or `complete` → for every generation: iterate to its finish reason → `usage` →
`aclose`. `aclose` is always called, also after the end, after an error and when the client is gone; it may be
repeated. If the client disconnects while `chat` or `complete` is waiting, the awaiting task is cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.text.defaults import GenerationDefaults
from router.api.fields import MAX_PRIORITY
from router.calls import (
    ChatCall,
    CompletionCall,
    MediaNote,
    RankedToken,
    ServedModels,
    TextDelta,
    TokenizeCall,
    Tokenized,
    Usage,
)
from router.http.keys import Access
from router.http.limits import Limits

ANY = Limits(min_priority=-MAX_PRIORITY)  # for calls that no model will serve


class TimelineProtocol(Protocol):
    """How long each stage of a prompt took; see `router.telemetry.timeline`."""

    def fields(self) -> dict[str, Any]:
        """Returns what the body of an answer has of it."""
        ...

    def header(self) -> str: ...


class Generation(Protocol):
    """One choice."""

    @property
    def has_next(self) -> bool:
        """Whether the next delta is there already: the iteration goes on without waiting. False after the
        last delta."""
        ...

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt with media placeholders expanded; the same for all choices of a prompt."""
        ...

    @property
    def prompt_logprobs(self) -> Sequence[Sequence[RankedToken] | None]:
        """The prompt's tokens: at each position its own and the most probable ones, if the client wants them;
        None: not known. The same for all choices of a prompt; final with the first delta."""
        ...

    @property
    def media_notes(self) -> Sequence[MediaNote]:
        """What was changed in the media; the same for all choices of a prompt."""
        ...

    @property
    def usage(self) -> Usage:
        """The usage so far; final after the last delta."""
        ...

    @property
    def timeline(self) -> TimelineProtocol:
        """The timeline that all choices of a prompt share. Its time to first token is final with the first
        delta."""
        ...

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        """Yields deltas. May raise a ClusterError at any point; then the iteration has ended."""
        ...

    async def aclose(self) -> None:
        """Cancels the choice in every pool if it still runs."""
        ...


Generations = Sequence[Generation]  # all choices of the first prompt, then of the second, …
Answers = Sequence[Sequence[TextDelta]]  # all deltas of each generation; the last one has the finish reason
Ledger = Sequence[dict[str, Any]]  # fields of one timeline per prompt, if the client asked for them


def extra_fields(generation: Generation, ledger: Ledger) -> dict[str, Any]:
    """Returns the fields of an answer that are this server's own, as far as there is something to say: what
    was changed in the media, and the timelines."""
    found = {"media": generation.media_notes, "ledger": ledger}
    return {name: value for name, value in found.items() if value}


class AdaptersProtocol(Protocol):
    """Loading and unloading of LoRA adapters in all workers, while the cluster runs."""

    async def load(self, name: str, path: str) -> None:
        """Returns when clients may name the adapter. Raises ClusterError."""
        ...

    async def unload(self, name: str) -> None:
        """Returns when no new request gets it. Raises ClusterError."""
        ...


class DoorProtocol(Protocol):
    created: int  # unix seconds
    defaults: GenerationDefaults  # for fields that a request leaves out
    limits: Limits  # for all other fields
    access: Access
    transcription_instruction: str  # what the model is asked to do with a sound
    translation_instruction: str  # "" without the endpoint

    @property
    def models(self) -> ServedModels:
        """As of now: adapters come and go."""
        ...

    @property
    def adapters(self) -> AdaptersProtocol: ...

    async def chat(self, call: ChatCall) -> Generations:
        """Returns one generation per choice. Raises ClusterError."""
        ...

    async def complete(self, call: CompletionCall) -> Generations:
        """Returns the choices of the first prompt, then of the second, and so on. Raises ClusterError."""
        ...

    async def tokenize(self, call: TokenizeCall) -> Tokenized:
        """Raises ClusterError."""
        ...

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    def is_ready(self) -> bool:
        """Whether every pool that the model needs has a member."""
        ...

    def pools(self) -> dict[str, Any]:
        """Returns what the page shows: every pool and worker, and what waits. Names workers only if `limits`
        says so."""
        ...

    def metrics(self) -> bytes:
        """Returns Prometheus text."""
        ...


@dataclass(frozen=True)
class CallContext:
    """`tenant`: the client, by its credentials."""

    models: ServedModels
    defaults: GenerationDefaults
    tenant: str = ""
    trace_parent: str = ""
    limits: Limits = ANY
