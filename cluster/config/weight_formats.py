"""The formats in which a checkpoint may hold matrices that are served as plain numbers. No torch.

A `WeightLayout` says which tensors a module has instead of its weight, and how its codes lie in them.
`read_entry` makes a `Quantisation` of what the configuration declares, and `Quantisation.stored` finds the
tensors of one matrix. The arithmetic is in `cluster.model.dequantising`: (code − zero) × scale, for every
format.

A new format is a `WeightLayout` and a reader of its entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

PLAIN = ("F64", "F32", "F16", "BF16")
MXFP4_GROUP, NVFP4_GROUP = 32, 16  # weights of one scale, two in a byte
WORD_BITS = 32
KV_SCALES = ("k_scale", "v_scale")

_FUSED_EXPERTS = (".experts.gate_up_proj", ".experts.up_proj", ".experts.down_proj")


class NotServed(Exception):
    """The reason why a declared format is not served."""


class Unexplained(Exception):
    """The reason why tensors are not what the format says."""


class Header(NamedTuple):
    dtype: str  # as safetensors writes it
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightLayout:
    """The tensors of a module, by what follows its name. A plain weight is [rows, columns]; the matrices of
    experts in one tensor are [experts, rows, columns]."""

    name: str
    plain: str = ".weight"
    codes: str = ".weight"
    scales: str = ".weight_scale"
    zeros: str = ""  # codes that stand for 0, one for each scale, packed along rows; empty: there are none
    groups: str = ""  # index of each column's scale
    shape: str = ""  # of the plain weight
    factor: str = ""  # the scale of all scales of a matrix
    unused: tuple[str, ...] = ()  # scales of activations, which are never rounded
    fused: WeightLayout | None = None  # the same of experts in one tensor, which is a parameter by itself
    dtype: str = "F8_E4M3"  # of codes; I32: several codes in a word; U8: two floats of 4 bits in a byte
    scale_dtypes: tuple[str, ...] = PLAIN
    factor_divides: bool = False  # instead of multiplying
    is_packed_along_rows: bool = False
    is_transposed: bool = False  # codes, scales and zeros are stored with columns first
    zeros_are_symmetric_too: bool = False  # tensors of zeros exist in symmetric checkpoints, too
    places: tuple[int, ...] = tuple(range(8))  # where in its word the n-th code stands
    zero_offset: int = 0  # to add to a stored zero

    def __str__(self) -> str:
        *most, last = self._parts
        return f"{', '.join(most)} and {last}"

    def find(self, name: str) -> tuple[WeightLayout, str] | None:
        """The layout of a tensor, this one or that of experts, and the tensor's module; None: the format has
        no such tensor."""
        if part := next((part for part in self._parts if name.endswith(part)), None):
            return self, name.removesuffix(part)
        if self.fused is None:
            return None
        ends = (*self.fused._parts, self.fused.codes)
        stems = (name.removesuffix(end) for end in ends if name.endswith(end))
        return next(((self.fused, stem) for stem in stems if stem.endswith(_FUSED_EXPERTS)), None)

    @property
    def _parts(self) -> tuple[str, ...]:
        parts = (self.codes, self.scales, self.zeros, self.groups, self.shape, self.factor, *self.unused)
        return tuple(filter(None, parts))


FP8 = WeightLayout(
    "fp8", scales=".weight_scale_inv", unused=(".activation_scale",),
    fused=WeightLayout("fp8", plain="", codes="", scales="_scale_inv", unused=("_activation_scale",)),
)  # fmt: skip
MXFP4 = WeightLayout(
    "MXFP4", plain="", codes="_blocks", scales="_scales", dtype="U8", scale_dtypes=("U8",)
)  # fmt: skip
COMPRESSED_MXFP4 = WeightLayout(
    "compressed-tensors MXFP4", codes=".weight_packed", unused=(".input_global_scale",), dtype="U8",
    scale_dtypes=("U8",),
)  # fmt: skip
NVFP4 = WeightLayout(
    "modelopt NVFP4", factor=".weight_scale_2", unused=(".input_scale",), dtype="U8",
    scale_dtypes=("F8_E4M3",),
)  # fmt: skip
COMPRESSED_NVFP4 = WeightLayout(
    "compressed-tensors NVFP4", codes=".weight_packed", factor=".weight_global_scale", factor_divides=True,
    unused=(".input_global_scale",), dtype="U8", scale_dtypes=("F8_E4M3",),
)  # fmt: skip
COMPRESSED_FP8 = WeightLayout("compressed-tensors FP8", unused=(".input_scale", ".output_scale"))
MODELOPT_FP8 = WeightLayout("modelopt FP8", unused=(".input_scale",))
COMPRESSED_INTEGERS = WeightLayout(
    "compressed-tensors weights", codes=".weight_packed", zeros=".weight_zero_point", shape=".weight_shape",
    dtype="I32",
)  # fmt: skip
AWQ = WeightLayout(
    "AWQ", codes=".qweight", scales=".scales", zeros=".qzeros", dtype="I32", is_packed_along_rows=True,
    is_transposed=True, zeros_are_symmetric_too=True, places=(0, 4, 1, 5, 2, 6, 3, 7),
)  # fmt: skip
GPTQ_V2 = WeightLayout(
    "GPTQ v2", codes=".qweight", scales=".scales", zeros=".qzeros", groups=".g_idx", dtype="I32",
    is_transposed=True, zeros_are_symmetric_too=True,
)  # fmt: skip
GPTQ = replace(GPTQ_V2, name="GPTQ", zero_offset=1)


class StoredWeight(NamedTuple):
    """A matrix of the checkpoint, or those of a layer's experts: names of its tensors, and what it is when it
    is plain."""

    shape: tuple[int, ...]  # [rows, columns] of the codes; [experts, rows, columns] if there are several
    block: tuple[int, int]  # rows and columns of a matrix that have one scale
    codes: str
    scales: str
    zeros: str = ""  # empty: there are none
    groups: str = ""
    declared_shape: str = ""  # a tensor that must hold `shape`
    factor: str = ""


@dataclass(frozen=True)
class Quantisation:
    """A format that is served, and the tensors that it explains. Two are equal if they say the same."""

    layout: WeightLayout
    entry: Mapping[str, Any] = field(compare=False)  # as the configuration has it
    block: tuple[int, int] = (0, 0)  # rows and columns of a weight that have one scale; 0: all
    bits: int = 8
    is_symmetric: bool = True
    weights: Mapping[str, StoredWeight] = field(default_factory=dict, compare=False)  # by the plain name
    unused: frozenset[str] = field(default=frozenset(), compare=False)  # scales of activations and of KV

    def __str__(self) -> str:
        rows, columns = self.block
        if self.layout.dtype == "U8":
            return self.layout.name
        name = f"{self.bits} bit {self.layout.name}" if self.layout.dtype == "I32" else self.layout.name
        if not columns:
            return f"{name} with one scale for a {'row' if rows else 'matrix'}"
        return f"{name} in {f'groups of {columns}' if rows == 1 else f'blocks of {rows} × {columns}'}"

    @property
    def words(self) -> int:
        """Codes in one number of the file."""
        return {"I32": WORD_BITS // self.bits, "U8": 2}.get(self.layout.dtype, 1)

    @property
    def has_zeros(self) -> bool:
        return bool(self.layout.zeros) and (self.layout.zeros_are_symmetric_too or not self.is_symmetric)

    @property
    def replaced(self) -> Iterator[str]:
        """Names of all tensors that the plain checkpoint has not."""
        for stored in self.weights.values():
            yield from filter(None, stored[2:])
        yield from self.unused

    def stored(
        self, stem: str, headers: Mapping[str, Header], layout: WeightLayout | None = None
    ) -> tuple[str, StoredWeight]:
        """The plain name and the tensors of one module. layout: of experts in one tensor; None: the format's
        own. Raises Unexplained."""
        layout = layout or self.layout
        codes, scales = stem + layout.codes, stem + layout.scales
        zeros = stem + layout.zeros if self.has_zeros else ""
        groups = stem + layout.groups if layout.groups else ""
        declared_shape = stem + layout.shape if layout.shape else ""
        factor = stem + layout.factor if layout.factor else ""
        plain = stem + layout.plain
        if layout is MXFP4 and not stem.endswith(_FUSED_EXPERTS):
            raise Unexplained("only blocks and scales of experts are known")
        for part in filter(None, (codes, scales, zeros, groups, declared_shape, factor)):
            if part not in headers:
                raise Unexplained(f"{part} is missing")
        if plain != codes and plain in headers:
            raise Unexplained(f"{plain} is there, too")
        _check_dtypes(headers, {
            codes: (layout.dtype,), scales: layout.scale_dtypes, zeros: ("I32",), groups: ("I32",),
            declared_shape: ("I64",), factor: ("F32",),
        })  # fmt: skip
        shape = self._plain_shape(headers[codes].shape)
        block = self.block[0] or shape[-2], self.block[1] or shape[-1]
        stored = StoredWeight(shape, block, codes, scales, zeros, groups, declared_shape, factor)
        self._check_shapes(stored, headers)
        return plain, stored

    def _plain_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        if self.layout is MXFP4 and len(codes) == 4 and codes[3] == MXFP4_GROUP // 2:
            return codes[0], codes[1], codes[2] * MXFP4_GROUP
        if self.layout is FP8 and len(codes) == 3 and 0 not in codes:
            if self.block[0] != self.block[1]:  # rows of which a file holds as columns in some families
                raise Unexplained("experts in one tensor are known with square blocks only")
            return codes
        if self.layout is MXFP4 or len(codes) != 2 or 0 in codes:
            raise Unexplained(f"codes of {list(codes)} are no matrix")
        rows, columns = reversed(codes) if self.layout.is_transposed else codes
        if self.layout.is_packed_along_rows:
            return rows * self.words, columns
        return rows, columns * self.words

    def _check_shapes(self, stored: StoredWeight, headers: Mapping[str, Header]) -> None:
        grid: tuple[int, ...] = tuple(
            -(-size // block) for size, block in zip(stored.shape[-2:], stored.block, strict=True)
        )
        if len(stored.shape) == 3:
            allowed = [(stored.shape[0], *grid)]
        else:
            allowed = [grid[::-1] if self.layout.is_transposed else grid]
            allowed += [grid[:1]] if not self.block[1] else []  # one scale for a row, or for all rows
            allowed += [()] if self.block == (0, 0) else []
        if (found := headers[stored.scales].shape) not in allowed:
            raise Unexplained(f"scales {list(found)} do not fit a weight of {list(stored.shape)}")
        rows_of_zeros = -(-grid[0] // self.words)
        zeros = (grid[1], rows_of_zeros) if self.layout.is_transposed else (rows_of_zeros, grid[1])
        if stored.zeros and (found := headers[stored.zeros].shape) != zeros:
            raise Unexplained(f"zero points {list(found)} do not fit a weight of {list(stored.shape)}")
        if stored.groups and (found := headers[stored.groups].shape) != stored.shape[1:]:
            raise Unexplained(f"{stored.groups} {list(found)} does not fit a weight of {list(stored.shape)}")
        if stored.factor and (found := headers[stored.factor].shape) not in ((), (1,)):
            raise Unexplained(f"{stored.factor} {list(found)} is not one number")


def read_entry(method: str, content: Mapping[str, Any], model_type: object) -> Quantisation:
    """What an entry of the configuration declares. Raises NotServed."""
    if method == "mxfp4" and model_type != "gpt_oss":
        raise NotServed("of a model type other than gpt_oss")
    if (read := _READERS.get(method)) is None:
        raise NotServed("")
    return read(content)


def _check_dtypes(headers: Mapping[str, Header], allowed: Mapping[str, tuple[str, ...]]) -> None:
    for name, dtypes in allowed.items():
        if name and (dtype := headers[name].dtype) not in dtypes:
            raise Unexplained(f"{name} is {dtype}")


def _read_fp8(entry: Mapping[str, Any]) -> Quantisation:
    block = entry.get("weight_block_size", (128, 128))
    if block is None:
        return Quantisation(FP8, entry)
    if entry.get("activation_scheme", "dynamic") != "dynamic":
        raise NotServed("with blocks")
    return Quantisation(FP8, entry, _sizes(block))


def _read_mxfp4(entry: Mapping[str, Any]) -> Quantisation:
    return Quantisation(MXFP4, entry, (1, MXFP4_GROUP), bits=4)


def _read_modelopt(entry: Mapping[str, Any]) -> Quantisation:
    match entry.get("quant_algo"):
        case "FP8":
            return Quantisation(MODELOPT_FP8, entry)
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return Quantisation(MODELOPT_FP8, entry, (1, 0))
        case "NVFP4" | "W4A16_NVFP4":
            return Quantisation(NVFP4, entry, (1, NVFP4_GROUP), bits=4)
    raise NotServed("")


def _read_compressed_tensors(entry: Mapping[str, Any]) -> Quantisation:
    found = {_read_group(entry, group) for group in _groups(entry)}
    if len(found) != 1:
        raise NotServed("in several ways" if found else "without config_groups")
    layout, block, bits, is_symmetric = found.pop()
    return Quantisation(layout, entry, block, bits, is_symmetric)


def _groups(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if (_mapping(entry.get("sparsity_config")).get("format") or "dense") != "dense":
        raise NotServed("and sparse")
    if entry.get("transform_config"):
        raise NotServed("with a transform_config")
    groups = [group for group in _mapping(entry.get("config_groups")).values() if group]
    if not all(isinstance(group, Mapping) for group in groups):
        raise NotServed("with a preset")
    return [group for group in groups if group.get("weights")]


def _read_group(
    entry: Mapping[str, Any], group: Mapping[str, Any]
) -> tuple[WeightLayout, tuple[int, int], int, bool]:
    form = group.get("format") or entry.get("format")
    weights = _mapping(group["weights"])
    bits, is_symmetric = weights.get("num_bits", 8), bool(weights.get("symmetric", True))
    kind = weights.get("type", "int")
    if form != entry.get("format") or weights.get("dynamic"):
        raise NotServed("in several ways")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise NotServed("with actorder")
    match weights.get("strategy"):
        case "tensor":
            block = (0, 0)
        case "channel":
            block = (1, 0)
        case "group":
            block = _group_block(weights)
        case "tensor_group" if form == "nvfp4-pack-quantized":
            block = _group_block(weights)
        case "block":
            block = _sizes(weights.get("block_structure"))
        case strategy:
            raise NotServed(f"with strategy {strategy}")
    if form == "float-quantized" and kind == "float" and bits == 8 and is_symmetric:
        return COMPRESSED_FP8, block, 8, True
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        return COMPRESSED_INTEGERS, block, int(bits), is_symmetric
    floats = _COMPRESSED_FLOATS.get(str(form))
    if floats is not None and kind == "float" and bits == 4 and is_symmetric and block == (1, floats[1]):
        return floats[0], block, 4, True
    raise NotServed(f"with weights of {bits} bits ({kind}{'' if is_symmetric else ', asymmetric'})")


_COMPRESSED_FLOATS = {
    "nvfp4-pack-quantized": (COMPRESSED_NVFP4, NVFP4_GROUP),
    "mxfp4-pack-quantized": (COMPRESSED_MXFP4, MXFP4_GROUP),
}


def _read_awq(entry: Mapping[str, Any]) -> Quantisation:
    form = entry.get("version") or entry.get("format") or "gemm"
    if str(form).lower() != "gemm" or entry.get("backend") == "llm-awq":
        raise NotServed(f"in version {form}")
    if entry.get("bits") != 4:
        raise NotServed("with other than 4 bits")
    if entry.get("zero_point", True) is not True:
        raise NotServed("without zero points")
    return Quantisation(AWQ, entry, _group_block(entry), bits=4, is_symmetric=False)


def _read_gptq(entry: Mapping[str, Any]) -> Quantisation:
    form = entry.get("checkpoint_format") or entry.get("format") or "gptq"
    layout = {"gptq": GPTQ, "gptq_v2": GPTQ_V2}.get(str(form))
    if layout is None or entry.get("is_marlin_format") or entry.get("pack_dtype", "int32") != "int32":
        raise NotServed(f"in format {form}")
    if entry.get("desc_act"):
        raise NotServed("with desc_act")
    if any(_mapping(entry.get("dynamic")).values()):
        raise NotServed("in several ways")
    if (bits := entry.get("bits")) not in (4, 8):
        raise NotServed("with other than 4 or 8 bits")
    return Quantisation(layout, entry, _group_block(entry), int(bits), bool(entry.get("sym")))


def _group_block(entry: Mapping[str, Any]) -> tuple[int, int]:
    return (1, 0) if (size := entry.get("group_size")) == -1 else _sizes((1, size))


def _sizes(block: object) -> tuple[int, int]:
    match block:
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return rows, columns
    raise NotServed(f"in blocks or groups of {block}")


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


_READERS: Mapping[str, Callable[[Mapping[str, Any]], Quantisation]] = {
    "fp8": _read_fp8,
    "mxfp4": _read_mxfp4,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed_tensors,
    "awq": _read_awq,
    "gptq": _read_gptq,
}
