"""How reduced media change answers: the demo model's evaluation set, with the settings that a client may
choose.

One process, no server, fp32: a request body as the API takes it, the door's prompt, the encoder's runner on
the file's bytes, greedy decoding. Images are PNG files, clips h264 with a key frame a second.

    plain       what the model's own processor makes of the file; the others are compared with it, on the
                same samples
    right       whole answers equal to the right one, as `deploy.demo_model.training.evaluate` judges
    lost, won   answers that are right when plain and wrong with the setting, and the other way round
    rows        embedding rows of all items; each item must have as many as the door computed
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from bench.encoder.clients import text_part
from bench.engine.prompts import Part
from bench.media_files import video_of
from bench.records import Record
from bench.trusted_media import media_processor, trusted_decoders
from bench.workload import png_bytes
from cluster.config.settings import MediaArgs
from cluster.kvcache.memory import BlockMemory
from cluster.media.fetch import FetchedMedia
from cluster.media.opener import SurveyOrder, look
from cluster.media.sources import MediaSource, read_data_uri
from cluster.model.encoder import EncoderModel
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.text.defaults import GenerationDefaults, context_length
from cluster.text.tokenizer import TextProcessor
from cluster.types.media import Modality
from deploy.demo_model.training.evaluate import MAX_NEW_TOKENS, Sample, draw_samples
from deploy.demo_model.training.speech import WordBank
from encoder_service.runner import EncoderRunner, Piece
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from router.prompts.builder import PreparedPrompt, PromptBuilder
from router.prompts.media import Content, MediaPlanner

TASKS = {
    Modality.IMAGE: ("shape", "colour", "yes or no", "describe the image", "two images in order"),
    Modality.VIDEO: ("video direction", "describe the video", "yes or no, video"),
}
BATCH = 32  # prompts in a step
MAX_ITEMS = 2  # in a prompt
FPS = 4  # of clips, and what the demo model's processor samples
Fields = dict[str, Any]  # of a request body


@dataclass(frozen=True)
class FullSize:
    """Sizes of a request's media as the model's own processor prepares them."""

    pixels: int  # of the smallest image or frame, after resizing
    rows: int  # of all items

    def with_pixels(self, share: float) -> Fields:
        return processor(max_pixels=int(self.pixels * share))

    def with_tokens(self, share: float) -> Fields:
        return {"max_media_tokens": int(self.rows * share)}


def processor(**options: int) -> Fields:
    return {"mm_processor_kwargs": options}


def frames(**options: int | str) -> Fields:
    return {"media_io_kwargs": {"video": options}}


Setting = Callable[[FullSize], Fields]
SETTINGS: Mapping[str, Setting] = {
    "plain": lambda _: {},
    "spatial_pooling 2": lambda _: processor(spatial_pooling=2),
    "spatial_pooling 4": lambda _: processor(spatial_pooling=4),
    "max_pixels: half": lambda whole: whole.with_pixels(1 / 2),
    "max_pixels: a quarter": lambda whole: whole.with_pixels(1 / 4),
    "max_media_tokens: half": lambda whole: whole.with_tokens(1 / 2),
    "max_media_tokens: a quarter": lambda whole: whole.with_tokens(1 / 4),
}
VIDEO_SETTINGS: Mapping[str, Setting] = {
    "temporal_pooling 2": lambda _: processor(temporal_pooling=2),
    "temporal_pooling 4": lambda _: processor(temporal_pooling=4),
    "num_frames 4": lambda _: frames(num_frames=4),
    "num_frames 2": lambda _: frames(num_frames=2),
    "keyframes": lambda _: frames(strategy="keyframes"),
    "scenes": lambda _: frames(strategy="scenes"),
}


def settings_of(modality: Modality) -> Mapping[str, Setting]:
    """The settings by name; "plain" is the first."""
    return {**SETTINGS, **(VIDEO_SETTINGS if modality is Modality.VIDEO else {})}


def measure(folder: Path, num_samples: int, seed: int) -> Iterator[Record]:
    """A record for each task and setting. Raises RuntimeError for an item with another number of rows than
    the door computed.
    """
    model = EvaluatedModel(folder)
    for modality, tasks in TASKS.items():
        for task in tasks:
            samples = draw_samples(task, seed, WordBank([]), num_samples)
            shared = {"type": "accuracy", "model": folder.name, "media": modality, "task": task, "seed": seed}
            for counts in compare(model, samples, settings_of(modality)):
                yield {**shared, **counts}


def compare(
    model: EvaluatedModel, samples: Sequence[Sample], settings: Mapping[str, Setting]
) -> Iterator[Record]:
    """Counts for each setting; the first setting is plain."""
    messages = [message(sample) for sample in samples]
    whole = [model.whole(model.prepare(each)) for each in messages]
    plain: list[bool] | None = None
    for name, setting in settings.items():
        asked = [model.prepare(each, setting(known)) for each, known in zip(messages, whole, strict=True)]
        answers = model.answers(asked)
        is_right = [said == each.turn.answer for said, each in zip(answers, samples, strict=True)]
        plain = is_right if plain is None else plain
        changes = [now - before for before, now in zip(plain, is_right, strict=True)]
        items = [item for each in asked for item in each.items]
        yield {
            "setting": name, "samples": len(samples), "right": sum(is_right), "lost": changes.count(-1),
            "won": changes.count(1), "items": len(items), "rows": sum(item.geometry.num_tokens for item in items),
        }  # fmt: skip


class EvaluatedModel:
    """Both halves of a model folder, with the door's prompt builder."""

    def __init__(self, folder: Path):
        self._media = media = media_processor(folder)
        self._runner = EncoderRunner(
            EncoderModel.load(folder, dtype=torch.float32), media, trusted_decoders()
        )
        self._language = language = LanguageModel.load(folder, dtype=torch.float32)
        self._prompts = PromptBuilder(
            TextProcessor.load(folder, media.transformers_processor),
            MediaPlanner(media, lambda _: False),
            MediaArgs(max_items=MAX_ITEMS),
            language.block_size,
            context_length(folder),
        )
        self._name, self._defaults = folder.name, GenerationDefaults.load(folder)
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def prepare(self, content: Sequence[Part], fields: Mapping[str, Any] | None = None) -> PreparedPrompt:
        """`fields`: of the request, besides its one message. Raises the errors with which the door answers
        such a request.
        """
        body = {"model": self._name, "messages": [{"role": "user", "content": content}], **(fields or {})}
        body["max_tokens"] = MAX_NEW_TOKENS
        call = chat_call(
            ChatRequest.model_validate(body), CallContext(ServedModels(self._name), self._defaults)
        )
        return self._prompts.chat(call, [self._content(source) for source in call.media])

    def whole(self, plain: PreparedPrompt) -> FullSize:
        areas = []
        for item in plain.items:
            assert item.geometry.grid_thw is not None  # this model's images and clips have one
            _, height, width = item.geometry.grid_thw
            areas.append(height * width * self._media.patch_side(item.modality) ** 2)
        return FullSize(min(areas), sum(item.geometry.num_tokens for item in plain.items))

    def answers(self, asked: Sequence[PreparedPrompt]) -> list[str]:
        """Greedy answers."""
        said = []
        for first in range(0, len(asked), BATCH):
            for token_ids in self._generate(asked[first : first + BATCH]):
                said.append(self._tokenizer.decode(token_ids, skip_special_tokens=True).strip())
        return said

    def features(self, asked: Sequence[PreparedPrompt]) -> list[tuple[FeatureSlice, ...]]:
        """The features of each prompt; all items must have the same modality. Raises RuntimeError for an item
        with another number of rows than the door computed.
        """
        items = [item for each in asked for item in each.items]
        prepared = [self._runner.prepare(item) for item in items]
        pieces = [
            Piece(ready, item.options, 0, ready.num_units)
            for ready, item in zip(prepared, items, strict=True)
        ]
        encoded = self._runner.encode(items[0].modality, pieces)
        for item, rows in zip(items, encoded, strict=True):
            if len(rows) != item.geometry.num_tokens:
                raise RuntimeError(f"{len(rows)} rows, not {item.geometry.num_tokens}: {item.options}")
        rows_of = iter(encoded)
        return [
            tuple(
                FeatureSlice(token, rows[row : row + count])
                for placed, rows in zip(each.prompt.media, rows_of, strict=False)
                for token, row, count in placed.pieces(0, each.num_tokens)
            )
            for each in asked
        ]

    def _generate(self, asked: Sequence[PreparedPrompt]) -> list[list[int]]:
        """Token ids of the answers, with the end token."""
        language = self._language
        sizes = [-(-(each.num_tokens + MAX_NEW_TOKENS) // language.block_size) for each in asked]
        memory = BlockMemory(language.kv_layout, sum(sizes))
        free = iter(range(sum(sizes)))
        tables = [[next(free) for _ in range(size)] for size in sizes]
        positions = [language.positions(each.prompt) for each in asked]
        chunks = [
            SequenceChunk(each.prompt.token_ids, known.position_ids, 0, table, features)
            for each, known, table, features in zip(
                asked, positions, tables, self.features(asked), strict=True
            )
        ]
        answers = [[token] for token in language.forward(chunks, memory).argmax(-1).tolist()]
        while running := [idx for idx, answer in enumerate(answers) if not self._is_over(answer)]:
            logits = language.decode(
                [answers[idx][-1] for idx in running],
                [asked[idx].num_tokens + len(answers[idx]) - 1 for idx in running],
                [positions[idx].delta for idx in running],
                [tables[idx] for idx in running],
                memory,
            )
            for idx, token in zip(running, logits.argmax(-1).tolist(), strict=True):
                answers[idx].append(token)
        return answers

    def _is_over(self, answer: Sequence[int]) -> bool:
        return len(answer) == MAX_NEW_TOKENS or answer[-1] in self._language.eos_token_ids

    def _content(self, source: MediaSource) -> Content:
        settings = self._media.settings
        data = read_data_uri(source.url, settings.limits.max_bytes)
        order = SurveyOrder(source.modality, source.options, settings, timeout_s=settings.limits.max_decode_s)
        return Content(FetchedMedia(data, hashlib.sha256(data).digest()), look(order, data))


def message(sample: Sample) -> list[Part]:
    """Its media, then its question."""
    images = [_part("image_url", "image/png", png_bytes(np.asarray(image))) for image in sample.images]
    clips = [_part("video_url", "video/mp4", clip(pixels)) for pixels in sample.videos]
    return [*images, *clips, text_part(sample.turn.question)]


def clip(pixels: np.ndarray) -> bytes:
    """[T, H, W, 3] uint8 → an mp4 file."""
    return video_of(list(pixels), FPS, codec="libx264", gop_size=FPS)


def _part(kind: str, media_type: str, data: bytes) -> Part:
    return {"type": kind, kind: {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}
