"""The program of the processes in which doors and encoders open media files. FFmpeg and Pillow run here, on
untrusted bytes.

An opener confines itself (`confinement`) and follows orders (`program`). It knows nothing but the current
order, and whatever it does, only its item is lost. The server that forks openers imports everything and reads
no file; `cluster.media.processes` starts one for each door or worker.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cluster.errors import MediaError, NoSoundError
from cluster.media.program import Asker, ProcessOrder, encoder, finish, fork_processes
from cluster.media.settings import MediaSettings, naming
from cluster.media.survey import MediaSurvey
from cluster.types.media import MediaOptions, Modality

# An opener cannot import: these, and all that Pillow and PyAV would import for some file.
IMPORTS = (
    "cluster.media.confinement", "cluster.media.decode", "PIL.ImageCms", "av.subtitles.codeccontext",
    "av.subtitles.stream", "av.subtitles.subtitle",
)  # fmt: skip


class DecodeOrder(ProcessOrder, frozen=True, array_like=True, tag=True):
    """Pixels or samples of one file. The result is an array, one element after the other."""

    modality: Modality
    options: MediaOptions
    settings: MediaSettings


class SurveyOrder(DecodeOrder, frozen=True, array_like=True, tag=True):
    """One survey of one file. The result is a `Surveyed`."""

    # decode the whole file, as an encoder would: the client wants the answer without items that cannot be
    # decoded
    decodes: bool = False


class Surveyed(msgspec.Struct, frozen=True):
    survey: MediaSurvey
    sound: MediaSurvey | None = None  # of a clip that is to be heard and has a sound track


class Written(msgspec.Struct, frozen=True, tag=True):
    shape: tuple[int, ...]  # of the array; of a survey, the number of its bytes


Open = Callable[[DecodeOrder, bytes], Iterator[np.ndarray]]
_order_decoder = msgspec.msgpack.Decoder(SurveyOrder | DecodeOrder)


def look(order: SurveyOrder, data: bytes) -> Surveyed:
    """Surveys one file. Raises MediaError, which does not name the item."""
    from cluster.media.container import DecodeBudget
    from cluster.media.decode import decoded_parts, survey
    from cluster.media.images import image_format

    settings, options = order.settings, order.options
    budget = DecodeBudget(settings.limits)
    with naming(order.modality, None):
        found, sound = survey(order.modality, data, settings, options, budget), None
        is_animation = image_format(data) is not None
        if order.modality is Modality.VIDEO and options.audio_in_video and not is_animation:
            with contextlib.suppress(NoSoundError):  # a silent clip is a clip
                sound = survey(Modality.AUDIO, data, settings, options, budget)
        if order.decodes:
            for _ in decoded_parts(order.modality, data, settings, options, budget):
                pass
    return Surveyed(found, sound)


def open_file(order: DecodeOrder, data: bytes) -> Iterator[np.ndarray]:
    """The result of an order, in parts. Raises MediaError, and whatever Pillow or PyAV raise for broken
    files."""
    from cluster.media.container import DecodeBudget
    from cluster.media.decode import decoded_parts

    if isinstance(order, SurveyOrder):
        yield np.frombuffer(encoder.encode(look(order, data)), np.uint8)
    else:
        budget = DecodeBudget(order.settings.limits)
        yield from decoded_parts(order.modality, data, order.settings, order.options, budget)


def write(order: DecodeOrder, parts: Iterator[np.ndarray], result: int) -> tuple[int, ...]:
    """Replaces what is in the file. Returns the shape of the whole."""
    place, shapes = 0, []
    for part in parts:
        if os.pwrite(result, part.data, place) < part.nbytes:
            raise MediaError("too large to decode")
        place += part.nbytes
        shapes.append(part.shape)
    finish(result, place)
    if isinstance(order, SurveyOrder):
        return (place,)
    match order.modality:
        case Modality.IMAGE:
            return shapes[0]
        case Modality.VIDEO:
            return (len(shapes), *shapes[0])
        case Modality.AUDIO:
            return (sum(length for (length,) in shapes),)


def serve(asker: Asker, open_file: Open) -> None:
    """Follows orders until the other end closes."""
    from cluster.media.confinement import Confinement

    confinement = Confinement()

    def follow(order: DecodeOrder, file: int, result: int) -> Written:
        confinement.bound(order.settings, order.timeout_s)
        with naming(order.modality, None):
            data = os.pread(file, os.lseek(file, 0, os.SEEK_END), 0)
            return Written(write(order, open_file(order, data), result))

    asker.follow(_order_decoder, follow, is_filtered=confinement.is_filtered)


def main(open_file: Open = open_file) -> None:
    """Serves until the asker closes the server's socket."""
    for name in IMPORTS:
        importlib.import_module(name)
    from PIL import Image

    Image.init()
    fork_processes(lambda asker: serve(asker, open_file))


if __name__ == "__main__":
    main()
