"""Media items and requests for engines without models, and what their tokens and rows leave in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace

import msgspec

from cluster.errors import UnsupportedError
from cluster.types.media import MediaGeometry, MediaItem, Modality, PlacedMedia
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams

FIRST_TOKEN = 50  # what prefill draws behind an original prompt; each later token is one more
UNPLACEABLE_TOKEN = 7
LAST_PROMPT_TOKEN = 40


def make_item(name: str, num_rows: int) -> MediaItem:
    return MediaItem(Modality.IMAGE, name.encode(), name, MediaGeometry(num_rows))


def make_video(name: str, num_frames: int, rows_per_frame: int = 2) -> MediaItem:
    """Can be cut between its frames."""
    geometry = MediaGeometry(num_frames * rows_per_frame, (num_frames, 2, 2 * rows_per_frame))
    return MediaItem(Modality.VIDEO, name.encode(), name, geometry)


def make_request(
    request_id: str,
    num_tokens: int,
    items: Sequence[MediaItem] = (),
    max_tokens: int = 4,
    stop: tuple[int, ...] = (),
    num_choices: int = 1,
    negative: int = 0,
    is_split: bool = False,
) -> GenerateRequest:
    """`num_tokens` of text, an item behind every third of them; `negative`: tokens of a companion's prompt;
    `is_split`: a token of text stands behind each item's first row."""
    token_ids: list[int] = []
    media: list[PlacedMedia] = []
    left = deque(items)
    for position in range(num_tokens):
        token_ids.append(100 + position)
        if (left and position % 3 == 2) or (left and position == num_tokens - 1):
            while left:
                item = left.popleft()
                num_rows, offset = item.geometry.num_tokens, len(token_ids)
                ranges = ((offset, 1), (offset + 2, num_rows - 1)) if is_split else ((offset, num_rows),)
                media.append(PlacedMedia(item.modality, item.media_hash, ranges, item.geometry))
                token_ids += [9, 8, *[9] * (num_rows - 1)] if is_split else [9] * num_rows
                if position < num_tokens - 1:
                    break
    token_ids.append(LAST_PROMPT_TOKEN)
    prompt = Prompt(tuple(token_ids), tuple(media))
    guidance = Guidance(2.0, Prompt(tuple(range(300, 300 + negative)))) if negative else None
    sampling = (SamplingParams(),) * num_choices
    return GenerateRequest(request_id, prompt, sampling, StopParams(max_tokens, stop), guidance)


def salted(request: GenerateRequest) -> GenerateRequest:
    """The request, with a prompt that shares no block with others."""
    prompt = msgspec.structs.replace(request.prompt, cache_salt=request.request_id)
    return msgspec.structs.replace(request, prompt=prompt)


def place(prompt: Prompt) -> SimpleNamespace:
    """What the model says of a prompt's positions; some families cannot place every prompt."""
    if prompt.token_ids[0] == UNPLACEABLE_TOKEN:
        raise UnsupportedError("this prompt has no positions")
    return SimpleNamespace(delta=0)


def item_value(media_hash: str, row: int = 0) -> int:
    """What an embedding row of an item holds."""
    return 1000 + sum(media_hash.encode()) + 10_000 * row


def kv_value(prompt: Prompt, position: int) -> int:
    """What the KV of a prompt token holds."""
    for item in prompt.media:
        for _, row, _ in item.pieces(position, position + 1):
            return item_value(item.media_hash, row)
    return prompt.token_ids[position]


def first_token(last: int) -> int:
    """Behind a prompt that ends so. A resumed request goes on counting where its first attempt stopped."""
    return FIRST_TOKEN if last == LAST_PROMPT_TOKEN else last + 1
