"""What the API asks of the door. The fake in `tests/unit/openai/fake_door.py` implements it too.

One call, in order: `chat` or `complete` → for every generation: iterate to its finish reason → `usage` → `aclose`.
`aclose` is always called, also after the end, after an error and when the client is gone; it may be repeated.
While `chat` or `complete` is still waiting, a client that leaves cancels the awaiting task.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal, Protocol

import msgspec

from cluster.text.defaults import GenerationDefaults
from router.openai.limits import Limits
from router.openai.translate import ChatCall, CompletionCall


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of one choice's text. The last one, and only it, carries the finish reason; its text may be empty."""

    text: str
    num_tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one choice; the prompt is counted in each, the API counts it once per prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt
    audio_tokens: int = 0  # of the prompt


class MediaNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was done to one media item that the client did not ask for. It is told so, in `media` of the answer."""

    item: int  # its place among the request's items
    modality: str
    reason: str  # "budget" or "load": it was reduced; "error": it was left out
    num_tokens: int = 0  # that it has now
    num_frames: int | None = None
    max_pixels: int | None = None  # of the image, or of each frame
    error: str | None = None


class TimelineProtocol(Protocol):
    """Where the time of a prompt went; see `router.telemetry.timeline`."""

    def fields(self) -> dict[str, Any]:
        """For the body of an answer."""
        ...

    def header(self) -> str: ...


class Generation(Protocol):
    """One choice."""

    @property
    def media_notes(self) -> Sequence[MediaNote]:
        """The same for all choices of a prompt."""
        ...

    @property
    def usage(self) -> Usage:
        """Up to date at every moment; final after the last delta."""
        ...

    @property
    def ledger(self) -> TimelineProtocol:
        """The same for all choices of a prompt; its time to first token is final with the first delta."""
        ...

    def __aiter__(self) -> AsyncIterator[TextDelta]:
        """May raise a ClusterError at any point; then nothing more comes."""
        ...

    async def aclose(self) -> None:
        """Cancel it in every pool if it still runs."""
        ...


class DoorProtocol(Protocol):
    model_id: str
    created: int  # unix seconds
    defaults: GenerationDefaults  # for fields that a request leaves out
    limits: Limits  # for all others

    async def chat(self, call: ChatCall) -> list[Generation]:
        """One generation per choice. Raises ClusterError."""
        ...

    async def complete(self, call: CompletionCall) -> list[Generation]:
        """Choices of the first prompt, then of the second, and so on. Raises ClusterError."""
        ...

    def is_ready(self) -> bool:
        """Whether every pool that the model needs has a member."""
        ...

    def metrics(self) -> bytes:
        """Prometheus text."""
        ...
