"""Which bytes of a checkpoint a half takes, and that they are read ahead, with progress in the log."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping

from cluster.config.checkpoint import weight_files
from cluster.errors import ConfigError
from cluster.model.half_files import HalfFiles, HalfSizes
from cluster.model.loading import Half, load_half
from cluster.model.reading import PIECE_BYTES, FilePart, Reading, pieces_of
from tests.flow.tiny_media_models import MEDIA_FAMILIES

MIB = 1 << 20
A, B = Path("a"), Path("b")


def test_pieces_cover_each_byte_once_in_the_files_order_over_all_ranks() -> None:
    ranges = [FilePart(B, 7, 20), FilePart(A, 10, PIECE_BYTES + 5), FilePart(A, 0, 10), FilePart(B, 90, 95)]
    whole = pieces_of(ranges)
    assert whole == [
        FilePart(A, 0, PIECE_BYTES), FilePart(A, PIECE_BYTES, PIECE_BYTES + 5),
        FilePart(B, 7, 20), FilePart(B, 90, 95),
    ]  # fmt: skip
    shares = [pieces_of(ranges, rank=rank, num_ranks=3) for rank in range(3)]
    assert sorted(itertools.chain(*shares), key=whole.index) == whole
    assert pieces_of(ranges, room=2 * PIECE_BYTES) == whole[:2]


def test_progress_is_logged_in_bytes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "weights"
    with file.open("wb") as content:
        content.truncate(40 * MIB)
    caplog.set_level(logging.INFO)
    clock = itertools.count(step=3.0)
    with Reading("the half", lambda: next(clock)) as reading:
        reading.begin(pieces_of([FilePart(file, 0, 40 * MIB)]))
        reading.begin(pieces_of([FilePart(file, 0, 40 * MIB)]))  # a second load of the same half
        for thread in reading.threads:
            thread.join()
    lines = [record.getMessage() for record in caplog.records]
    # of five pieces, three seconds each, every second one and the last are reported
    assert [line.split(",")[0] for line in lines] == [
        "the half: read 0.02 of 0.04 GB", "the half: read 0.03 of 0.04 GB", "the half: read 0.04 of 0.04 GB",
    ]  # fmt: skip


def test_a_file_that_cannot_be_read_ahead_is_left_to_the_loader(tmp_path: Path, caplog) -> None:
    with Reading("the half") as reading:
        reading.begin([FilePart(tmp_path / "missing", 0, 5)])
    assert "the half: " in caplog.text and "missing cannot be read ahead" in caplog.text


@pytest.mark.parametrize("name", ["qwen2_5_omni", "gemma3", "qwen3_omni"])
def test_a_half_takes_the_bytes_that_it_holds_and_says_so_before_it_reads(name: str, tmp_path: Path) -> None:
    """With renamed keys and merged experts."""
    MEDIA_FAMILIES[name]().model.save_pretrained(tmp_path, max_shard_size="100KB")
    files = HalfFiles(weight_files(tmp_path), None)
    taken: dict[Half, list[FilePart]] = {}
    for half in Half:
        said: list[HalfSizes] = []
        loaded = load_half(tmp_path, half, dtype=torch.float32, device="cpu", check_room=said.append)
        held = sum(parameter.nbytes for parameter in loaded.parameters())
        assert [each.num_bytes for each in said] == [held] == [4 * said[0].num_weights]
        taken[half] = files.taken(loaded, get_model_conversion_mapping(loaded))
        buffers = sum(buffer.nbytes for buffer in loaded.buffers())
        assert held <= sum(each.end - each.begin for each in taken[half]) <= held + buffers
    assert not set(taken[Half.ENCODER]) & set(taken[Half.LANGUAGE])

    def refuse(sizes: HalfSizes) -> None:
        raise ConfigError(f"{sizes.num_bytes} bytes are too many")

    for file in tmp_path.glob("*.safetensors"):  # a weight that was read would not be finite
        content = bytearray(file.read_bytes())
        first = 8 + int.from_bytes(content[:8], "little")
        file.write_bytes(content[:first] + b"\xff" * (len(content) - first))
    with pytest.raises(ConfigError, match="bytes are too many"):
        load_half(tmp_path, Half.LANGUAGE, dtype=torch.float32, device="cpu", check_room=refuse)


def test_mapped_tensors_are_those_of_the_files(tmp_path: Path) -> None:
    tensors: dict[str, Tensor] = {
        "a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "none": torch.empty(0, 4),
        "scalar": torch.tensor(7), "flags": torch.tensor([True, False]), "c": torch.randn(2, 2, 2).half(),
    }  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    mapped = HalfFiles(weight_files(tmp_path), None).mapped()
    assert mapped is not None and mapped.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert mapped[name].dtype == tensor.dtype and torch.equal(mapped[name], tensor)
    save_file({"a": torch.zeros(2).to(torch.float8_e4m3fn)}, tmp_path / "model.safetensors")
    assert HalfFiles(weight_files(tmp_path), None).mapped() is None
