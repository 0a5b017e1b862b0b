"""A conversation as the chat template gets it: roles, text, places of media items, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cluster.types.media import MediaLayout, Modality


class ChatText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ChatMedia(msgspec.Struct, frozen=True, tag="media"):
    """The place of one media item. The items themselves are passed with the messages, in the same order."""

    modality: Modality


class LaidOutMedia(msgspec.Struct, frozen=True):
    """What replaces one media item in the prompt."""

    layout: MediaLayout
    media_hashes: tuple[str, ...]  # of each part of the layout


class ToolCall(msgspec.Struct, frozen=True):
    """A call in an earlier answer."""

    call_id: str
    name: str
    arguments: str  # JSON of an object


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    # a string or parts, as the client sent it, because templates may treat the two differently
    content: str | tuple[ChatText | ChatMedia, ...]
    tool_calls: tuple[ToolCall, ...] = ()  # of an assistant's message
    tool_call_id: str = ""  # of a tool's message: the call that it answers …
    name: str = ""  # … and that tool's name
    reasoning: str = ""  # of an assistant's message; most templates leave it out

    def modalities(self) -> tuple[Modality, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part.modality for part in self.content if isinstance(part, ChatMedia))


class ChatOptions(msgspec.Struct, frozen=True):
    """What a chat template gets besides the messages."""

    tools: tuple[str, ...] = ()  # in the API's form, as JSON
    variables: tuple[tuple[str, str], ...] = ()  # the client's `chat_template_kwargs`: names, values as JSON
    hints: tuple[tuple[str, str], ...] = ()  # the same, where the template has them and none is set above
    hint_param: str = ""  # a field of the request that is refused if the template has none of the hints


NO_OPTIONS = ChatOptions()


def media_order(messages: Iterable[ChatMessage]) -> tuple[Modality, ...]:
    """Modalities of all media items, in the order in which the client sent them."""
    return tuple(modality for message in messages for modality in message.modalities())
