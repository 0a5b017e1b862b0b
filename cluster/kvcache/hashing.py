"""Block hashes: the name of a full block's content, given everything before it.

    hash[-1] = H(salt, block size)
    hash[i]  = H(hash[i-1], token ids of block i, what stands in its placeholders)

Placeholder tokens are equal for all images of a model, so each media span that touches a block adds
(modality, media hash, offset inside the span, position in the block): blocks of two images never share a
name, nor do blocks that start at different rows of one image. Text behind an image differs too, through the
chain. Names are equal in all processes of one cluster (little- and big-endian hosts must not be mixed) and
are used as cache keys only.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from hashlib import blake2b

from cluster.types.media import MediaSpan
from cluster.types.request import Prompt

_DIGEST_BYTES = 32  # a client chooses prompts freely, so collisions must stay out of an attacker's reach


def block_hashes(prompt: Prompt, block_size: int, salt: bytes = b"") -> list[bytes]:
    """One hash per full block of the prompt, `len(token_ids) // block_size` of them.

    `salt` separates caches that must never share content (model fingerprint, tenant). `prompt.media` is in
    prompt order and does not overlap.
    """
    num_blocks = len(prompt.token_ids) // block_size
    token_bytes = memoryview(array("q", prompt.token_ids).tobytes())
    stride = block_size * 8  # bytes of one block's token ids
    extras = _media_parts(prompt.media, block_size, num_blocks)
    parent = blake2b(salt + struct.pack("<q", block_size), digest_size=_DIGEST_BYTES).digest()
    hashes: list[bytes] = []
    for i in range(num_blocks):
        state = blake2b(parent, digest_size=_DIGEST_BYTES)
        state.update(token_bytes[i * stride : (i + 1) * stride])
        extra = extras.get(i)
        if extra is not None:
            state.update(extra)
        parent = state.digest()
        hashes.append(parent)
    return hashes


def _media_parts(media: Sequence[MediaSpan], block_size: int, num_blocks: int) -> dict[int, bytes]:
    """What the media spans add to each block they touch; each part's length is part of it, so none can
    imitate two.
    """
    parts: dict[int, bytes] = {}
    for span in media:
        if span.end <= span.offset:
            continue
        name = f"{span.modality}:{span.media_hash}".encode()
        for i in range(span.offset // block_size, min((span.end - 1) // block_size + 1, num_blocks)):
            start = max(span.offset, i * block_size)
            position, row = start - i * block_size, start - span.offset
            count = min(span.end, (i + 1) * block_size) - start
            part = struct.pack("<qqqq", len(name), position, row, count) + name
            parts[i] = parts.get(i, b"") + part
    return parts
