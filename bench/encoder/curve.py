"""What an encoder call costs by the number of items in it: the engine alone, no server.

`EncoderModel.encode` on the tensors that `MediaProcessor` makes of different files of one size. The batch
sizes alternate within a repetition. Utilisation: CPU time of this process / (wall time × threads).
"""

from __future__ import annotations

import base64
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.engine.prompts import Prompts
from bench.records import Record
from bench.trusted_media import decode, media_processor, prepare
from bench.workload import SAMPLING_RATE, wav_bytes
from cluster.media.processor import MediaProcessor
from cluster.model.encoder import EncoderModel
from cluster.types.media import Modality


@dataclass(frozen=True)
class Sizes:
    """The sizes of every item."""

    side: int  # pixels of square images and frames
    num_frames: int  # two a second
    sound_s: float


def make_file(modality: Modality, sizes: Sizes, idx: int) -> bytes:
    """A JPEG, an mp4 or a wav of noise; each `idx` gives another file."""
    prompts = Prompts(0)
    match modality:
        case Modality.IMAGE:
            url = prompts.image(sizes.side, idx)["image_url"]["url"]
        case Modality.VIDEO:
            url = prompts.video(sizes.num_frames, sizes.side, 2, idx)["video_url"]["url"]
        case Modality.AUDIO:
            noise = np.random.default_rng(idx).standard_normal(round(sizes.sound_s * SAMPLING_RATE))
            return wav_bytes(0.1 * noise)
    return base64.b64decode(url.partition(",")[2])


def make_items(
    processor: MediaProcessor, modality: Modality, sizes: Sizes, count: int
) -> list[Mapping[str, Tensor]]:
    files = (make_file(modality, sizes, idx) for idx in range(count))
    return [
        prepare(processor, modality, decode(modality, file, processor.settings, item_idx=idx))
        for idx, file in enumerate(files)
    ]


def measure(
    path: Path,
    dtype: torch.dtype,
    sizes: Sizes,
    modalities: Sequence[Modality],
    batches: Sequence[int],
    repeats: int,
    num_threads: int,
) -> Iterator[Record]:
    """Skips modalities that the model does not have. Changes torch's number of threads."""
    torch.set_num_threads(num_threads)
    encoder, processor = EncoderModel.load(path, dtype=dtype), media_processor(path)
    items = {
        modality: make_items(processor, modality, sizes, max(batches))
        for modality in modalities
        if modality in processor.modalities
    }
    # Warms up, too: every item has as many.
    num_rows = {modality: len(encoder.encode(modality, own[:1])[0]) for modality, own in items.items()}
    for repetition, modality, batch in itertools.product(range(repeats), items, batches):
        yield {
            "type": "curve",
            "model": path.name,
            "million_parameters": round(encoder.weight_bytes / dtype.itemsize / 1e6, 1),
            "dtype": str(dtype).removeprefix("torch."),
            "modality": modality.value,
            "batch": batch,
            "repetition": repetition,
            "threads": num_threads,
            "rows": batch * num_rows[modality],
            **timed(partial(encoder.encode, modality, items[modality][:batch])),
        }


def timed(part: Callable[[], object]) -> Record:
    started_at, cpu_before_s = time.perf_counter(), time.process_time()
    part()
    return {"seconds": time.perf_counter() - started_at, "cpu_s": time.process_time() - cpu_before_s}
