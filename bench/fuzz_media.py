"""Hostile and broken media against the path through door and encoder: probe, geometry, decode, prepare.

`python -m bench.fuzz_media --items N --seed S` runs N items: first every file of `bench.hostile_media` as
each modality, then mutations of good files. An item passes if it is answered with shapes that agree with its
geometry, or refused with a RequestError. Anything else is a failure: another exception, shapes that differ, a
crash, more than ITEM_S seconds.

The items run in a child process under a memory limit. The child reports each item before it starts it, so
that the item of a crash (of a C library) or a hang is known; a new child continues after it. `case(seed,
idx)` makes any item again.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import IO, Any

import numpy as np

from bench import DEMO_MODEL, REPOSITORY, hostile_media, media_files
from bench.arguments import parser_of
from bench.processes import status_bytes
from bench.trusted_media import decode, prepare, probe
from cluster.errors import RequestError
from cluster.media.settings import MediaLimits
from cluster.types.media import FrameStrategy, MediaOptions, Modality

ITEM_S = 20.0  # wall time after which an item counts as hung
START_S = 120.0  # wall time for imports and the model's processor
LIMITS = MediaLimits(max_pixels=4 * 10**6, max_video_pixels=32 * 10**6, max_decode_s=5.0)
MEMORY_BYTES = 2 * 2**30  # address space of the child beyond what it has when it starts
NUM_WARM = 200  # mutations before memory and open files are counted for the first time


@dataclass(frozen=True)
class MediaCase:
    name: str
    modality: Modality
    data: bytes
    options: MediaOptions


@dataclass
class FuzzReport:
    """Counts, and `failures`: sentences that name seed and item."""

    num_items: int = 0
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)
    growth_bytes: int = 0
    num_leaked_files: int = 0


@cache
def good_files() -> tuple[tuple[str, Modality, bytes], ...]:
    """(name, modality, content) of small good files of every accepted format."""
    files: list[tuple[str, Modality, bytes]] = []
    for form in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"):
        files.append((form, Modality.IMAGE, media_files.image(24, 18, form)))
    files.append(("progressive JPEG", Modality.IMAGE, media_files.image(24, 18, "JPEG", progressive=True)))
    files.append(("rotated JPEG", Modality.IMAGE, media_files.rotated_jpeg(24, 18)))
    for compression in ("tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        files.append(
            (compression, Modality.IMAGE, media_files.image(24, 18, "TIFF", compression=compression))
        )
    for form in ("GIF", "PNG", "WEBP", "AVIF"):
        files.append((f"{form} animation", Modality.IMAGE, media_files.animation(4, form)))
        files.append((f"{form} animation", Modality.VIDEO, media_files.animation(4, form)))
    for form, codec in (
        ("mp4", "libx264"), ("mp4", "mpeg4"), ("matroska", "libvpx"), ("webm", "libvpx-vp9"), ("avi", "mjpeg"),
        ("mpegts", "mpeg2video"), ("flv", "flv"), ("asf", "mpeg4"),
    ):  # fmt: skip
        content = media_files.video_of(media_files.scenes(4, 5), 10, form, codec, gop_size=3)
        files.append((f"{form} {codec}", Modality.VIDEO, content))
    files.append(("sideways mp4", Modality.VIDEO, media_files.sideways_video()))
    for form in media_files.AUDIO_CODECS:
        files.append((form, Modality.AUDIO, media_files.audio(0.15, 16000 if form == "wav" else 48000, form)))
    return tuple(files)


@cache
def hand_made() -> tuple[MediaCase, ...]:
    """Every hostile file as each modality; as a video, with each strategy."""
    cases = []
    for name, data in hostile_media.files():
        cases += [MediaCase(name, modality, data, MediaOptions()) for modality in Modality]
        for strategy in (FrameStrategy.KEYFRAMES, FrameStrategy.SCENES):
            cases.append(MediaCase(name, Modality.VIDEO, data, MediaOptions(strategy=strategy)))
    return tuple(cases)


def case(seed: int, idx: int) -> MediaCase:
    """The idx-th item of this seed; always the same."""
    if idx < len(hand_made()):
        return hand_made()[idx]
    draw = random.Random(f"{seed}/{idx}")
    name, modality, data = draw.choice(good_files())
    for _ in range(draw.choice((1, 1, 2, 3))):
        data = draw.choice(_MUTATIONS)(data, draw)
    if draw.random() < 0.05:
        modality = draw.choice(list(Modality))
    return MediaCase(name, modality, data, _options(draw) if modality is Modality.VIDEO else MediaOptions())


def _options(draw: random.Random) -> MediaOptions:
    strategy = draw.choice(list(FrameStrategy))
    if draw.random() < 0.7:
        return MediaOptions(strategy=strategy)
    return MediaOptions(
        strategy=strategy,
        fps=draw.choice((None, 0.1, 3.0, 1000.0, 0.0, -1.0, float("nan"), float("inf"))),
        min_frames=draw.choice((None, 1, 3, 10, 0, 10**9)),
        max_frames=draw.choice((None, 1, 2, 7, 0, 10**9)),
    )


def _place(data: bytes, draw: random.Random) -> int:
    """A position in the file. Half of the positions are near an end, where headers and indices are."""
    near = min(len(data), 160)
    choices = (
        draw.randrange(len(data) + 1),
        near and draw.randrange(near),
        len(data) - (near and draw.randrange(near)),
    )
    return choices[draw.choice((0, 0, 1, 2))]


def _truncate(data: bytes, draw: random.Random) -> bytes:
    return data[: _place(data, draw)]


def _flip(data: bytes, draw: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(draw.choice((1, 2, 8)) if data else 0):
        changed[min(_place(data, draw), len(data) - 1)] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, draw: random.Random) -> bytes:
    """A number of 1 to 8 bytes is replaced, mostly by the least or the greatest value of some range."""
    size, start = draw.choice((1, 2, 4, 8)), _place(data, draw)
    value = draw.choice(
        (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, 255, 65535, draw.getrandbits(64))
    )
    number = (value % 2 ** (8 * size)).to_bytes(size, draw.choice(("big", "little")))
    return data[:start] + number + data[start + size :]


def _cut(data: bytes, draw: random.Random) -> bytes:
    start = _place(data, draw)
    return data[:start] + data[start + draw.choice((1, 4, 16, 200)) :]


def _repeat(data: bytes, draw: random.Random) -> bytes:
    start, size = _place(data, draw), draw.choice((1, 4, 16, 200))
    return data[: start + size] + data[start : start + size] * draw.choice((1, 3, 50)) + data[start + size :]


def _splice(data: bytes, draw: random.Random) -> bytes:
    _, _, other = draw.choice(good_files())
    return data[: _place(data, draw)] + other[_place(other, draw) :]


_MUTATIONS = (_truncate, _flip, _flip, _overwrite, _overwrite, _cut, _repeat, _splice)


def check(item: MediaCase, processor: Any) -> bool:
    """Whether the item was answered and not refused. Raises AssertionError if shapes disagree, and every
    other exception that is no RequestError.
    """
    settings, modality = processor.settings, item.modality
    try:
        probed = probe(modality, item.data, settings, item.options, item_idx=3)
        geometry = processor.layout(probed, item_idx=3).geometry
        array = decode(modality, item.data, settings, item.options, item_idx=3)
        inputs = prepare(processor, modality, array, item_idx=3)
        again = probe(modality, item.data, settings, item.options, item_idx=3)
    except RequestError as error:
        assert error.message.startswith(f"item 3 ({modality}): "), error.message
        return False
    assert geometry.num_tokens > 0
    size = (probed.height, probed.width, 3)
    if modality is Modality.IMAGE:
        assert array.shape == size
        assert inputs["image_grid_thw"].tolist() == [list(geometry.grid_thw)]
    elif modality is Modality.VIDEO:
        assert array.shape == (probed.num_frames, *size)
        assert again == probed  # `decode` plans the same frames by itself
        assert len(probed.frame_idx) == probed.num_frames
        assert max(probed.frame_idx) < probed.num_source_frames
        assert np.isfinite([probed.fps, probed.source_fps]).all()
        assert inputs["video_grid_thw"].tolist() == [list(geometry.grid_thw)]
    else:
        assert len(array) == probed.num_samples and np.isfinite(array).all()
        assert int(inputs["feature_attention_mask"].sum()) == geometry.num_mel_frames
    return True


def run_child(seed: int, first: int, end: int) -> None:
    """Runs items [first, end). Prints a line before each item, a line for each failure and one at the end."""
    import torch

    from cluster.media.processor import MediaProcessor

    torch.set_num_threads(1)
    processor = MediaProcessor.load(DEMO_MODEL, LIMITS)
    for _, modality, data in good_files():
        # Loads and reserves what every item shares.
        check(MediaCase("", modality, data, MediaOptions()), processor)
    limit = status_bytes(os.getpid(), "VmSize") + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    num_answers, before = 0, None
    warm_at = max(first, len(hand_made())) + NUM_WARM
    for idx in range(first, end):
        print(f"AT {idx}", flush=True)
        item = case(seed, idx)
        try:
            num_answers += check(item, processor)
        except Exception as error:
            text = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
            print(f"FAIL {idx} ({item.name} as {item.modality}): {text}", flush=True)
        if idx == warm_at:
            before = _held()
    growth, leaked = (now - then for now, then in zip(_held(), before, strict=True)) if before else (0, 0)
    print(f"END {num_answers} {growth} {leaked}", flush=True)


def _held() -> tuple[int, int]:
    """Resident bytes and open files of this process."""
    return status_bytes(os.getpid(), "VmRSS"), len(os.listdir("/proc/self/fd"))


def fuzz(num_items: int, seed: int) -> FuzzReport:
    """Runs the items, with a new child after every crash and hang."""
    report = FuzzReport(num_items)
    first = 0
    while first < num_items:
        command = [sys.executable, "-m", "bench.fuzz_media", "--child", str(first)]
        command += ["--items", str(num_items), "--seed", str(seed)]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(
                command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=errors, bufsize=0
            ) as child,
        ):
            try:
                at, ending = follow(child, seed, report, ITEM_S)
            finally:
                child.kill()
            if ending is None:
                break
            errors.seek(0)
            said = errors.read()[-500:].decode(errors="replace")
        name = case(seed, at).name if at >= 0 else "none yet"
        report.failures.append(f"seed {seed}, item {at} ({name}): {ending}; {said}")
        if at < 0:
            break
        first = at + 1
    return report


def follow(
    child: subprocess.Popen[bytes], seed: int, report: FuzzReport, item_s: float
) -> tuple[int, str | None]:
    """Reads the output of a child. Returns the last item that it began and how the child ended; None for a
    normal end.
    """
    assert child.stdout is not None
    at = -1
    while True:
        line = _line(child.stdout, item_s if at >= 0 else START_S)
        if line is None:
            return at, f"hung for {item_s:g} s"
        word, _, rest = line.partition(" ")
        match word:
            case "AT":
                at = int(rest)
            case "FAIL":
                report.failures.append(f"seed {seed}, item {rest}")
            case "END":
                answers, growth, leaked = map(int, rest.split())
                report.num_answers += answers
                report.growth_bytes = max(report.growth_bytes, growth)
                report.num_leaked_files = max(report.num_leaked_files, leaked)
                return at, None
            case "":
                return at, f"the process ended with {child.wait(START_S)}"


def _line(stream: IO[bytes], timeout_s: float) -> str | None:
    """The next line without its end; "" at the end of the stream; None if none comes within `timeout_s`."""
    ready, _, _ = select.select([stream], [], [], timeout_s)
    return stream.readline().decode().rstrip() if ready else None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--items", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.child is not None:
        run_child(asked.seed, asked.child, asked.items)
        return 0
    report = fuzz(asked.items, asked.seed)
    print(*report.failures, sep="\n")
    print(
        f"{report.num_items} items, {report.num_answers} answered, {len(report.failures)} failures, "
        f"memory grew by {report.growth_bytes / 2**20:.0f} MiB, {report.num_leaked_files} files left open"
    )
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
