"""How the mixers of hybrid models (gated delta rule, Mamba 2, short convolution) are divided over ranks.

A rank's mixer is one with fewer heads, groups or channels. It projects all tokens on its own heads, keeps the
states of these, and gives a part of the output; the parts are summed once a step. So a rank's states are its
share of a state, and all ranks need the same number of blocks for one. If there are fewer KV heads than
ranks, several ranks have the same one.

transformers divides none of these mixers: its plans either leave them whole or gather what the ranks project.
Their linears are taken out of the plans, and the tensors that are read for them are a rank's pieces:

1. `divide`: the model on the meta device gets small parameters. What cannot be divided is refused by name.
2. `of_rank`: of the checkpoint's tensors, pieces take the place of those of mixers.
3. `settle`: once the weights are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from cluster.config.ranks import check_mixers, refuse_mixers
from cluster.errors import ConfigError
from cluster.model.sharding import name_in_plan

_PIECE = "rank_piece"  # attribute of linears


@dataclass(frozen=True)
class RowRun:
    """Successive rows of a matrix, all of one kind, e.g. the keys of a projection of queries, keys and
    values."""

    size: int
    num_copies: int = 1  # so many successive ranks have the same of them


@dataclass(frozen=True)
class Cut:
    """A tensor's axis of `sum of the parts` rows, of which a rank has a piece of every part."""

    parts: tuple[RowRun, ...]
    is_last: bool = False  # the last axis; else the first one of this size

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    def axis_of(self, shape: Sequence[int]) -> int:
        return len(shape) - 1 if self.is_last else list(shape).index(self.size)

    def ranges(self, rank: int, num_ranks: int) -> list[slice]:
        """The rank's rows."""
        starts = accumulate((part.size for part in self.parts), initial=0)
        found = []
        for part, start in zip(self.parts, starts, strict=False):
            own = part.size * part.num_copies // num_ranks
            first = start + rank // part.num_copies * own
            found.append(slice(first, first + own))
        return found

    def of_stored(self, shape: Sequence[int]) -> Cut:
        """Returns the cut of a stored tensor, which may be one of the parts: transformers joins them."""
        if self.is_last or self.size in shape:
            return self
        part = next((part for part in self.parts if part.size == shape[0]), None)
        if part is None:
            raise ConfigError(
                f"a mixer's tensor of shape {list(shape)} is in no form that ranks can share", param="model"
            )
        return Cut((part,))


@dataclass(frozen=True)
class RankPiece:
    """A rank's rows or columns of a tensor."""

    cut: Cut
    rank: int
    num_ranks: int

    def shape_of(self, whole: Sequence[int]) -> list[int]:
        """whole: the shape of all ranks' tensor."""
        shape, ranges = list(whole), self.cut.ranges(self.rank, self.num_ranks)
        shape[self.cut.axis_of(whole)] = sum(own.stop - own.start for own in ranges)
        return shape

    def of(self, whole: Any, shape: Sequence[int]) -> Tensor:
        """whole: a tensor, or what reads one where it is sliced."""
        axis, ranges = self.cut.axis_of(shape), self.cut.ranges(self.rank, self.num_ranks)
        return torch.cat([whole[(*(slice(None),) * axis, own)] for own in ranges], axis)

    def columns_of(self, whole: Tensor) -> Tensor:
        """whole [..., inputs of all ranks] → [..., of this one]."""
        return self._cut(whole) if self.cut.is_last else whole

    def rows_of(self, whole: Tensor) -> Tensor:
        """whole [..., outputs of all ranks] → [..., of this one]."""
        return whole if self.cut.is_last else self._cut(whole)

    def _cut(self, whole: Tensor) -> Tensor:
        return torch.cat([whole[..., own] for own in self.cut.ranges(self.rank, self.num_ranks)], -1)


def piece_of(linear: nn.Module) -> RankPiece | None:
    """Which piece of a linear this rank has, if it was divided here; None: it is whole, or transformers has
    divided it."""
    return getattr(linear, _PIECE, None)


def keep_piece(linear: nn.Module, made: nn.Module) -> None:
    """Notes that `made` is the same piece of a linear as `linear`, whose place it takes."""
    if (piece := piece_of(linear)) is not None:
        setattr(made, _PIECE, piece)


def whole_shape(linear: nn.Linear) -> tuple[int, int]:
    """Inputs and outputs; of all ranks, where it was divided here."""
    inputs, outputs = linear.in_features, linear.out_features
    if (piece := piece_of(linear)) is None:
        return inputs, outputs
    return (piece.cut.size, outputs) if piece.cut.is_last else (inputs, piece.cut.size)


@dataclass(frozen=True)
class MixerForm:
    """What is divided in a mixer. Names of attributes and parameters that it does not have are left out."""

    heads: Mapping[str, int]  # by what they are called in messages; ranks have equal numbers of them
    own: Mapping[str, int]  # attributes, as a rank's mixer has them
    rows: Mapping[str, Sequence[RowRun]]  # of linears and convolutions, with their biases; of others
    output: str  # the last linear: a rank has columns
    norm_size: int = 0  # of the gated norm, if it spans the heads of all ranks; else 0


class PieceSlice:
    """A rank's piece of a stored tensor, read where it is sliced."""

    def __init__(self, stored: Any, piece: RankPiece):
        self._stored, self._piece = stored, piece

    def get_shape(self) -> list[int]:
        return self._piece.shape_of(self._stored.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        """index: an ellipsis."""
        if index is not ...:
            raise TypeError("a rank's piece of a mixer is read as a whole")
        return self._piece.of(self._stored, self._stored.get_shape())


class MixerShares:
    """The mixers of one rank's share of a model."""

    def __init__(self, rank: int, num_ranks: int):
        self._rank, self._num_ranks = rank, num_ranks
        self._cuts: dict[str, Cut] = {}  # by name of a parameter or buffer of the model
        self._mixers: list[tuple[nn.Module, MixerForm]] = []
        self._insides: list[str] = []  # beginnings of the names of what transformers does not divide

    def divide(self, model: PreTrainedModel) -> None:
        """model: on the meta device. Raises ConfigError if its mixers cannot be divided."""
        for name, mixer in list(model.named_modules()):
            form_of = _FORMS.get(type(mixer).__name__)
            if form_of is None:
                continue
            form = form_of(mixer, self._num_ranks)
            check_mixers(model.config.model_type, form.heads, self._num_ranks)
            self._divide(name, mixer, form)
        for name, module in model.named_modules():
            if isinstance(getattr(module, "k_proj", None), nn.Linear):
                self._copy_kv_heads(name, module, model.tp_plan.get(name_in_plan(f"{name}.k_proj")))
        if not self._mixers:
            refuse_mixers(model.config.model_type)

    def outside(self, names: Iterable[str]) -> list[str]:
        """Those of the names of modules and parameters that transformers divides by its plans."""
        return [name for name in names if not name.startswith(tuple(self._insides))]

    def of_rank(self, tensors: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
        """tensors: by their names in the checkpoint. names: those in the model of the ones that are read."""
        found = dict(tensors)
        for stored_name, name in names.items():
            if (cut := self._cuts.get(name)) is not None:
                stored = tensors[stored_name]
                found[stored_name] = PieceSlice(stored, self._piece(cut.of_stored(stored.get_shape())))
        return found

    @torch.no_grad()
    def settle(self) -> None:
        """Cuts what transformers has made without reading it; a bias that all ranks would add is left to the
        first one. From now on outputs are summed."""
        for mixer, form in self._mixers:
            for name, buffer in list(mixer.named_buffers()):
                if name in form.rows:
                    own = self._piece(Cut(tuple(form.rows[name]))).of(buffer, buffer.shape)
                    mixer.register_buffer(name, own, persistent=False)
            bias = mixer.get_submodule(form.output).bias
            if isinstance(bias, Tensor) and self._rank:
                bias.zero_()
            if form.norm_size:
                mixer.norm = SpanningNorm(mixer.norm, form.norm_size)
            mixer.register_forward_hook(_summed)

    def _copy_kv_heads(self, name: str, attention: Any, way: str | None) -> None:
        """If a plan divides the keys by heads and there are fewer than ranks, several ranks have the same."""
        if way != "colwise" or f"{name}." in self._insides:
            return
        num_heads = attention.k_proj.out_features // attention.head_dim
        if num_heads >= self._num_ranks:
            return
        num_copies = self._num_ranks // num_heads
        attention.num_key_value_groups //= num_copies
        for path in ("k_proj", "v_proj"):
            linear = attention.get_submodule(path)
            cut = Cut((RowRun(linear.out_features, num_copies),))
            for leaf, parameter in list(linear.named_parameters()):
                self._cuts[f"{name}.{path}.{leaf}"] = cut
                self._shrink(linear, leaf, parameter, cut)
            self._insides.append(f"{name}.{path}")

    def _divide(self, name: str, mixer: nn.Module, form: MixerForm) -> None:
        for path, number in form.own.items():
            owner, _, leaf = path.rpartition(".")
            setattr(mixer.get_submodule(owner), leaf, number)
        for path, parameter in list(mixer.named_parameters()):
            owner, _, leaf = path.rpartition(".")
            if path == f"{form.output}.weight":
                cut = Cut((RowRun(parameter.shape[-1]),), is_last=True)
            elif parts := form.rows.get(path, form.rows.get(owner, ())):
                cut = Cut(tuple(parts))
            else:
                continue
            self._cuts[f"{name}.{path}"] = cut
            self._shrink(mixer.get_submodule(owner), leaf, parameter, cut)
        self._mixers.append((mixer, form))
        self._insides.append(f"{name}.")

    def _shrink(self, module: nn.Module, leaf: str, parameter: nn.Parameter, cut: Cut) -> None:
        piece = self._piece(cut)
        shape = piece.shape_of(parameter.shape)
        size = shape[cut.axis_of(parameter.shape)]
        setattr(module, leaf, nn.Parameter(parameter.new_empty(shape), requires_grad=False))
        if isinstance(module, nn.Linear):
            setattr(module, "in_features" if cut.is_last else "out_features", size)
            if leaf == "weight":
                setattr(module, _PIECE, piece)
        elif isinstance(module, nn.Conv1d):
            module.in_channels = module.out_channels = module.groups = size

    def _piece(self, cut: Cut) -> RankPiece:
        return RankPiece(cut, self._rank, self._num_ranks)


class SpanningNorm(nn.Module):
    """A gated root mean square norm over the values of all ranks: each has `weight` for its own."""

    def __init__(self, norm: nn.Module, size: int):
        """norm: transformers', with this rank's weight. size: over all ranks."""
        super().__init__()
        self.weight, self._eps, self._size = norm.weight, float(norm.variance_epsilon), size
        self._gate_is_last: bool = getattr(norm, "norm_before_gate", False)

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """Both [..., values of this rank] → the same."""
        dtype, rows, gate = hidden_states.dtype, hidden_states.float(), functional.silu(gate.float())
        if not self._gate_is_last:
            rows = rows * gate
        squares = rows.square().sum(-1, keepdim=True)
        dist.all_reduce(squares)
        rows = rows * torch.rsqrt(squares / self._size + self._eps)
        if self._gate_is_last:
            return (self.weight * rows * gate).to(dtype)
        return self.weight * rows.to(dtype)


def _summed(_mixer: nn.Module, _args: object, output: Tensor) -> Tensor:
    """[1, T, hidden_size]: the parts of all ranks, in place."""
    dist.all_reduce(output)
    return output


def _shares(mixer: nn.Module, num_ranks: int, *paths: str) -> dict[str, int]:
    """Returns the shares of those attributes that the mixer has."""
    found = {}
    for path in paths:
        owner, _, leaf = path.rpartition(".")
        if (whole := getattr(mixer.get_submodule(owner), leaf, None)) is not None:
            found[path] = whole // num_ranks
    return found


def _gated_delta(mixer: Any, num_ranks: int) -> MixerForm:
    key, value, num_values = RowRun(mixer.key_dim), RowRun(mixer.value_dim), RowRun(mixer.num_v_heads)
    of_values = dict.fromkeys(("in_proj_z", "v_proj", "g_proj"), (value,))
    of_heads = dict.fromkeys(
        ("in_proj_b", "in_proj_a", "b_proj", "a_proj", "dt_bias", "A_log"), (num_values,)
    )
    # one key head after the other, each with its queries, keys, values and gates
    by_key_heads = {
        "in_proj_qkvz": (RowRun(2 * (mixer.key_dim + mixer.value_dim)),),
        "in_proj_ba": (RowRun(2 * mixer.num_v_heads),),
    }
    return MixerForm(
        heads={"key heads": mixer.num_k_heads, "value heads": mixer.num_v_heads},
        own=_shares(
            mixer, num_ranks, "num_k_heads", "num_v_heads", "key_dim", "value_dim", "conv_dim"
        ),
        rows={
            **dict.fromkeys(("in_proj_qkv", "conv1d"), (key, key, value)),
            **dict.fromkeys(("q_proj", "k_proj"), (key,)),
            **of_values, **of_heads, **by_key_heads,
        },
        output="o_proj" if hasattr(mixer, "o_proj") else "out_proj",
    )  # fmt: skip


def _kimi_delta(mixer: Any, num_ranks: int) -> MixerForm:
    one, num_heads = RowRun(mixer.qkv_dim), RowRun(mixer.num_heads)
    projections = ("q_proj", "k_proj", "v_proj", "g_proj", "g_b_proj")
    gates = ("forget_gate.f_b_proj", "forget_gate.f_proj", "forget_gate.dt_bias")
    return MixerForm(
        heads={"heads": mixer.num_heads},
        own=_shares(
            mixer, num_ranks, "num_heads", "qkv_dim", "conv_dim", "forget_gate.num_heads",
            "forget_gate.qkv_dim",
        ),
        rows={
            "conv1d": (one, one, one),
            **dict.fromkeys((*projections, *gates), (one,)),
            **dict.fromkeys(("b_proj", "forget_gate.A_log"), (num_heads,)),
        },
        output="o_proj",
    )  # fmt: skip


def _mamba(mixer: Any, num_ranks: int) -> MixerForm:
    """All heads may share one group: each rank then has all of it, and the norm spans all ranks."""
    is_shared = mixer.n_groups == 1
    inner, num_heads = RowRun(mixer.intermediate_size), RowRun(mixer.num_heads)
    group = RowRun(mixer.n_groups * mixer.ssm_state_size, num_ranks if is_shared else 1)
    has_norm = not isinstance(mixer.norm, nn.Identity)
    own = _shares(mixer, num_ranks, "num_heads", "intermediate_size")
    if not is_shared:
        own |= _shares(mixer, num_ranks, "n_groups", "norm.n_groups", "groups_time_state_size")
    own_group = group.size if is_shared else group.size // num_ranks
    own["conv_dim"] = own["intermediate_size"] + 2 * own_group
    return MixerForm(
        heads={"heads": mixer.num_heads} | ({} if is_shared else {"groups": mixer.n_groups}),
        own=own,
        rows={
            **dict.fromkeys(("in_proj", "mup_vector"), (inner, inner, group, group, num_heads)),
            "conv1d": (inner, group, group),
            "norm": (inner,),
            **dict.fromkeys(("dt_bias", "A_log", "D"), (num_heads,)),
        },
        output="out_proj",
        norm_size=mixer.intermediate_size if is_shared and has_norm else 0,
    )


def _short_convolution(mixer: Any, _num_ranks: int) -> MixerForm:
    channels = RowRun(mixer.conv.in_channels)
    return MixerForm(
        heads={"channels": channels.size},
        own={},
        rows={"in_proj": (channels, channels, channels), "conv": (channels,)},
        output="out_proj",
    )


# By the names of transformers' classes
_FORMS: Mapping[str, Callable[[Any, int], MixerForm]] = {
    **dict.fromkeys(
        (
            "Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet",
            "OlmoHybridGatedDeltaNet",
        ),
        _gated_delta,
    ),
    **dict.fromkeys(("KimiLinearDeltaAttention", "BailingHybridDeltaAttention"), _kimi_delta),
    **dict.fromkeys(
        ("BambaMixer", "FalconH1Mixer", "GraniteMoeHybridMambaLayer", "NemotronHMamba2Mixer"), _mamba
    ),
    **dict.fromkeys(("Lfm2ShortConv", "Lfm2MoeShortConv", "Lfm3ShortConv"), _short_convolution),
}  # fmt: skip
