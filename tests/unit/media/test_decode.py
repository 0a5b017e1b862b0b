from __future__ import annotations

import base64
import hashlib
import io
import zlib
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from bench.trusted_media import decode, probe
from cluster.errors import MediaError
from cluster.media.settings import MediaLimits, MediaSettings, VideoSampling
from cluster.media.sources import PIECE_CHARS, read_data_uri
from cluster.media.torchvision_compat import ensure_torchvision
from cluster.types.media import FrameStrategy, MediaOptions, Modality
from router.prompts.media import media_hash
from tests.unit.media import files

SETTINGS = MediaSettings(video=VideoSampling(fps=4, max_frames=32))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_decodes_to_the_size_it_was_probed_at(form):
    data = files.image(37, 21, form)
    probed = probe(Modality.IMAGE, data, SETTINGS)
    assert (probed.width, probed.height) == (37, 21)
    assert decode(Modality.IMAGE, data, SETTINGS).shape == (21, 37, 3)


def test_an_image_is_turned_upright():
    data = files.rotated_jpeg(40, 20)
    probed = probe(Modality.IMAGE, data, SETTINGS)
    assert (probed.width, probed.height) == (20, 40)
    assert decode(Modality.IMAGE, data, SETTINGS).shape == (40, 20, 3)


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "AVIF"])
def test_an_animation_sent_as_an_image_is_its_first_frame(form):
    assert decode(Modality.IMAGE, files.animation(form=form), SETTINGS).max() == 0


def _saved(mode: str, form: str, **options) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 255, (12, 17, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, form, **options)
    return out.getvalue()


SAVED = {
    f"{mode} {form} {options}": _saved(mode, form, **options)
    for mode, form, options in [
        ("L", "PNG", {}), ("LA", "PNG", {}), ("P", "PNG", {}), ("RGB", "PNG", {}),
        ("RGBA", "PNG", {}), ("1", "PNG", {}), ("CMYK", "JPEG", {}), ("L", "JPEG", {}),
        ("RGB", "JPEG", {"progressive": True}), ("RGBA", "WEBP", {}), ("RGB", "WEBP", {"lossless": True}), ("RGBA", "AVIF", {}),
        ("P", "GIF", {}), ("CMYK", "TIFF", {"compression": "tiff_lzw"}), ("RGBA", "TIFF", {}), ("P", "BMP", {}),
        ("RGB", "MPO", {}),
    ]
} | {"rotated JPEG": files.rotated_jpeg(40, 20)}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_an_opaque_image_equals_what_transformers_loads(name):
    ensure_torchvision()
    from transformers.image_utils import load_image

    theirs = np.asarray(load_image(base64.b64encode(SAVED[name]).decode()))
    probed = probe(Modality.IMAGE, SAVED[name], SETTINGS)
    assert (probed.height, probed.width, 3) == theirs.shape
    np.testing.assert_array_equal(decode(Modality.IMAGE, SAVED[name], SETTINGS), theirs)


def test_a_png_that_tells_its_orientation_behind_its_pixels_is_turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    data, payload = files.image(40, 20), exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = b"eXIf" + payload
    end = data.index(b"IEND") - 4
    data = data[:end] + len(payload).to_bytes(4) + chunk + zlib.crc32(chunk).to_bytes(4) + data[end:]
    probed = probe(Modality.IMAGE, data, SETTINGS)
    assert (probed.width, probed.height) == (20, 40)
    assert decode(Modality.IMAGE, data, SETTINGS).shape == (40, 20, 3)


def test_what_no_library_here_reads_is_refused_by_name():
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)
    with pytest.raises(MediaError, match=r"item 1 \(image\): HEIC is not supported by this build"):
        probe(Modality.IMAGE, heic, SETTINGS, item_idx=1)
    with pytest.raises(
        MediaError, match=r"item 1 \(image\): not an image this server can read; it takes JPEG, PNG"
    ):
        probe(Modality.IMAGE, b"<svg/>" * 50, SETTINGS, item_idx=1)


def test_a_jpeg_of_many_scans_is_refused():
    data = files.image(form="JPEG", progressive=True)
    assert probe(Modality.IMAGE, data, SETTINGS).width == 40
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(MediaError, match="more than 100 scans"):
        probe(Modality.IMAGE, data[:-2] + data[scan:-2] * 100 + data[-2:], SETTINGS)


def test_a_jpeg_with_a_clip_behind_it_is_an_image():
    data = files.image(form="JPEG") + b"\xff\xda\0\2" * 500
    assert decode(Modality.IMAGE, data, SETTINGS).shape == (30, 40, 3)


def test_a_jpeg_of_many_segments_is_refused():
    data = files.image(form="JPEG")
    with pytest.raises(MediaError, match="more than 10000 segments"):
        probe(Modality.IMAGE, data[:2] + b"\xff\xfe\0\2" * 10_000 + data[2:], SETTINGS)


@pytest.mark.parametrize("form", files.AUDIO_CODECS)
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_decodes_to_as_many_samples_as_it_was_probed_at(form, channels):
    data = files.audio(1.3, 48000, form, channels)
    num_samples = probe(Modality.AUDIO, data, SETTINGS).num_samples
    waveform = decode(Modality.AUDIO, data, SETTINGS)
    assert waveform.dtype == np.float32 and waveform.shape == (num_samples,)
    assert num_samples == pytest.approx(1.3 * 16000, rel=0.1)
    assert 0.1 < np.abs(waveform).max() < 0.5


def test_the_sound_track_of_a_video_is_heard():
    data = files.video_of([np.zeros((48, 64, 3), np.uint8)] * 10, sound_s=1.0)
    num_samples = probe(Modality.AUDIO, data, SETTINGS).num_samples
    assert num_samples == pytest.approx(16000, rel=0.1)
    assert len(decode(Modality.AUDIO, data, SETTINGS)) == num_samples


def test_a_video_without_sound_and_a_sound_without_pictures_say_so():
    with pytest.raises(MediaError, match=r"item 5 \(audio\): has no sound track"):
        probe(Modality.AUDIO, files.video(4), SETTINGS, item_idx=5)
    with pytest.raises(MediaError, match=r"item 5 \(video\): has no video stream"):
        probe(Modality.VIDEO, files.audio(0.1), SETTINGS, item_idx=5)


def test_samples_that_are_no_numbers_are_refused():
    for value in (np.nan, np.inf):
        data = files.raw_wav(np.full(4000, value, np.float32).tobytes(), bits=32, kind=3)
        with pytest.raises(MediaError, match="not finite numbers"):
            probe(Modality.AUDIO, data, SETTINGS)


@pytest.mark.parametrize(("form", "channels"), [("wav", 1), ("wav", 2), ("flac", 1), ("flac", 2)])
def test_a_sound_at_the_models_rate_equals_what_soundfile_reads(form, channels):
    soundfile = pytest.importorskip("soundfile")
    data = files.audio(0.5, 16000, form, channels)
    theirs, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    assert rate == 16000
    np.testing.assert_allclose(decode(Modality.AUDIO, data, SETTINGS), theirs.mean(axis=1), atol=1e-6)


@pytest.mark.parametrize(
    ("form", "rate"), [("wav", 44100), ("wav", 8000), ("flac", 48000), ("mp3", 44100), ("ogg", 48000)]
)
def test_resampling_is_ffmpegs_and_does_not_see_where_packets_end(form, rate):
    data = files.audio(0.7, rate, form)
    with av.open(io.BytesIO(data), "r") as container:
        samples: Any = np.concatenate([frame.to_ndarray() for frame in container.decode(audio=0)], axis=1)
        source = container.streams.audio[0].codec_context
        whole = av.AudioFrame.from_ndarray(samples, format=source.format.name, layout=source.layout.name)
        whole.sample_rate = source.sample_rate
    resampler = av.AudioResampler("flt", "mono", 16000, options={"rematrix_maxval": "1.0"})
    theirs = np.concatenate(
        [f.to_ndarray()[0] for f in [*resampler.resample(whole), *resampler.resample(None)]]
    )
    np.testing.assert_allclose(decode(Modality.AUDIO, data, SETTINGS), theirs, atol=1e-6)


def test_a_wav_at_the_models_rate_comes_through_unchanged():
    data = files.audio(0.5, 16000)
    expected = (np.sin(np.arange(8000) * 440 * 2 * np.pi / 16000) * 8000).astype(np.int16) / 32768
    np.testing.assert_allclose(decode(Modality.AUDIO, data, SETTINGS), expected, atol=1e-6)


def test_limits_are_named():
    limits = MediaLimits(
        max_bytes=10**6, max_pixels=10_000, max_video_pixels=24_000, max_video_s=1.0, max_audio_s=1.0
    )
    settings = MediaSettings(limits, VideoSampling(fps=10))
    for modality, data, message in [
        (Modality.IMAGE, files.image(101, 100), "10100|101x100"),
        (Modality.VIDEO, files.video(20, 10), "longer than 1 seconds"),
        (Modality.VIDEO, files.video(4, 10, (128, 96)), "10000 pixels"),
        (Modality.VIDEO, files.video(9, 10), "8 frames of 64x48, together"),
        (
            Modality.AUDIO,
            files.audio(0.1)[:24] + (5).to_bytes(4, "little") + files.audio(0.1)[28:],
            "rate of 5 Hz",
        ),
        (Modality.AUDIO, files.audio(1.1), "longer than 1 seconds"),
        (Modality.AUDIO, b"x" * (10**6 + 1), "larger than 1000000 bytes"),
    ]:
        with pytest.raises(MediaError, match=rf"item 3 \({modality}\): .*({message})"):
            probe(modality, data, settings, item_idx=3)


def test_a_decompression_bomb_is_refused_by_its_header():
    data = files.image(1, 1)
    bomb = data[:16] + (60_000).to_bytes(4) + (60_000).to_bytes(4) + data[24:]
    with pytest.raises(MediaError, match=r"item 0 \(image\)"):
        probe(Modality.IMAGE, bomb, SETTINGS)


@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd",
        b"RIFF",
    ],
)
def test_what_is_no_media_is_refused(modality, data):
    with pytest.raises(MediaError, match=rf"item 1 \({modality}\)"):
        probe(modality, data, SETTINGS, item_idx=1)


def test_a_data_uri_gives_its_bytes():
    url = "data:Image/PNG;base64," + base64.b64encode(b"hello").decode()
    assert read_data_uri(url, 5) == b"hello"


@pytest.mark.parametrize(
    "url",
    [
        "", "file:///etc/passwd", "/etc/passwd", "ftp://x/y", "https://example.org/a.png", "data:", "data:image/png,abc", "javascript:1",
        "data:image/png;base64,a b=", "data:image/png;base64,QQ==QQ==", "data:image/png;base64,QQ=", "data:image/png;base64,", "data:image/png;base64,AAAAAAAAAAAAAAAA",
        "data:image/png;base64,äöü=",
    ],
)  # fmt: skip
def test_other_sources_are_refused(url):
    with pytest.raises(MediaError):
        read_data_uri(url, 5)


@pytest.mark.parametrize("line_break", ["\r\n", "\n", " \t", "\f"])
@pytest.mark.parametrize("num_bytes", [1, 56, 57, 58, 3 * PIECE_CHARS])
def test_base64_may_have_the_line_breaks_of_mime(line_break, num_bytes):
    data = np.random.default_rng(num_bytes).bytes(num_bytes)
    text = base64.b64encode(data).decode()
    lines = [text[start : start + 76] for start in range(0, len(text), 76)]
    for body in (line_break.join(lines), line_break + line_break.join(lines) + line_break):
        assert read_data_uri("data:;base64," + body, num_bytes) == data
        with pytest.raises(MediaError, match="larger than"):
            read_data_uri("data:;base64," + body, num_bytes - 1)


def test_base64_may_not_be_mostly_white_space_or_go_on_behind_its_padding():
    text = base64.b64encode(bytes(PIECE_CHARS // 4 * 3 - 2)).decode()  # ends with a piece
    assert text.endswith("=") and len(text) == PIECE_CHARS
    assert read_data_uri("data:;base64," + text + "\r\n", 1 << 20)
    for body in (text + "\r\nAAAA", text + "A", "AAAA" + " " * 100 + "AAAA", "A\n" * 4000, text + "\u2003"):
        with pytest.raises(MediaError, match="not valid base64"):
            read_data_uri("data:;base64," + body, 1 << 20)


class WatchedText(str):
    """Notes how long the pieces are that are taken of it."""

    taken: list[int]

    def __getitem__(self, key):
        self.taken.append(len(super().__getitem__(key)))
        return super().__getitem__(key)


def test_base64_is_decoded_in_pieces_that_are_read_once():
    for num_bytes in (1 << 20, 1 << 22):
        body = base64.encodebytes(bytes(num_bytes)).decode()
        url = WatchedText("data:;base64," + body)
        url.taken = []
        read_data_uri(url, num_bytes)
        assert max(url.taken) <= PIECE_CHARS and sum(url.taken) < len(body) + 20


def test_a_name_depends_on_bytes_modality_settings_options_and_tenant():
    names = {
        media_hash(modality, hashlib.sha256(data).digest(), settings, options, tenant)
        for modality in (Modality.IMAGE, Modality.VIDEO)
        for data in (b"a", b"b")
        for settings in ("x", "y")
        for options in (MediaOptions(), MediaOptions(fps=1.0), MediaOptions(strategy=FrameStrategy.SCENES))
        for tenant in ("", "x", "y")
    }
    assert len(names) == 2 * 2 * 2 * 3 * 3
