"""Mixed multimodal chat requests made from a seed, and what the undivided model answers to them.

The requests are what a client sends (OpenAI messages with data URIs); the reference is transformers' own
path: the media as arrays, `AutoProcessor`, `generate` in fp32. Nothing of the cluster's code takes part in
the reference.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from deploy.demo_model.training import data, media
from deploy.demo_model.training.media import png_bytes, wav_bytes

KINDS = ("text", "image", "two images", "video", "audio", "image and audio")
SAMPLING_RATE = 16_000


@dataclass(frozen=True)
class Case:
    """One request and its media as arrays, in the order of the message's parts."""

    kind: str
    messages: list[dict[str, Any]]
    images: tuple[np.ndarray, ...] = ()  # [H, W, 3] uint8
    videos: tuple[np.ndarray, ...] = ()  # [T, H, W, 3] uint8
    sounds: tuple[np.ndarray, ...] = ()  # [num_samples] float32


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]  # generated, including the end token
    text: str
    num_prompt_tokens: int


def make_cases(seed: int, num_cases: int) -> list[Case]:
    """`num_cases` requests; the kinds alternate."""
    rng = random.Random(seed)
    return [make_case(rng, KINDS[i % len(KINDS)]) for i in range(num_cases)]


def make_case(rng: random.Random, kind: str) -> Case:
    images: list[np.ndarray] = []
    videos: list[np.ndarray] = []
    sounds: list[np.ndarray] = []
    parts: list[dict[str, Any]] = []
    truths: list[tuple[str, str]] = []
    if kind in ("image", "image and audio", "two images"):
        for _ in range(2 if kind == "two images" else 1):
            pixels, shape, colour = data.make_image(rng)
            images.append(pixels)
            truths.append((shape, colour))
            parts.append(
                {"type": "image_url", "image_url": {"url": data_uri("image/png", png_bytes(pixels))}}
            )
    if kind == "video":
        frames, shape, colour, direction = data.make_video(rng, num_frames=rng.choice((4, 6, 8)))
        file = media.mp4_bytes(frames)
        videos.append(media.decode_mp4(file))
        parts.append({"type": "video_url", "video_url": {"url": data_uri("video/mp4", file)}})
    if kind in ("audio", "image and audio"):
        samples = make_sound(rng)
        sounds.append(samples)
        encoded = base64.b64encode(wav_bytes(samples)).decode()
        parts.append({"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}})
    question = {
        "text": lambda: data.text_question(rng),
        "image": lambda: data.image_question(rng, *truths[0]),
        "two images": lambda: data.images_question(rng, truths),
        "video": lambda: data.video_question(rng, shape, colour, direction),
        "audio": lambda: data.Turn(rng.choice(data.WORDS_QUESTIONS), ""),
        "image and audio": lambda: data.image_audio_question(rng, *truths[0], "seven"),
    }[kind]().question
    parts.append({"type": "text", "text": question})
    content = question if kind == "text" else parts
    return Case(kind, [{"role": "user", "content": content}], tuple(images), tuple(videos), tuple(sounds))


def make_sound(rng: random.Random) -> np.ndarray:
    """A few voiced syllables between pauses: harmonics of a gliding pitch. 16 bit resolution, [num_samples]
    float32.
    """
    pieces = [np.zeros(rng.randrange(800, 3200))]
    for _ in range(rng.randrange(1, 4)):
        time_s = np.arange(rng.randrange(3200, 8000)) / SAMPLING_RATE
        pitch_hz = rng.uniform(90, 220) * (1 + rng.uniform(-0.3, 0.3) * time_s)
        phase = 2 * np.pi * np.cumsum(pitch_hz) / SAMPLING_RATE
        voiced = sum(rng.uniform(0, 1) / k * np.sin(k * phase) for k in range(1, 12))
        pieces += [0.2 * np.hanning(len(time_s)) * voiced, np.zeros(rng.randrange(800, 3200))]
    samples = np.clip(np.concatenate(pieces), -1, 1)
    return (np.round(samples * 32767) / 32768).astype(np.float32)


def data_uri(media_type: str, file: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


class Reference:
    """The undivided model: `generate`, greedy, fp32."""

    def __init__(self, path: str | Path):
        from cluster.media.torchvision_compat import ensure_torchvision

        ensure_torchvision()  # must run before transformers is imported
        import torch
        from transformers import AutoModelForMultimodalLM, AutoProcessor

        kwargs_file = Path(path) / "mm_processor_kwargs.json"
        self._kwargs = json.loads(kwargs_file.read_text()) if kwargs_file.is_file() else {}
        self.processor = AutoProcessor.from_pretrained(path)
        self.model = AutoModelForMultimodalLM.from_pretrained(path, dtype=torch.float32).eval()

    def answer(self, case: Case, max_tokens: int) -> Answer:
        import torch

        inputs = self.inputs(case)
        with torch.inference_mode():
            output = self.model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False)
        num_prompt_tokens = inputs["input_ids"].shape[1]
        token_ids = output[0, num_prompt_tokens:].tolist()
        text = self.processor.tokenizer.decode(token_ids, skip_special_tokens=True)
        return Answer(tuple(token_ids), text, num_prompt_tokens)

    def answers(self, cases: Sequence[Case], max_tokens: int) -> list[Answer]:
        return [self.answer(case, max_tokens) for case in cases]

    def inputs(self, case: Case) -> dict[str, Any]:
        queues = {
            "image_url": ("image", list(case.images)),
            "video_url": ("video", list(case.videos)),
            "input_audio": ("audio", list(case.sounds)),
        }
        messages = []
        for message in case.messages:
            content = message["content"]
            if isinstance(content, list):
                content = [self._part(part, queues) for part in content]
            messages.append({"role": message["role"], "content": content})
        return dict(
            self.processor.apply_chat_template(
                messages,
                tokenize=True,
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
                processor_kwargs=self._kwargs,
            )
        )

    @staticmethod
    def _part(part: dict[str, Any], queues: dict[str, tuple[str, list[np.ndarray]]]) -> dict[str, Any]:
        if part["type"] not in queues:
            return part
        name, arrays = queues[part["type"]]
        array = arrays.pop(0)
        return {"type": name, name: Image.fromarray(array) if name == "image" else array}
