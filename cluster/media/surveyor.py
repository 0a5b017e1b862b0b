"""The process in which a door opens media files. FFmpeg and Pillow run here, on untrusted bytes.

If one of them crashes, only this process ends; the door's streams go on. The process imports neither torch
nor transformers, opens no path and no address, and has no data but the current order. It ends when its socket
ends, also when the door is killed.

    door → here  SurveyOrder, then the file's bytes
    here → door  Surveyed or SurveyRefused
"""

from __future__ import annotations

import socket
import sys
from typing import BinaryIO

import msgspec

from cluster.errors import ClusterError, ErrorInfo, to_info
from cluster.media.settings import MediaSettings, naming
from cluster.media.survey import MediaSurvey
from cluster.types.media import MediaOptions, Modality

HEADER_BYTES = 4  # length of a frame, little endian


class SurveyOrder(msgspec.Struct, frozen=True, array_like=True):
    """One survey of one file."""

    modality: Modality
    options: MediaOptions
    settings: MediaSettings
    num_bytes: int  # of the file, which follows
    timeout_s: float
    # decode the whole file, as an encoder would: the client wants the answer without items that cannot be
    # decoded
    decodes: bool = False


class Surveyed(msgspec.Struct, frozen=True, tag=True):
    survey: MediaSurvey
    sound: MediaSurvey | None = None  # of a clip that is heard


class SurveyRefused(msgspec.Struct, frozen=True, tag=True):
    error: ErrorInfo


SurveyAnswer = Surveyed | SurveyRefused
_encoder = msgspec.msgpack.Encoder()
order_decoder = msgspec.msgpack.Decoder(SurveyOrder)


def framed(message: SurveyOrder | SurveyAnswer | None) -> bytes:
    """The message as a frame. None: the process is ready."""
    payload = _encoder.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


def look(order: SurveyOrder, data: bytes) -> Surveyed:
    """Surveys one file. Raises MediaError, which does not name the item."""
    from cluster.media.budget import DecodeBudget
    from cluster.media.decode import decode_within
    from cluster.media.probe import survey

    settings, options = order.settings, order.options
    budget = DecodeBudget(settings.limits, order.timeout_s)
    with naming(order.modality, None):
        found, sound = survey(order.modality, data, settings, options, budget), None
        if order.modality is Modality.VIDEO and options.audio_in_video:
            sound = survey(Modality.AUDIO, data, settings, options, budget)
        if order.decodes:
            decode_within(order.modality, data, settings, options, budget)
    return Surveyed(found, sound)


def serve(stream: BinaryIO) -> None:
    """Answers orders until the other end closes."""
    while header := stream.read(HEADER_BYTES):
        order = order_decoder.decode(stream.read(int.from_bytes(header, "little")))
        data = stream.read(order.num_bytes)
        if len(data) < order.num_bytes:
            return
        answer: SurveyAnswer
        try:
            answer = look(order, data)
        except ClusterError as error:
            answer = SurveyRefused(to_info(error))
        del data
        stream.write(framed(answer))
        stream.flush()


def main() -> None:
    import cluster.media.decode
    import cluster.media.probe  # noqa: F401 - now instead of with the first file

    with socket.socket(fileno=int(sys.argv[1])) as end, end.makefile("rwb") as stream:
        try:
            stream.write(framed(None))
            stream.flush()
            serve(stream)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the door is gone


if __name__ == "__main__":
    main()
