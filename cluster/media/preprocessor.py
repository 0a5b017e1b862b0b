"""The program of the processes in which encoders preprocess media: a model's own processor, which the server
loads once and the processes that it forks share (`program`).

What they get has been decoded and checked, so they are trusted as the encoder itself is. Each has one thread:
transformers' processors hold the interpreter's lock, so threads of one process gain little beyond two.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from cluster.media.program import Asker, ProcessOrder, finish, fork_processes
from cluster.types.media import MediaOptions, Modality

if TYPE_CHECKING:
    from torch import Tensor

    from cluster.media.processor import MediaProcessor

ALIGNMENT = 64  # of the first byte of a tensor in the result


class PreprocessOrder(ProcessOrder, frozen=True, array_like=True, tag=True):
    """The model's inputs of one item. The input is an array, the result are tensors."""

    modality: Modality
    options: MediaOptions
    shape: tuple[int, ...]


class TensorPlace(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str  # as torch calls it
    shape: tuple[int, ...]
    start: int  # first byte in the result


class Preprocessed(msgspec.Struct, frozen=True, tag=True):
    tensors: tuple[TensorPlace, ...]
    num_bytes: int  # of the result


def array_of(order: PreprocessOrder, file: int) -> np.ndarray:
    """The order's array, private to this process."""
    dtype = np.float32 if order.modality is Modality.AUDIO else np.uint8
    num_bytes = os.fstat(file).st_size
    return np.frombuffer(mmap.mmap(file, num_bytes, mmap.MAP_PRIVATE), dtype).reshape(order.shape)


def write_tensors(tensors: Mapping[str, Tensor], result: int) -> Preprocessed:
    """Replaces what is in the file."""
    import torch

    places, end = [], 0
    for name, tensor in tensors.items():
        start = -(-end // ALIGNMENT) * ALIGNMENT
        flat = tensor.contiguous().flatten().view(torch.uint8)
        end = start + len(flat)
        if os.pwrite(result, flat.numpy().data, start) < len(flat):
            raise MemoryError
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(name, dtype, tuple(tensor.shape), start))
    finish(result, end)
    return Preprocessed(tuple(places), end)


def read_tensors(preprocessed: Preprocessed, file: Tensor) -> dict[str, Tensor]:
    """`file`: the bytes of the result, which the tensors keep."""
    import torch

    tensors = {}
    for place in preprocessed.tensors:
        dtype = getattr(torch, place.dtype)
        end = place.start + dtype.itemsize * int(np.prod(place.shape, dtype=np.int64))
        tensors[place.name] = file[place.start : end].view(dtype).reshape(place.shape)
    return tensors


def serve(asker: Asker, processor: MediaProcessor) -> None:
    def follow(order: PreprocessOrder, file: int, result: int) -> Preprocessed:
        array = array_of(order, file)
        return write_tensors(processor.begin(order.modality, array, order.options), result)

    asker.follow(msgspec.msgpack.Decoder(PreprocessOrder), follow)


def main(arguments: Sequence[str]) -> None:
    """`arguments`: the model's folder. Serves until the asker closes the server's socket."""
    import torch

    from cluster.media.processor import MediaProcessor

    torch.set_num_threads(1)
    (folder,) = arguments
    processor = MediaProcessor.load(folder)
    if processor is None:
        raise ValueError(f"{folder} takes no media")
    processor.warm_up()
    fork_processes(lambda asker: serve(asker, processor))


if __name__ == "__main__":
    main(sys.argv[2:])
