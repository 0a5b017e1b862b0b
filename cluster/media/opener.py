"""The program of the processes in which doors and encoders open media files. FFmpeg and Pillow run here, on
untrusted bytes.

Two kinds of processes, both with one thread of Python:

* The server imports everything and forks openers (`main`). It reads no file. `cluster.media.processes`
  starts one for each door or worker.
* An opener confines itself (`confinement`) and answers orders (`serve`). It knows nothing but the current
  order, and whatever it does, only its item is lost.

    asker → opener  an order, and two files in memory: the media file, sealed, and one for the result
    opener → asker  Written: the result is in its file, which is sealed if it is large; or Refused

An opener ends when its asker closes the socket, or at once with the server, which ends with its asker.
Imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import msgspec
import numpy as np

from cluster.errors import ClusterError, ErrorInfo, MediaError, NoSoundError, to_info
from cluster.media.settings import MediaSettings, naming
from cluster.media.survey import MediaSurvey
from cluster.types.media import MediaOptions, Modality

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
MAX_MESSAGE_BYTES = 1 << 16
# A result up to this size is copied, and its file used again: new memory costs more than copying. A larger
# one stays where it is.
MAX_COPIED_BYTES = 16 << 20
# An opener cannot import: these, and all that Pillow and PyAV would import for some file.
IMPORTS = (
    "cluster.media.confinement", "cluster.media.decode", "cluster.media.probe",
    "PIL.ImageCms", "av.subtitles.codeccontext", "av.subtitles.stream", "av.subtitles.subtitle",
)  # fmt: skip


class DecodeOrder(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Pixels or samples of one file. The result is an array, one element after the other."""

    modality: Modality
    options: MediaOptions
    settings: MediaSettings
    timeout_s: float


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


class Refused(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


class OpenerReady(msgspec.Struct, frozen=True, tag=True):
    """The first message of an opener. A descriptor of its process comes with it."""

    is_filtered: bool  # see `confinement`


Open = Callable[[DecodeOrder, bytes], Iterator[np.ndarray]]
encoder = msgspec.msgpack.Encoder()
_order_decoder = msgspec.msgpack.Decoder(SurveyOrder | DecodeOrder)


def look(order: SurveyOrder, data: bytes) -> Surveyed:
    """Surveys one file. Raises MediaError, which does not name the item."""
    from cluster.media.budget import DecodeBudget
    from cluster.media.decode import decoded_parts
    from cluster.media.images import image_format
    from cluster.media.probe import survey

    settings, options = order.settings, order.options
    budget = DecodeBudget(settings.limits, order.timeout_s)
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
    from cluster.media.budget import DecodeBudget
    from cluster.media.decode import decoded_parts

    if isinstance(order, SurveyOrder):
        yield np.frombuffer(encoder.encode(look(order, data)), np.uint8)
    else:
        budget = DecodeBudget(order.settings.limits, order.timeout_s)
        yield from decoded_parts(order.modality, data, order.settings, order.options, budget)


def write(order: DecodeOrder, parts: Iterator[np.ndarray], result: int) -> tuple[int, ...]:
    """Replaces what is in the file. Returns the shape of the whole."""
    place, shapes = 0, []
    for part in parts:
        if os.pwrite(result, part.data, place) < part.nbytes:
            raise MediaError("too large to decode")
        place += part.nbytes
        shapes.append(part.shape)
    os.ftruncate(result, place)
    if place > MAX_COPIED_BYTES:
        fcntl.fcntl(result, fcntl.F_ADD_SEALS, SEALS)
    if isinstance(order, SurveyOrder):
        return (place,)
    match order.modality:
        case Modality.IMAGE:
            return shapes[0]
        case Modality.VIDEO:
            return (len(shapes), *shapes[0])
        case Modality.AUDIO:
            return (sum(length for (length,) in shapes),)


def serve(end: socket.socket, open_file: Open, forked_by: int) -> None:
    """Answers orders until the other end closes."""
    from cluster.media.confinement import Confinement

    handle = os.pidfd_open(os.getpid())
    confinement = Confinement(forked_by)
    socket.send_fds(end, [encoder.encode(OpenerReady(confinement.is_filtered))], [handle])
    os.close(handle)
    while True:
        message, files, _, _ = socket.recv_fds(end, MAX_MESSAGE_BYTES, 2)
        if not message:
            return
        order, (file, result) = _order_decoder.decode(message), files
        confinement.bound(order.settings, order.timeout_s)
        answer: Written | Refused
        try:
            with naming(order.modality, None):
                data = os.pread(file, os.lseek(file, 0, os.SEEK_END), 0)
                answer = Written(write(order, open_file(order, data), result))
        except ClusterError as error:
            answer = Refused(to_info(error))
        data = b""
        for number in files:
            os.close(number)
        end.send(encoder.encode(answer))


def main(open_file: Open = open_file) -> None:
    """Forks an opener for each socket that comes, until the other end closes."""
    for name in IMPORTS:
        importlib.import_module(name)
    from PIL import Image

    Image.init()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # openers need not be waited for
    gc.collect()
    gc.freeze()  # an opener that collected all that is imported would copy its pages
    server, pid = socket.socket(fileno=int(sys.argv[1])), os.getpid()
    while True:
        message, ends, _, _ = socket.recv_fds(server, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            server.close()
            os.dup2(0, 1)  # the null device
            os.dup2(0, 2)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the asker is gone
                serve(socket.socket(fileno=ends[0]), open_file, pid)
            os._exit(0)
        os.close(ends[0])


if __name__ == "__main__":
    main()
