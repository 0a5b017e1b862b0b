"""What one item costs an encoder's process, part by part: decoding the file, the processor, the encoder.

The encoder runs in three ways, alternating within a repetition: *served* is what an encode replica runs,
*modules* has native linears and norms only, *torch* nothing of ours. CPU time is that of this process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from bench.encoder.curve import Sizes, make_file, timed
from bench.records import Record
from bench.trusted_media import decode, media_processor, prepare
from cluster.media.processor import MediaProcessor
from cluster.model.cpu.library import load
from cluster.model.cpu.modules import optimise_modules
from cluster.model.encoder import EncoderModel
from cluster.model.loading import Half, load_half
from cluster.types.media import Modality


def measure(
    path: Path,
    dtype: torch.dtype,
    sizes: Sizes,
    modalities: Sequence[Modality],
    repeats: int,
    num_threads: int,
) -> Iterator[Record]:
    """Skips modalities that the model does not have. Changes torch's number of threads."""
    torch.set_num_threads(num_threads)
    processor = media_processor(path)
    encoders = encoders_of(path, dtype)
    for modality in (modality for modality in modalities if modality in processor.modalities):
        parts = parts_of(processor, encoders, modality, make_file(modality, sizes, 0))
        for part in parts.values():
            part()  # warms up
        for repetition, (name, part) in itertools.product(range(repeats), parts.items()):
            yield {
                "type": "tower",
                "model": path.name,
                "dtype": str(dtype).removeprefix("torch."),
                "modality": modality.value,
                "item": str(sizes),
                "part": name,
                "repetition": repetition,
                "threads": num_threads,
                **timed(part),
            }


def encoders_of(path: Path, dtype: torch.dtype) -> dict[str, EncoderModel]:
    by_torch, by_modules = (
        EncoderModel(load_half(path, Half.ENCODER, dtype=dtype, device="cpu")) for _ in range(2)
    )
    if kernels := load():
        optimise_modules(by_modules._base, kernels)
    return {"torch": by_torch, "modules": by_modules, "served": EncoderModel.load(path, dtype=dtype)}


def parts_of(
    processor: MediaProcessor, encoders: Mapping[str, EncoderModel], modality: Modality, file: bytes
) -> dict[str, Callable[[], object]]:
    array = decode(modality, file, processor.settings, item_idx=0)
    tensors = prepare(processor, modality, array)

    def call(encoder: EncoderModel) -> Callable[[], list[Tensor]]:
        return lambda: encoder.encode(modality, [tensors])

    return {
        "decode": lambda: decode(modality, file, processor.settings, item_idx=0),
        "preprocess": lambda: prepare(processor, modality, array),
        **{f"encode, {name}": call(encoder) for name, encoder in encoders.items()},
    }
