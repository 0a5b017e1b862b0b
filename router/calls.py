"""What a client asks for and what it gets back, apart from HTTP: the types that the API, the door and the
prompt builder share.

Pure frozen values. The API makes a call from a request body (`router.openai.translate`), valid by
construction and with every default filled in. The door answers with deltas, usage and notes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from cluster.media.sources import MediaSource
from cluster.text.chat import ChatMessage
from cluster.types.request import SamplingParams
from cluster.types.structure import Structure


class StopRules(msgspec.Struct, frozen=True):
    """When a choice ends."""

    max_tokens: int | None  # None: the model's default, as far as the context has room
    token_ids: tuple[int, ...]  # includes the model's end-of-sequence ids unless the client ignores them
    strings: tuple[str, ...]
    min_tokens: int = 0


class GuidanceRules(msgspec.Struct, frozen=True):
    """Classifier-free guidance. Without a negative prompt, the prompt's last token is one."""

    scale: float
    negative: tuple[ChatMessage, ...] | str | None


class MediaRules(msgspec.Struct, frozen=True):
    """What may be done with media that cost too much or cannot be used."""

    max_tokens: int | None = None  # of all items together
    is_exact: bool = False  # nothing may be reduced
    omits_bad: bool = False  # an item that cannot be used is left out, and the request is answered without it


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both endpoints have."""

    sampling: tuple[SamplingParams, ...]  # one per choice; choice i of every prompt draws with sampling[i]
    structure: Structure | None = None  # the form of each answer
    stop: StopRules
    guidance: GuidanceRules | None = None
    priority: int = 0
    stream: bool = False
    include_usage: bool = False  # streams only: a last chunk with the usage
    tenant: str = ""  # is charged for the request, and may use the files that were fetched for it
    cache_salt: str = ""  # tenant and client's salt: only KV and embeddings under the same salt are reused
    trace_parent: str = ""  # the client's span


class ChatCall(Call, frozen=True, kw_only=True):
    messages: tuple[ChatMessage, ...]
    media: tuple[MediaSource, ...]  # in the order of the messages' media parts; not yet opened
    media_rules: MediaRules = MediaRules()


class CompletionCall(Call, frozen=True, kw_only=True):
    prompts: tuple[str | tuple[int, ...], ...]


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of one choice's text. Only the last one carries the finish reason; its text may be empty."""

    text: str
    num_tokens: int = 0
    finish_reason: Literal["stop", "length"] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one choice. Each choice counts the prompt; the API counts it once per prompt."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt
    audio_tokens: int = 0  # of the prompt


class MediaNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change to one media item that the client did not ask for, in `media` of the answer."""

    item: int  # index among the request's items
    modality: str
    reason: str  # "budget" or "load": it was reduced; "error": it was left out
    num_tokens: int = 0  # after the change
    num_frames: int | None = None
    max_pixels: int | None = None  # of the image, or of each frame
    error: str | None = None
