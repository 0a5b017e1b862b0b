"""What evaluation asks with: a conversation, its media as a user's files hold them, and the only right
answer."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image

from deploy.demo_model.training import data, media
from deploy.demo_model.training.calls import Tool
from deploy.demo_model.training.data import Turn
from deploy.demo_model.training.speech import WordBank, make_clip

IMAGE_SIZES = data.IMAGE_SIZES + media.SOURCE_SIZES


@dataclass
class Sample:
    """A question and its only right answer. `before`: turns that went before it; the media belong to the
    first. `tools`: what the prompt offers. `role`: of the question.
    """

    turn: Turn
    images: list[Image.Image] = field(default_factory=list)
    videos: list[np.ndarray] = field(default_factory=list)
    sounds: list[np.ndarray] = field(default_factory=list)
    before: Sequence[Turn] = ()
    tools: Sequence[Tool] = ()
    role: str = "user"

    def messages(self) -> list[dict]:
        """The chat: media first, then the question."""
        content: list[dict] = [{"type": "image"}] * len(self.images) + [{"type": "video"}] * len(self.videos)
        content = content + [{"type": "audio"}] * len(self.sounds)
        messages: list[dict] = []
        for turn in self.before:
            messages.append({"role": "user", "content": [*content, {"type": "text", "text": turn.question}]})
            messages.append({"role": "assistant", "content": turn.answer})
            content = []
        text = {"type": "text", "text": self.turn.question}
        return [*messages, {"role": self.role, "content": [*content, text]}]

    def offered(self) -> list[dict] | None:
        """The tools as a request has them."""
        return [tool.function() for tool in self.tools] or None


Maker = Callable[[random.Random, WordBank], Sample]


def draw_image(rng: random.Random) -> tuple[Image.Image, str, str]:
    """A picture as a user's PNG or JPEG file holds it."""
    pixels, shape, colour = data.make_image(rng, rng.choice(IMAGE_SIZES))
    if rng.random() < 0.5:
        pixels = media.through_jpeg(pixels, rng.choice((75, 85, 95)))
    return Image.fromarray(pixels), shape, colour


def draw_video(rng: random.Random) -> tuple[np.ndarray, str, str, str]:
    """Frames of a clip; half of the clips went through an h264 file."""
    num_frames = 8 if rng.random() < 0.5 else rng.randrange(4, 17)
    frames, shape, colour, direction = data.make_video(rng, num_frames)
    if rng.random() < 0.5:
        frames = media.decode_mp4(media.mp4_bytes(frames))
    return frames, shape, colour, direction


def draw_sound(rng: random.Random, words: WordBank, num_words: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """A clip as a 16-bit file holds it."""
    clip = make_clip(rng, words, num_words)
    return media.to_16_bit(clip.samples).astype(np.float32) / 32768, clip.words
