"""Reads quantised weights as the plain numbers that they stand for: transformers gets a plain checkpoint.

    forget_entries(config)                             transformers' own conversions do not run
    with plain_tensors(files, quantisation, dtype) as tensors:
        check_values(tensors)                          before a weight is converted
        …                                              transformers slices what it needs
    note(model, quantisation)                          for the fingerprint

A plain weight is (code − zero) × scale, in float32, rounded once to the model's dtype. It is computed where
it is sliced, a few rows at a time. A rank that takes a share of the rows reads those rows alone; of a share
of the columns it reads all columns.

Which formats there are, and whether a checkpoint has just the tensors of its format, is decided in
`cluster.config`. Runs on the threads that load the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from cluster.config.weight_formats import MXFP4, MXFP4_GROUP, WORD_BITS, Header, Quantisation, StoredWeight
from cluster.errors import ConfigError
from cluster.model.layers.codes import (
    E2M1,
    EXPONENT_NAN,
    CodeKind,
    Codes,
    as_numbers,
    have_kernels,
    in_words,
    runs_of,
)

# The median of a matrix is about 0.01. Scales that were meant to divide make it 10⁵. There is no lower bound:
# experts that training never used decay to almost nothing.
_LARGEST_MEDIAN = 1.0
_NUM_ROWS = 8  # of each matrix that are looked at
_CHUNK = 1 << 22  # weights that are float32 at once, in each of transformers' threads
_PLAIN_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL",
}  # fmt: skip
Stored = Mapping[str, Any]  # tensors of weight files by name, each read where it is sliced


class DequantisedSlice:
    """A plain matrix that exists where it is sliced, as safetensors' slices do."""

    def __init__(self, weight: StoredWeight, form: Quantisation, tensors: Stored, dtype: torch.dtype):
        self._weight = weight
        self._form = form
        self._tensors = tensors
        self.dtype = dtype

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis, or slices of leading axes."""
        rows, *others = (slice(None),) if index is ... else index
        first, end, _ = rows.indices(self.num_rows)
        plain = torch.empty(end - first, self._width, dtype=self.dtype)
        step = max(_NUM_ROWS, _CHUNK // self._width)
        for start, part in zip(range(first, end, step), plain.split(step), strict=True):
            codes, scales = self._rows(start, start + len(part))
            part.copy_((codes * scales).flatten(1)[:, : self._width])
        return plain[(slice(None), *others)]

    @property
    def num_rows(self) -> int:
        """Outputs of the matrix."""
        return self._weight.shape[0]

    @property
    def scale_rows(self) -> int:
        """Rows that have one scale."""
        return self._weight.block[0]

    def has_codes_of(self, columns: range) -> bool:
        """Whether kernels compute with codes of these columns: all but groups that are no multiples of 16."""
        return have_kernels(runs_of(columns, self._weight.block[1])[1], len(columns))

    def codes(self, name: str, rows: range | None = None, columns: range | None = None) -> Codes:
        """The weight as it is held where kernels compute with it. rows, columns: of it; None: all. Nothing
        else is read. Raises ConfigError, with the name, if a code or a scale is not finite."""
        rows, columns = rows or range(self.num_rows), columns or range(self._width)
        block_rows, group = self._weight.block
        (row_places, scale_rows), (places, group) = runs_of(rows, block_rows), runs_of(columns, group)
        covered = _covered(row_places), _covered(places)
        grid = row_places - covered[0].start, places - covered[1].start
        scales, zeros = self._scales(*covered), None
        is_exponent = scales.dtype == torch.uint8
        are_finite = bool((scales != EXPONENT_NAN).all() if is_exponent else scales.isfinite().all())
        kind = CodeKind.E2M1 if self._form.layout.dtype == "U8" else CodeKind.E4M3
        if self._form.layout.dtype == "I32":
            kind = CodeKind.NIBBLE if self._form.bits == 4 else CodeKind.BYTE
            if self._weight.zeros and not self._form.is_symmetric:
                zeros = self._zeros(*covered).to(torch.uint8)
        parts, step = [], max(_NUM_ROWS, _CHUNK // len(columns))
        for first in range(rows.start, rows.stop, step):
            codes = self._stored(first, min(first + step, rows.stop), columns)
            if kind is CodeKind.E4M3:
                codes = codes.view(torch.uint8)
            is_packed = kind in (CodeKind.NIBBLE, CodeKind.E2M1)
            parts.append(in_words(codes) if is_packed else codes.to(torch.uint8))
        numbers = torch.cat(parts)
        if not are_finite or (kind is CodeKind.E4M3 and ((numbers & 0x7F) == 0x7F).any()):
            self._refuse(f"{name} has weights that are not finite")
        scales, zeros = (None if each is None else each[grid[0]][:, grid[1]] for each in (scales, zeros))
        return Codes(kind, numbers, cast(Tensor, scales), zeros, len(columns), group, scale_rows)

    def check(self) -> None:
        """Raises ConfigError if the values contradict the headers, or if the scales make no plausible
        weights, e.g. if they were inverted. Reads a few rows."""
        weight, tensors = self._weight, self._tensors
        if weight.declared_shape and tensors[weight.declared_shape][:].tolist() != list(weight.shape):
            self._refuse(f"{weight.declared_shape} is not {list(weight.shape)}")
        if weight.groups:
            in_order = torch.arange(weight.shape[1]) // weight.block[1]
            if not torch.equal(tensors[weight.groups][:].long(), in_order):
                self._refuse(f"{weight.groups} does not count its groups in order (desc_act)")
        if weight.zeros and self._form.layout.zeros_are_symmetric_too:
            self._check_zeros()
        codes, scales = self._rows(0, min(_NUM_ROWS, weight.shape[0]))
        magnitudes = (codes.abs() * scales).flatten()  # negative if a scale is
        magnitudes = magnitudes[magnitudes != 0]
        if magnitudes.numel() and not 0 < (median := float(magnitudes.median())) <= _LARGEST_MEDIAN:
            product = " × ".join(filter(None, (weight.codes, weight.scales, weight.factor)))
            self._refuse(f"{product} gives weights of about {median:.1e}: the scales are wrong, or inverted")

    def _check_zeros(self) -> None:
        """A stored 15 means 16 to some readers of GPTQ, 0 to others, and may have spoilt its neighbours."""
        form = self._form
        zeros, largest = self._zeros(), 1 << form.bits
        if form.is_symmetric and not (zeros == largest // 2).all():
            self._refuse(f"{self._weight.zeros} is not symmetric")
        if (zeros == largest).any():
            self._refuse(f"{self._weight.zeros} has zero points that {form.layout.name} cannot hold")

    def _refuse(self, what: str) -> None:
        raise ConfigError(f"{what}; use another export or the unquantised checkpoint", param="model")

    def _rows(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Codes without their zeros [rows, groups, columns of a group] and scales [rows, groups, 1], float32.
        The last group is padded."""
        layout, (block_rows, block_columns) = self._form.layout, self._weight.block
        codes, scales = self._stored(first, end), as_numbers(self._scales())
        codes = E2M1[codes.long()] if layout.dtype == "U8" else codes.float()
        codes = functional.pad(codes, (0, scales.shape[1] * block_columns - codes.shape[1]))
        codes = codes.unflatten(1, (-1, block_columns))
        blocks = torch.arange(first, end) // block_rows
        if layout.dtype == "I32":
            codes -= self._zeros()[blocks].unsqueeze(-1)
        return codes, scales[blocks].unsqueeze(-1)

    def _stored(self, first: int, end: int, columns: range | None = None) -> Tensor:
        """Codes of these rows [rows, columns], in the file's dtype. columns: None: all."""
        layout, words, columns = self._form.layout, self._form.words, columns or range(self._width)
        if layout is MXFP4:
            groups = _covered(runs_of(columns, MXFP4_GROUP)[0])
            packed = self._tensors[self._weight.codes][first:end, groups].flatten(1)
            left = columns.start - groups.start * MXFP4_GROUP
            return _halves(packed)[:, left : left + len(columns)]
        row_step, step = (words, 1) if layout.is_packed_along_rows else (1, words)
        high = slice(first // row_step, -(-end // row_step))
        wide = slice(columns.start // step, -(-columns.stop // step))
        stored = self._tensors[self._weight.codes]
        codes = stored[wide, high].T if layout.is_transposed else stored[high, wide]
        if layout.dtype == "I32":
            codes = self._unpacked(codes, along_rows=layout.is_packed_along_rows)
        elif layout.dtype == "U8":
            codes = _halves(codes)
        low, left = first - high.start * row_step, columns.start - wide.start * step
        return codes[low : low + end - first, left : left + len(columns)]

    def _zeros(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Codes of 0, for each scale [rows of blocks, columns of blocks]; of symmetric codes the middle."""
        form, num_blocks = self._form, self._num_blocks
        if not self._weight.zeros:
            return torch.full(num_blocks, float(1 << form.bits - 1))[rows, columns]
        first, end, _ = rows.indices(num_blocks[0])
        stored, high = self._tensors[self._weight.zeros], slice(first // form.words, -(-end // form.words))
        words = stored[columns, high].T if form.layout.is_transposed else stored[high, columns]
        low = first - high.start * form.words
        codes = self._unpacked(words, along_rows=True)[low : low + end - first]
        return (codes + form.layout.zero_offset).float()

    def _unpacked(self, words: Tensor, *, along_rows: bool) -> Tensor:
        form = self._form
        places = form.layout.places if form.bits == WORD_BITS // 8 else range(form.words)
        shifts = torch.tensor(places, dtype=torch.int32) * form.bits
        if along_rows:
            return (words.unsqueeze(1) >> shifts[:, None] & (1 << form.bits) - 1).flatten(0, 1)
        return (words.unsqueeze(-1) >> shifts & (1 << form.bits) - 1).flatten(1)

    @property
    def _num_blocks(self) -> tuple[int, int]:
        rows, columns = (-(-n // b) for n, b in zip(self._weight.shape, self._weight.block, strict=True))
        return rows, columns

    def _scales(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor:
        """Returns [rows of blocks, columns of blocks], in the file's dtype; with a factor in float32, times
        that."""
        scales = self._grid(rows, columns)
        if not self._weight.factor:
            return scales
        factor = self._tensors[self._weight.factor][...]
        return scales.float() / factor if self._form.layout.factor_divides else scales.float() * factor

    def _grid(self, rows: slice, columns: slice) -> Tensor:
        stored, (num_rows, num_columns) = self._tensors[self._weight.scales], self._num_blocks
        if num_columns > 1:
            return stored[columns, rows].T if self._form.layout.is_transposed else stored[rows, columns]
        if num_rows == 1 or self._form.layout.is_transposed:
            return stored[...].reshape(num_rows, 1)[rows, columns]
        return stored[rows].reshape(-1, 1)[:, columns]  # one for a row, with or without a second axis

    @property
    def _width(self) -> int:
        return self._weight.shape[1]


class FusedSlice:
    """The matrices of a layer's experts in one tensor, as plain weights that exist where they are sliced:
    [experts, rows, columns] in the file's order, or turned, [experts, columns, rows]."""

    def __init__(
        self, weight: StoredWeight, form: Quantisation, tensors: Stored, dtype: torch.dtype, *,
        is_turned: bool = False,
    ):  # fmt: skip
        self._weight, self._form, self._tensors, self.dtype = weight, form, tensors, dtype
        self._is_turned = is_turned

    def turned(self) -> FusedSlice:
        return FusedSlice(
            self._weight, self._form, self._tensors, self.dtype, is_turned=not self._is_turned
        )  # fmt: skip

    def get_shape(self) -> list[int]:
        experts, rows, columns = self._weight.shape
        return [experts, columns, rows] if self._is_turned else [experts, rows, columns]

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis, or slices of leading axes."""
        index = (*(() if index is ... else index), *3 * (slice(None),))[:3]
        sizes = [len(range(*each.indices(size))) for each, size in zip(index, self.get_shape(), strict=True)]
        plain = torch.empty(sizes, dtype=self.dtype)
        targets, part = (plain.transpose(1, 2), index[:0:-1]) if self._is_turned else (plain, index[1:])
        for matrix, target in zip(self._matrices(index[0]), targets, strict=True):
            target.copy_(matrix[part])
        return plain

    def matrices(self, *, columns_first: bool = False) -> list[DequantisedSlice]:
        """Returns the matrix of each expert, with outputs as rows. columns_first: this weight has them as its
        last axis."""
        return self._matrices(slice(None), is_transposed=columns_first != self._is_turned)

    def check(self) -> None:
        """As `DequantisedSlice.check`, of each matrix."""
        for matrix in self._matrices(slice(None)):
            matrix.check()

    def _matrices(self, experts: slice, *, is_transposed: bool = False) -> list[DequantisedSlice]:
        """is_transposed: the file has columns first."""
        weight, form = self._weight, self._form
        (num_experts, *shape), block = weight.shape, weight.block
        if is_transposed:
            shape, block = shape[::-1], block[::-1]
            form = replace(form, layout=replace(form.layout, is_transposed=True))
        matrix = weight._replace(shape=tuple(shape), block=block)
        names = (weight.codes, weight.scales)
        return [
            DequantisedSlice(
                matrix, form, {name: _OfExpert(self._tensors[name], expert) for name in names}, self.dtype
            )
            for expert in range(*experts.indices(num_experts))
        ]


@dataclass(frozen=True)
class _OfExpert:
    """Sliced as the matrix of one expert."""

    stored: Any
    expert: int

    def __getitem__(self, index: Any) -> Tensor:
        axes = () if index is ... else index if isinstance(index, tuple) else (index,)
        return self.stored[(slice(self.expert, self.expert + 1), *axes)][0]


def _halves(packed: Tensor) -> Tensor:
    """[rows, bytes] → [rows, 2 × bytes]: the lower four bits of a byte, then the upper ones."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _covered(places: Tensor) -> slice:
    """places: ascending."""
    return slice(int(places[0]), int(places[-1]) + 1)


def read_pickled_headers(folder: Path) -> dict[str, Header]:
    """The headers of all tensors of a checkpoint without safetensors. Raises ConfigError for a file that is
    no plain state dict."""
    headers = {}
    for file in sorted(folder.glob("pytorch_model*.bin")):
        try:
            tensors = torch.load(file, map_location="meta", weights_only=True)
            headers |= {
                name: Header(_PLAIN_DTYPES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
                for name, tensor in tensors.items()
            }
        except Exception as error:  # of the unpickler, which reads what the file says
            raise ConfigError(f"cannot read {file}: {error}", param="model") from error
    return headers


def forget_entries(config: PreTrainedConfig) -> None:
    """Removes all entries from the configuration, so that transformers loads plain weights."""
    for part in _parts(config):
        part.__dict__.pop("quantization_config", None)


@contextmanager
def plain_tensors(files: Sequence[Path], form: Quantisation, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """All tensors of the plain checkpoint, by its names. Nothing is read before it is sliced."""
    with ExitStack() as opened:
        tensors: dict[str, Any] = {}
        for file in files:
            reader = opened.enter_context(safe_open(file, framework="pt"))
            tensors |= {name: reader.get_slice(name) for name in reader.offset_keys()}
        replaced = set(form.replaced)
        plain = {name: tensor for name, tensor in tensors.items() if name not in replaced}
        for name, weight in form.weights.items():
            if len(weight.shape) == 2:
                plain[name] = DequantisedSlice(weight, form, tensors, dtype)
            else:  # MXFP4 has rows first, and the one model type that has it has columns first
                plain[name] = FusedSlice(weight, form, tensors, dtype, is_turned=form.layout is MXFP4)
        try:
            yield plain
        finally:
            plain.clear()


def check_values(tensors: Mapping[str, Any]) -> None:
    """Raises ConfigError for a weight whose values contradict the headers, or are not plausible."""
    for tensor in tensors.values():
        if isinstance(tensor, DequantisedSlice | FusedSlice):
            tensor.check()


def note(model: PreTrainedModel, form: Quantisation) -> None:
    """Notes the format in the model's configuration, and with that in its fingerprint: weights that were
    dequantised are not those that were quantised."""
    model.config.dequantised_from = dict(form.entry)


def _parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _parts(value)
