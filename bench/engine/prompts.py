"""Seeded chat messages of exact lengths. Equal keys give equal prompts on every server; different keys share
no prefix.
"""

from __future__ import annotations

import base64
import io
import itertools
import random
from typing import Any

from bench.client import Message
from bench.engine.vocabulary import words

Part = dict[str, Any]

# All words of up to three letters; each is one token after a space.
WORDS = tuple(itertools.islice(words(), 18_278))
COARSE_SIDE = 16  # pixels of the noise that is enlarged to an image


class Prompts:
    """Texts and media of one run. A `key` identifies one of them: row, repetition, number of the request,
    …
    """

    def __init__(self, seed: int):
        self._seed = seed

    def text(self, num_tokens: int, *key: object) -> str:
        """`num_tokens` words, each after a space: exactly so many tokens."""
        rng = random.Random(repr((self._seed, "text", key)))
        return "".join(f" {rng.choice(WORDS)}" for _ in range(num_tokens))

    def image(self, side: int, *key: object) -> Part:
        """A square JPEG of `side` pixels as a data URI."""
        uri = base64.b64encode(self._jpeg(side, key)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{uri}"}}

    def video(self, num_frames: int, side: int, frames_per_second: int, *key: object) -> Part:
        """A square h264 clip as a data URI: noise that moves sideways."""
        import numpy as np

        from deploy.demo_model.training.media import mp4_bytes

        picture = np.asarray(self._picture(side, key))
        frames = np.stack([np.roll(picture, 4 * idx, axis=1) for idx in range(num_frames)])
        uri = base64.b64encode(mp4_bytes(frames, frames_per_second)).decode()
        return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{uri}"}}

    def _picture(self, side: int, key: tuple[object, ...]) -> Any:
        from PIL import Image

        rng = random.Random(repr((self._seed, "image", key)))
        coarse = Image.frombytes("RGB", (COARSE_SIDE, COARSE_SIDE), rng.randbytes(3 * COARSE_SIDE**2))
        return coarse.resize((side, side), Image.Resampling.BICUBIC)

    def _jpeg(self, side: int, key: tuple[object, ...]) -> bytes:
        file = io.BytesIO()
        self._picture(side, key).save(file, "JPEG", quality=85)
        return file.getvalue()


def user(text: str, *media: Part) -> Message:
    """Media stand before the text."""
    return {"role": "user", "content": [*media, {"type": "text", "text": text}] if media else text}
