"""Items prepared at once: by threads of this process, or by processes (`encode.prepare_processes`).

The ways alternate within a repetition, on the same files. *alone*: as many items at once as there are threads
or processes. *encoded*: beside them this thread encodes item by item. *lag*: how late a thread of this
process wakes up meanwhile from a sleep of a millisecond: it waits for the interpreter's lock as an engine's
thread does.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from bench.media_files import video_of
from bench.records import Record
from bench.trusted_media import media_processor
from cluster.media.decoders import Decoders
from cluster.media.preprocessors import Preprocessors, preprocessor_server
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.types.media import MediaGeometry, MediaItem, MediaOptions, Modality
from encoder_service.runner import EncoderRunner, Piece
from encoder_service.service import NUM_PREPARE_THREADS

NUM_ITEMS = 64
NUM_CLIPS = 4
SLEEP_S = 1e-3
CLIP_FPS = 25
CLIP_SIZE = (360, 640)


def measure(path: Path, numbers: Sequence[int], repeats: int) -> Iterator[Record]:
    """`numbers` of processes; 0: threads of this process. The encoder has one thread. Changes torch's number
    of threads."""
    torch.set_num_threads(1)
    processor = media_processor(path)
    model = EncoderModel.load(path, dtype=torch.float32)
    with contextlib.ExitStack() as stack:
        runners = {number: stack.enter_context(_runner(path, model, processor, number)) for number in numbers}
        items = {kind: of for kind, of in all_items().items() if of[0].modality in processor.modalities}
        for repetition, kind in itertools.product(range(-1, repeats), items):
            for number in numbers[:: -1 if repetition % 2 else 1]:
                measured = timed(runners[number], number or NUM_PREPARE_THREADS, items[kind])
                if repetition >= 0:  # the first one warms up
                    yield {
                        "type": "preparing",
                        "model": path.name,
                        "kind": kind,
                        "processes": number,
                        "items": len(items[kind]),
                        "repetition": repetition,
                        **measured,
                    }


@contextlib.contextmanager
def _runner(
    path: Path, model: EncoderModel, processor: MediaProcessor, number: int
) -> Iterator[EncoderRunner]:
    decoders = Decoders(number or NUM_PREPARE_THREADS)
    timeout_s = processor.settings.limits.max_decode_s
    preprocessors = Preprocessors(preprocessor_server(path), number, timeout_s) if number else None
    try:
        yield EncoderRunner(model, processor, decoders, preprocessors)
    finally:
        decoders.close()
        if preprocessors is not None:
            preprocessors.close()


def timed(runner: EncoderRunner, at_once: int, items: Sequence[MediaItem]) -> Record:
    modality, options = items[0].modality, MediaOptions()
    with ThreadPoolExecutor(at_once) as executor:
        began_at = time.perf_counter()
        with _lags() as lags:
            for _ in executor.map(runner.prepare, items):
                pass
        alone_s, began_at = time.perf_counter() - began_at, time.perf_counter()
        for prepared in executor.map(runner.prepare, items):
            runner.encode(modality, [Piece(prepared, options, 0, prepared.num_units)])
        encoded_s = time.perf_counter() - began_at
    p50, p99 = np.percentile(lags, (50, 99))
    return {"alone_s": alone_s, "encoded_s": encoded_s, "lag_p50_s": float(p50), "lag_p99_s": float(p99)}


@contextlib.contextmanager
def _lags() -> Iterator[list[float]]:
    lags: list[float] = []
    has_ended = threading.Event()

    def watch() -> None:
        while not has_ended.is_set():
            due_at = time.perf_counter() + SLEEP_S
            time.sleep(SLEEP_S)
            lags.append(time.perf_counter() - due_at)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lags
    finally:
        has_ended.set()
        thread.join()


def all_items() -> dict[str, list[MediaItem]]:
    """The items by kind; every file is another one."""
    make = {
        "JPEG 224²": (Modality.IMAGE, partial(photo, 224), NUM_ITEMS),
        "JPEG 448²": (Modality.IMAGE, partial(photo, 448), NUM_ITEMS),
        "clip 5 s": (Modality.VIDEO, clip, NUM_CLIPS),
    }
    return {
        kind: [MediaItem(modality, file(idx), f"{kind} {idx}", MediaGeometry(1)) for idx in range(number)]
        for kind, (modality, file, number) in make.items()
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
