"""Packed weights in files: found again, shared, checked; never those of another checkpoint or a damaged
file."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from cluster.model.cpu.library import Kernels
from cluster.model.cpu.modules import PackedLinear, optimise_modules
from cluster.model.cpu.weight_cache import Making, WeightCache, WeightKey
from tests.fakes.slow_params import often
from tests.unit.model.native_kernels import LOADED, needs_kernels

ROOM = 1 << 30

pytestmark = needs_kernels


class Part(nn.Module):
    """A half with a weight that is packed and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 48)
        self.linear = nn.Linear(48, 40)

    def forward(self, ids: Tensor) -> Tensor:
        return self.linear(self.embedding(ids))


class Host:
    """A checkpoint, its cache, and what was read of the checkpoint."""

    def __init__(self, folder: Path, max_bytes: int = ROOM):
        self.checkpoint, self.folder = folder / "checkpoint", folder / "cache"
        self.checkpoint.mkdir(parents=True)
        self.weights = self.checkpoint / "model.safetensors"
        self.cache = WeightCache(self.folder, max_bytes)
        self.num_packed = 0
        self.save(seed=0)

    def save(self, seed: int) -> None:
        torch.manual_seed(seed)
        save_file(Part().state_dict(), self.weights)

    def load(self, kernels: Kernels | None = None, half: str = "language") -> Part:
        kernels = kernels or next(iter(LOADED.values()))
        key = WeightKey(self.checkpoint, half, torch.float32, "auto")
        return self.cache.load(key, kernels, self._make)

    def answer(self, **options) -> Tensor:
        with torch.inference_mode():
            return self.load(**options)(torch.arange(7))

    def expected(self) -> Tensor:
        part = Part()
        part.load_state_dict(load_file(self.weights))
        optimise_modules(part, next(iter(LOADED.values())))
        with torch.inference_mode():
            return part(torch.arange(7))

    def _make(self, making: Making) -> Part:
        part = Part().requires_grad_(False)
        if making.mapped is None:
            self.num_packed += 1
            part.load_state_dict(load_file(self.weights))
        else:
            given = {name: tensor for names, tensor in making.mapped.parameters for name in names}
            given |= {
                name: torch.empty(shape, device="meta") for name, (shape, _) in making.mapped.absent.items()
            }
            for name, tensor in given.items():
                module, _, leaf = name.partition(".")
                setattr(getattr(part, module), leaf, nn.Parameter(tensor, requires_grad=False))
        kernels = making.kernels_for(part)
        assert kernels is not None
        optimise_modules(part, kernels)
        return part

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.weights"))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_second_load_maps_the_file_of_the_first(host: Host):
    expected = host.expected()
    cold, warm = host.load(), host.load()
    assert host.num_packed == 1
    assert len(host.files) == 1
    for part in (cold, warm):
        assert isinstance(part.linear, PackedLinear)
        with torch.inference_mode():
            assert torch.equal(part(torch.arange(7)), expected)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(host.files[0]) in line]
    assert maps
    assert all(line.split()[1] == "r--s" for line in maps)


def test_every_variant_and_half_has_a_file_of_its_own(host: Host):
    expected = host.expected()
    for kernels in LOADED.values():
        for half in ("language", "encoder"):
            assert (host.answer(kernels=kernels, half=half) - expected).norm() <= 1e-5 * expected.norm()
    assert host.num_packed == len(host.files) == 2 * len(LOADED)


def damage(file: Path, what: str) -> None:
    size = file.stat().st_size
    if what == "empty":
        os.truncate(file, 0)
    elif what == "half of it":
        os.truncate(file, size // 2)
    elif what == "without its last byte":
        os.truncate(file, size - 1)
    elif what == "writable by others":
        file.chmod(0o622)
    else:
        place = {"other weights": 100, "zeros at its end": (2 << 20) - 1, "another header": (2 << 20) + 20}[
            what
        ]
        with file.open("r+b") as content:
            content.seek(place)
            byte = content.read(1)[0]
            content.seek(place)
            content.write(bytes([byte ^ 1]))


@pytest.mark.parametrize(
    "what",
    often(
        ["empty", "half of it", "without its last byte", "writable by others", "other weights",
         "zeros at its end", "another header"],
        ["half of it", "writable by others", "other weights"],
    ),
)  # fmt: skip
def test_a_damaged_file_is_packed_again(host: Host, what: str, caplog: pytest.LogCaptureFixture):
    expected = host.answer()
    damage(host.files[0], what)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(host.answer(), expected)
    assert "is not used" in caplog.text
    assert host.num_packed == 2
    assert torch.equal(host.answer(), expected)
    assert host.num_packed == 2


def test_the_bytes_are_checked_once_after_each_boot(host: Host, caplog: pytest.LogCaptureFixture):
    host.load()
    (file,) = host.files
    try:
        mark = os.getxattr(file, "user.epdg.checked")
    except OSError:
        pytest.skip("this file system has no attributes: files are checked at each start")
    written_at = file.stat().st_mtime_ns
    damage(file, "other weights")
    os.utime(file, ns=(written_at, written_at))  # as bytes that change on the disk
    host.load()
    assert host.num_packed == 1
    boot, _, rest = mark.partition(b" ")
    os.setxattr(file, "user.epdg.checked", boot[::-1] + b" " + rest)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(host.answer(), host.expected())
    assert host.num_packed == 2 and "not those that were written" in caplog.text


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_a_folder_that_others_may_write_to_is_not_used(
    host: Host, mode: int, caplog: pytest.LogCaptureFixture
):
    host.folder.mkdir()
    host.folder.chmod(mode)
    host.load()
    assert "others may write" in caplog.text
    assert not host.files
    assert host.num_packed == 1


def test_a_folder_that_cannot_be_made_costs_only_the_cache(host: Host, caplog: pytest.LogCaptureFixture):
    host.folder.write_text("a file")
    assert torch.equal(host.answer(), host.expected())
    assert "not kept" in caplog.text


def test_a_checkpoint_changed_in_place_is_read_again(host: Host):
    first = host.answer()
    before = host.weights.stat()
    content = load_file(host.weights)
    save_file({name: tensor + 1 for name, tensor in content.items()}, host.weights)
    os.utime(host.weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = host.answer()
    assert host.weights.stat().st_size == before.st_size
    assert not torch.equal(first, second)
    assert torch.equal(second, host.expected())
    assert len(host.files) == 2


def test_the_hash_of_an_old_checkpoint_is_remembered(host: Host, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.model.cpu.weight_cache._MIN_AGE_NS", 0)
    host.load()
    readable = host.weights.read_bytes()
    monkeypatch.setattr("hashlib.file_digest", None)  # it would be called for every file that is not known
    host.load()
    assert host.num_packed == 1
    host.weights.write_bytes(readable)
    with pytest.raises(TypeError):
        host.load()


def test_the_budget_deletes_what_was_not_used_for_longest(host: Host):
    host.load(half="first")
    size = host.files[0].stat().st_size
    host.cache = WeightCache(host.folder, 3 * size)
    host.load(half="second")
    for seconds, half in enumerate(("first", "second")):
        (file,) = [file for file in host.files if file.name.startswith(half)]
        os.utime(file, (seconds, seconds))
    host.load(half="first")  # now the second is the oldest
    host.load(half="third")
    assert [file.name.partition("-")[0] for file in host.files] == ["first", "third"]


def test_a_file_beyond_the_budget_is_not_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    host = Host(tmp_path, max_bytes=100_000)
    assert torch.equal(host.answer(), host.expected())
    assert "do not fit" in caplog.text
    assert not host.files
    assert not list(host.folder.glob(".*.part"))


def test_no_budget_means_no_folder(tmp_path: Path):
    host = Host(tmp_path, max_bytes=0)
    assert torch.equal(host.answer(), host.expected())
    assert not host.folder.exists()


def test_workers_that_start_together_pack_once(host: Host):
    expected = host.expected()
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(host.answer())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert host.num_packed == 1
    assert len(host.files) == 1
    assert len(answers) == 3
    assert all(torch.equal(answer, expected) for answer in answers)
    assert not list(host.folder.glob(".*.lock"))


def test_a_file_that_does_not_fit_the_model_is_packed_again(host: Host, caplog: pytest.LogCaptureFixture):
    expected = host.answer()

    def is_linear(module: nn.Module) -> bool:
        return isinstance(module, nn.Linear) and not module.weight.is_meta

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cluster.model.cpu.modules.is_linear", is_linear)  # it finds nothing to replace
        assert torch.equal(host.answer(), expected)
    assert "is not used" in caplog.text
    assert host.num_packed == 2


def test_weights_that_are_mapped_live_as_long_as_the_model(host: Host):
    host.load()
    part = host.load()
    expected = host.expected()
    host.files[0].unlink()
    with torch.inference_mode():
        assert torch.equal(part(torch.arange(7)), expected)
