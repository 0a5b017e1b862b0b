"""What bounds one look at a file while it is under way: packets, and one file alone."""

from __future__ import annotations

import pytest

from bench.trusted_media import probe
from cluster.errors import MediaError
from cluster.media import container
from cluster.media.boxes import check_index
from cluster.media.container import DecodeBudget
from cluster.media.settings import MediaLimits, MediaSettings
from cluster.types.media import Modality
from tests.unit.media import files

SETTINGS = MediaSettings()


def test_packets_are_counted():
    budget = DecodeBudget(MediaLimits(max_packets=2))
    budget.take_packet()
    budget.take_packet()
    with pytest.raises(MediaError, match="more than 2 packets"):
        budget.take_packet()


def test_a_playlist_that_is_opened_all_the_same_opens_no_other_file(monkeypatch, tmp_path):
    """The list of formats holds none that names other files; this is the gate behind it."""
    part = tmp_path / "part.ts"
    part.write_bytes(files.video(4, 8, form="mpegts"))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{part}\n#EXT-X-ENDLIST\n".encode()
    monkeypatch.setattr(container, "container_format", lambda data: "hls")
    with (
        pytest.raises(MediaError, match="refers to another file"),
        container.open_container(playlist, DecodeBudget(MediaLimits())),
    ):
        pass


@pytest.mark.parametrize("text", [b"#EXTM3U\nhttp://10.0.0.1/x.ts\n", b"ffconcat version 1.0\nfile 'x.mp4'\n", b"<MPD></MPD>"])  # fmt: skip
def test_playlists_are_of_no_format_that_is_opened(text):
    assert container.container_format(text) is None


def box(kind: bytes, payload: bytes) -> bytes:
    return (8 + len(payload)).to_bytes(4) + kind + payload


def indexed(num_samples: int) -> bytes:
    """An MP4 whose index says that each of so many samples has 8 bytes."""
    sizes = box(b"stsz", bytes(4) + (8).to_bytes(4) + num_samples.to_bytes(4))
    table = box(b"minf", box(b"stbl", sizes))
    track = box(b"trak", box(b"mdia", table))
    return box(b"ftyp", b"isom" + bytes(4)) + box(b"moov", track)


@pytest.mark.parametrize("modality", [Modality.VIDEO, Modality.AUDIO])
def test_an_index_of_billions_of_samples_is_refused_before_the_file_is_opened(modality):
    with pytest.raises(MediaError, match="its index declares more samples"):
        probe(modality, indexed(2**32 - 1), SETTINGS)
    most = SETTINGS.limits.max_packets
    check_index(indexed(2 * most), most)
    with pytest.raises(MediaError, match="its index declares more samples"):
        check_index(indexed(2 * most + 1), most)
