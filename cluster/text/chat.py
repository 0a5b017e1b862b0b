"""A conversation as the chat template gets it: roles, text, and places of media items."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from cluster.types.media import MediaLayout, Modality


class ChatText(msgspec.Struct, frozen=True, tag="text"):
    text: str


class ChatMedia(msgspec.Struct, frozen=True, tag="media"):
    """The place of one media item. The items themselves are passed beside the messages, in the same order."""

    modality: Modality


class LaidOutMedia(msgspec.Struct, frozen=True):
    """What replaces one media item in the prompt."""

    layout: MediaLayout
    media_hashes: tuple[str, ...]  # of each part of the layout


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    # a string or parts, as the client sent it, because templates may treat the two differently
    content: str | tuple[ChatText | ChatMedia, ...]

    def modalities(self) -> tuple[Modality, ...]:
        if isinstance(self.content, str):
            return ()
        return tuple(part.modality for part in self.content if isinstance(part, ChatMedia))


def media_order(messages: Iterable[ChatMessage]) -> tuple[Modality, ...]:
    """Modalities of all media items, in the order in which the client sent them."""
    return tuple(modality for message in messages for modality in message.modalities())
