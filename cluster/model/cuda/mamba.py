"""Mixers of Mamba 2 by `mamba_kernels` over the pages where their states lie: those of Bamba, Nemotron-H,
Granite and Falcon-H1. All answers of a step are three launches between the products, its longer sequences two
more; Falcon-H1's multipliers are one each. Runs on the engine's thread; enqueues on the current stream and
reads nothing on the host. No GPU has run it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from cluster.model.cuda.delta import is_exact
from cluster.model.cuda.early import early
from cluster.model.cuda.mixer_calls import CHANNEL_TILE, SMALLEST, Convolution, PagedMixer, Pages
from cluster.model.cuda.mixer_chunks import CHUNK
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import is_state_space
from cluster.model.state_step import StatefulForward, StepState

MAX_STATE, MAX_NORM = 256, 32768  # columns of a state, and of a group of the norm, that fit a program
_NUM_FACTORS = 2  # that `mamba_kernels` keeps of a token
# Numbers of a state, of a program; rows of one, of `many_tokens`, its warps and stages, and its programs side
# by side for sequences; heads of `chunk_scores`
_STATE_TILE, _ROW_TILE, _CHUNK_WARPS, _STAGES, _SEQUENCES, _SCORE_HEADS = 4096, 32, 8, 1, 8, 8


@dataclass(frozen=True)
class _GatedNorm:
    """The gated norm. weight None: it gates alone."""

    weight: Tensor | None
    epsilon: float
    is_first: bool
    width: int  # of a group


class PagedMamba(PagedMixer):
    """Mamba 2. Falcon-H1 multiplies its inputs before and after the product."""

    def __init__(self, forward: StatefulForward):
        own = cast(Any, forward.mixer)
        weight: Tensor = own.conv1d.weight
        self._heads, self._width = own.num_heads, own.num_heads * own.head_dim
        conv = Convolution.of_neighbours(own.conv1d, self._width, forward.layout.page_bytes)
        super().__init__(forward, [own.in_proj], conv, own.out_proj)
        self._in_scale: float = getattr(own, "ssm_in_multiplier", 1.0)
        self._scales: Tensor | None = getattr(own, "mup_vector", None)
        self._rates, self._skips = -own.A_log.detach().float().exp(), own.D.detach().float()
        self._shifts = own.dt_bias.detach().to(weight.dtype).float()
        limits = torch.tensor(getattr(own, "time_step_limit", (0.0, float("inf"))))
        self._limits = limits.to(weight.dtype).tolist()
        self._sizes = {
            "GROUPS": own.n_groups, "GROUP": own.num_heads // own.n_groups, "N": own.ssm_state_size,
            "P": own.head_dim,
        }  # fmt: skip
        self._pad = max(SMALLEST, power_of_two(own.ssm_state_size))
        self._time_column = self._width + len(weight)
        self._norm = _norm_of(own.norm, self._width)

    def _projected(self, rows: Tensor) -> Tensor:
        projected = super()._projected(rows if self._in_scale == 1 else rows * self._in_scale)
        return projected if self._scales is None else projected.mul_(self._scales.view(-1))

    def _behind_convolution(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState) -> Tensor:
        out = projected.new_empty(len(projected), self._width)
        self._few(projected, mixed, pages, step, out)
        if not step.tensors.is_decode and len(step.chunks.sequences):
            self._many(projected, mixed, pages, step, out)
        return self._normed(out, projected)

    def _few(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import mamba_kernels

        tile = min(_STATE_TILE // self._pad, power_of_two(self._sizes["P"]))
        mamba_kernels.few_tokens[self._grid(pages.num_spans, tile)](
            projected, mixed, self._rates, self._shifts, self._skips, step.kv.buffer.view(torch.float32),
            pages.source, pages.target, pages.starts, pages.firsts, out, projected.stride(0),
            pages.page_stride, pages.first_page, pages.num_spans, *self._limits, **self._sizes,
            **self._place, N_PAD=self._pad, TILE=tile, T0=self._time_column,
            IS_DECODE=step.tensors.is_decode, num_warps=4, **early(out.device),
        )  # fmt: skip

    def _many(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import mamba_kernels

        chunks = step.chunks
        num_chunks, num_long = len(chunks.spans), len(chunks.sequences)
        groups = self._sizes["GROUPS"]
        scores = projected.new_empty(num_chunks, groups, CHUNK, CHUNK, dtype=torch.float32)
        factors = projected.new_empty(num_chunks, self._heads, _NUM_FACTORS, CHUNK, dtype=torch.float32)
        mamba_kernels.chunk_scores[(num_chunks, -(-self._heads // _SCORE_HEADS))](
            projected, mixed, self._rates, self._shifts, pages.source, pages.starts, pages.firsts,
            chunks.spans, chunks.begins, scores, factors, projected.stride(0), pages.page_stride,
            pages.first_page, pages.num_spans, *self._limits, **self._sizes, T0=self._time_column,
            EXACT=is_exact(projected), HEADS=_SCORE_HEADS, num_warps=4, num_stages=1, **early(out.device),
        )  # fmt: skip
        tile = min(_ROW_TILE, _STATE_TILE // self._pad, max(SMALLEST, power_of_two(self._sizes["P"])))
        mamba_kernels.many_tokens[self._grid(min(num_long, _SEQUENCES), tile)](
            mixed, self._skips, scores, factors, step.kv.buffer.view(torch.float32), pages.source,
            pages.target, pages.starts, pages.firsts, chunks.begins, chunks.sequences, out,
            pages.page_stride, pages.first_page, pages.num_spans, num_long, **self._sizes, **self._place,
            N_PAD=self._pad, TILE=tile, EXACT=is_exact(projected), num_warps=_CHUNK_WARPS, num_stages=_STAGES,
            **early(out.device),
        )  # fmt: skip

    def _normed(self, x: Tensor, projected: Tensor) -> Tensor:
        from cluster.model.cuda import mamba_kernels

        out, norm = torch.empty_like(x), self._norm
        pad = power_of_two(norm.width)
        mamba_kernels.gated_norm[(len(x), -(-self._width // norm.width))](
            x, projected, norm.weight, out, projected.stride(0), norm.epsilon, WIDTH=self._width,
            GROUP_WIDTH=norm.width, PAD=pad, NORM_FIRST=norm.is_first,
            num_warps=min(max(pad // 512, 4), 16), **early(out.device),
        )  # fmt: skip
        return out

    def _grid(self, sequences: int, tile: int) -> tuple[int, int, int]:
        return sequences, self._heads, -(-self._sizes["P"] // tile)


def _norm_of(module: nn.Module, width: int) -> _GatedNorm:
    """Names say how it gates; the comparison of the mixer says whether that is so."""
    own = cast(Any, module)
    if isinstance(module, nn.Identity):
        return _GatedNorm(None, 0.0, False, min(CHANNEL_TILE, width))
    groups = getattr(own, "n_groups", None)
    return _GatedNorm(
        own.weight, own.variance_epsilon, bool(getattr(own, "norm_before_gate", False)),
        width // groups if groups else own.group_size,
    )  # fmt: skip


def state_space(forward: StatefulForward) -> PagedMamba | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    if not is_state_space(forward):
        return None
    own = cast(Any, forward.mixer)
    width = own.num_heads * own.head_dim
    is_known = (
        max(own.ssm_state_size, own.head_dim) <= MAX_STATE and _norm_of(own.norm, width).width <= MAX_NORM
    )
    return PagedMamba(forward) if is_known else None
