"""The box structure of MP4 and related formats, as far as it must be checked before FFmpeg may open the file.

An index of a few bytes can declare billions of samples, and FFmpeg would reserve memory and time for them
when it opens the file. `check_index` adds up the declared numbers and allocates nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

from cluster.errors import MediaError

PARENTS = frozenset((b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"moof", b"traf"))
MAX_DEPTH = 8
MAX_BOXES = 500_000  # a clip with one fragment per frame has about ten per frame
MAX_EDITS = 1_000  # per file; for each edit FFmpeg visits all samples


def boxes(
    data: bytes, start: int = 0, end: int | None = None, depth: int = 0
) -> Iterator[tuple[bytes, int, int]]:
    """(type, start and end of the payload) of every box, parents before their children. Stops at the first
    malformed box."""
    end = len(data) if end is None else end
    while start + 8 <= end:
        size, kind, header = int.from_bytes(data[start : start + 4]), data[start + 4 : start + 8], 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16]), 16
        box_end = end if size == 0 else min(start + size, end)
        if box_end < start + header:
            return
        yield kind, start + header, box_end
        if kind in PARENTS and depth < MAX_DEPTH:
            yield from boxes(data, start + header, box_end, depth + 1)
        start = box_end


def check_index(data: bytes, max_samples: int) -> None:
    """Raises MediaError if the file declares more samples, edits or boxes than this server accepts."""
    num_samples = num_edits = 0
    for num_boxes, (kind, start, _) in enumerate(boxes(data), start=1):
        if kind == b"stsz":
            num_samples += _number(data, start + 8)
        elif kind in (b"stz2", b"stts", b"trun"):
            num_samples += _number(data, start + (8 if kind == b"stz2" else 4))
        elif kind == b"elst":
            num_edits += _number(data, start + 4)
        if num_boxes > MAX_BOXES or num_samples > 2 * max_samples or num_edits > MAX_EDITS:
            raise MediaError("its index declares more samples than this server accepts")


def frame_times(data: bytes, max_frames: int) -> tuple[list[int], int]:
    """Durations of the first track's samples ([] without a track), and time units per second. Raises
    MediaError."""
    durations: list[int] = []
    timescale = 1
    for kind, start, end in boxes(data):
        if kind == b"mdhd":
            timescale = _number(data, start + (20 if data[start : start + 1] == b"\1" else 12)) or 1
        elif kind == b"stts":
            for entry in range(start + 8, min(end, start + 8 + 8 * _number(data, start + 4)) - 7, 8):
                count = _number(data, entry)
                if len(durations) + count > max_frames:
                    raise MediaError(f"more than {max_frames} frames are not accepted")
                durations += [_number(data, entry + 4)] * count
            break
    return durations, timescale


def _number(data: bytes, start: int) -> int:
    return int.from_bytes(data[start : start + 4])
