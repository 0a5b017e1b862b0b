"""What it costs to decode files in processes of their own (`cluster.media.decoders`), against the same in
this process.

The two ways alternate within a repetition, on the same files. *alone*: one file after the other. *together*:
as many at once as an encoder has threads for. *encoded*: these threads decode and preprocess, and this one
encodes item by item.
"""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from bench.media_files import audio, video_of
from bench.records import Record
from bench.trusted_media import decode, trusted_decoders
from cluster.errors import ConfigError
from cluster.media.decoders import Decoders
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.types.media import MediaGeometry, MediaItem, MediaOptions, Modality
from encoder_service.runner import EncoderRunner, Piece
from encoder_service.service import NUM_PREPARE_THREADS

NUM_FILES = {"JPEG 224²": 24, "JPEG 1024²": 8, "clip 5 s": 2, "sound 10 s": 4}
CLIP_FPS = 25
CLIP_SIZE = (360, 640)
Decode = Callable[..., np.ndarray]


def measure(path: Path, dtype: torch.dtype, repeats: int, num_threads: int) -> Iterator[Record]:
    """Skips what the model does not take. Changes torch's number of threads."""
    torch.set_num_threads(num_threads)
    processor = MediaProcessor.load(path)
    if processor is None:
        raise ConfigError(f"{path} has no media encoder")
    model = EncoderModel.load(path, dtype=dtype)
    decoders = Decoders(NUM_PREPARE_THREADS)
    ways: dict[str, tuple[EncoderRunner, Decode]] = {
        "thread": (EncoderRunner(model, processor, trusted_decoders()), decode),
        "process": (EncoderRunner(model, processor, decoders), decoders.decode),
    }
    try:
        items = {kind: of for kind, of in all_items().items() if of[0].modality in processor.modalities}
        for repetition, kind in itertools.product(range(-1, repeats), items):
            for way in sorted(ways, reverse=bool(repetition % 2)):
                measured = timed(*ways[way], processor, items[kind])
                if repetition >= 0:  # the first one warms up
                    yield {
                        "type": "decoding",
                        "model": path.name,
                        "dtype": str(dtype).removeprefix("torch."),
                        "kind": kind,
                        "way": way,
                        "items": len(items[kind]),
                        "repetition": repetition,
                        "threads": num_threads,
                        **measured,
                    }
    finally:
        decoders.close()


def timed(
    runner: EncoderRunner, decode: Decode, processor: MediaProcessor, items: Sequence[MediaItem]
) -> Record:
    """Seconds for all items, in each of the three ways to go about it."""
    modality, options = items[0].modality, MediaOptions()

    def decode_one(item: MediaItem) -> None:
        decode(modality, item.data, processor.settings, options)

    def encode(executor: ThreadPoolExecutor) -> None:
        for prepared in executor.map(runner.prepare, items):
            runner.encode(modality, [Piece(prepared, options, 0, prepared.num_units)])

    with ThreadPoolExecutor(NUM_PREPARE_THREADS) as executor:
        return {
            "alone_s": _seconds(lambda: [decode_one(item) for item in items]),
            "together_s": _seconds(lambda: list(executor.map(decode_one, items))),
            "encoded_s": _seconds(lambda: encode(executor)),
        }


def _seconds(work: Callable[[], Any]) -> float:
    started_at = time.perf_counter()
    work()
    return time.perf_counter() - started_at


def all_items() -> dict[str, list[MediaItem]]:
    """The items by kind; every file is another one."""
    make = {
        "JPEG 224²": (Modality.IMAGE, partial(photo, 224)),
        "JPEG 1024²": (Modality.IMAGE, partial(photo, 1024)),
        "clip 5 s": (Modality.VIDEO, clip),
        "sound 10 s": (Modality.AUDIO, lambda idx: audio(9.9 - idx / 1000, form="mp3")),  # 10 at most
    }
    return {
        kind: [
            MediaItem(modality, make_file(idx), f"{kind} {idx}", MediaGeometry(1))
            for idx in range(NUM_FILES[kind])
        ]
        for kind, (modality, make_file) in make.items()
    }


def photo(side: int, idx: int) -> bytes:
    """A JPEG with about as many bytes as a photograph of its size."""
    out = io.BytesIO()
    Image.fromarray(_picture(side, side, idx)).save(out, "JPEG", quality=85)
    return out.getvalue()


def clip(idx: int) -> bytes:
    frames = [np.roll(_picture(*CLIP_SIZE, idx), shift, axis=1) for shift in range(5 * CLIP_FPS)]
    return video_of(frames, CLIP_FPS, codec="libx264")


def _picture(height: int, width: int, idx: int) -> np.ndarray:
    """[height, width, 3] uint8: large soft patches and some noise."""
    random = np.random.default_rng(idx)
    patches = Image.fromarray(random.integers(0, 255, (8, 8, 3), dtype=np.uint8))
    soft = np.asarray(patches.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    return (soft + random.integers(-8, 8, soft.shape)).clip(0, 255).astype(np.uint8)
