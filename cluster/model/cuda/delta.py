"""Mixers with the gated delta rule, by `delta_kernels` over the pages where their states lie. Runs on the
engine's thread; enqueues on the current stream and reads nothing on the host. An H100 gave the right tokens
for tiny models; not timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from cluster.model.cuda.early import early
from cluster.model.cuda.mixer_calls import SMALLEST, Convolution, PagedMixer, Pages, kinds_of
from cluster.model.cuda.mixer_chunks import CHUNK, MixerChunks
from cluster.model.cuda.tiles import power_of_two
from cluster.model.layers.mixer_parts import MixerInputs, mixer_inputs
from cluster.model.state_step import StatefulForward, StepState

MAX_WIDTH = 256  # of a head of keys or values, that fits a program's registers
VALUE_TILE = 32  # columns of a state, of a program
NORM_HEADS = 8  # of a program
NUM_FACTORS = 5  # that `delta_kernels` keeps of a token
# Of programs of `delta_kernels`: heads and warps of `chunk_systems`, warps of `solve_systems`, programs side
# by side for sequences, warps and stages of `many_tokens`
_SYSTEM_HEADS, _SYSTEM_WARPS = 2, 4
SOLVE_WARPS, SEQUENCES, CHUNK_WARPS, STAGES = 2, 8, 8, 1


class DeltaRows(NamedTuple):
    """Rows of a step. gates: of the answers."""

    projected: Tensor
    mixed: Tensor
    decays: Tensor | None  # of channels; None: a head has one, in `projected`
    gates: Tensor


class PagedDeltaRule(PagedMixer):
    """A delta rule. Subclasses know where decays and gates come from."""

    _rates: Tensor  # of the decays, float32, as the shifts
    _shifts: Tensor
    _betas: Mapping[str, Any]  # where betas and decays are in a row, and their bounds
    _gates: Mapping[str, Any]  # where the gates of the answers are in a row of theirs, and what they are

    def __init__(
        self, forward: StatefulForward, inputs: Sequence[nn.Module], conv: Convolution, norm: nn.Module,
        out: nn.Module, heads: tuple[int, int], widths: tuple[int, int],
    ):  # fmt: skip
        """heads, widths: of keys and of values."""
        super().__init__(forward, inputs, conv, out)
        self._norm, (self._heads, self._values) = cast(Any, norm), (heads[1], widths[1])
        self._epsilon: float = getattr(norm, "variance_epsilon", 1e-6)
        self._groups = {"KEY_HEADS": heads[0], "GROUP": heads[1] // heads[0]}
        key_pad, value_pad = (max(SMALLEST, power_of_two(width)) for width in widths)
        self._widths = {"K": widths[0], "K_PAD": key_pad, "V": widths[1]}
        self._tile = min(VALUE_TILE, value_pad)
        self._state = {**self._groups, **self._widths, "TILE": self._tile, **self._place}

    def _behind_convolution(self, projected: Tensor, mixed: Tensor, pages: Pages, step: StepState) -> Tensor:
        rows = self._rows(projected, mixed)
        out = projected.new_empty(len(projected), self._heads, self._values)
        self._few(rows, pages, step, out)
        if not step.tensors.is_decode and len(step.chunks.sequences):
            self._many(rows, pages, step, out)
        return self._normed(out, rows.gates).flatten(1)

    def _rows(self, projected: Tensor, mixed: Tensor) -> DeltaRows:
        raise NotImplementedError

    def _systems(
        self, rows: DeltaRows, pages: Pages, chunks: MixerChunks, systems: Tensor, factors: Tensor
    ) -> Tensor | None:
        """Fills both. Returns what `many_tokens` takes of decays of channels."""
        raise NotImplementedError

    def _few(self, rows: DeltaRows, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        delta_kernels.few_tokens[self._grid(pages.num_spans)](
            rows.projected, rows.mixed, rows.decays, self._rates, self._shifts,
            step.kv.buffer.view(torch.float32), pages.source, pages.target, pages.starts, pages.firsts, out,
            rows.projected.stride(0), 0 if rows.decays is None else rows.decays.stride(0), pages.page_stride,
            pages.first_page, pages.num_spans, **self._state, **self._betas,
            IS_DECODE=step.tensors.is_decode, num_warps=4, **early(out.device),
        )  # fmt: skip

    def _many(self, rows: DeltaRows, pages: Pages, step: StepState, out: Tensor) -> None:
        from cluster.model.cuda import delta_kernels

        chunks = step.chunks
        num_chunks, num_long = len(chunks.spans), len(chunks.sequences)
        systems = out.new_empty(num_chunks, self._heads, 2, CHUNK, CHUNK, dtype=torch.float32)
        factors = systems.new_empty(num_chunks, self._heads, NUM_FACTORS, CHUNK)
        sums = self._systems(rows, pages, chunks, systems, factors)
        delta_kernels.solve_systems[(num_chunks, self._heads)](
            systems, factors, chunks.spans, pages.num_spans, num_warps=SOLVE_WARPS, **early(out.device)
        )
        delta_kernels.many_tokens[self._grid(min(num_long, SEQUENCES))](
            rows.mixed, sums, systems, factors, step.kv.buffer.view(torch.float32), pages.source,
            pages.target, pages.starts, pages.firsts, chunks.begins, chunks.sequences, out, pages.page_stride,
            pages.first_page, pages.num_spans, num_long, **self._state, EXACT=is_exact(out),
            num_warps=CHUNK_WARPS, num_stages=STAGES, **early(out.device),
        )  # fmt: skip

    def _normed(self, x: Tensor, gates: Tensor) -> Tensor:
        from cluster.model.cuda import delta_kernels

        out, tile = torch.empty_like(x), min(NORM_HEADS, power_of_two(self._heads))
        delta_kernels.gated_norm[(len(x), -(-self._heads // tile))](
            x, gates, self._norm.weight, out, gates.stride(0), self._epsilon, GROUP=self._groups["GROUP"],
            HEADS=self._heads, TILE=tile, V=self._values, PAD=power_of_two(self._values), **self._gates,
            num_warps=4, **early(out.device),
        )  # fmt: skip
        return out

    def _grid(self, sequences: int) -> tuple[int, int, int]:
        return sequences, self._heads, -(-self._values // self._tile)


class PagedDelta(PagedDeltaRule):
    """Qwen3-Next's, Qwen3.5's and OLMo-Hybrid's."""

    def __init__(self, forward: StatefulForward, inputs: MixerInputs):
        own, columns = cast(Any, forward.mixer), inputs.columns
        heads, widths = (own.num_k_heads, own.num_v_heads), (own.head_k_dim, own.head_v_dim)
        weight: Tensor = own.conv1d.weight
        where = {
            "KEY_HEADS": heads[0], "GROUP": heads[1] // heads[0], "K": widths[0], "V": widths[1],
            "Q0": columns.query, "K0": columns.key, "V0": columns.value, "KEY_STEP": columns.key_step,
            "VALUE_STEP": columns.value_step,
        }  # fmt: skip
        conv = Convolution(weight, None, where, forward.layout.page_bytes // weight.dtype.itemsize)
        super().__init__(forward, inputs.linears, conv, inputs.norm, inputs.out, heads, widths)
        self._rates, self._shifts = -own.A_log.detach().float().exp(), own.dt_bias.detach().float()
        beta = 2.0 if getattr(own, "allow_neg_eigval", False) else 1.0
        self._of_heads = {
            "B0": columns.beta, "A0": columns.decay, "GATE_STEP": columns.gate_step, "BETA": beta,
        }  # fmt: skip
        self._betas = {**self._of_heads, "LOWEST": 0.0}
        self._gates = {"Z0": columns.gate, "VALUE_STEP": columns.value_step, "IS_SIGMOID": False}

    def _rows(self, projected: Tensor, mixed: Tensor) -> DeltaRows:
        return DeltaRows(projected, mixed, None, projected)

    def _systems(
        self, rows: DeltaRows, pages: Pages, chunks: MixerChunks, systems: Tensor, factors: Tensor
    ) -> None:
        from cluster.model.cuda import delta_kernels

        projected = rows.projected
        delta_kernels.chunk_systems[(len(chunks.spans), -(-self._heads // _SYSTEM_HEADS))](
            projected, rows.mixed, self._rates, self._shifts, pages.starts, chunks.spans, chunks.begins,
            systems, factors, projected.stride(0), pages.num_spans, **self._groups, **self._widths,
            **self._of_heads, EXACT=is_exact(projected), HEADS=_SYSTEM_HEADS, num_warps=_SYSTEM_WARPS,
            num_stages=1, **early(projected.device),
        )  # fmt: skip


def is_exact(rows: Tensor) -> bool:
    """Whether products within a chunk are exact ones."""
    return rows.dtype != torch.bfloat16


def gated_delta(forward: StatefulForward) -> PagedDelta | None:
    """None: it is no such mixer, or of a form that no kernel knows."""
    inputs = mixer_inputs(forward.mixer)
    return None if inputs is None or not _is_known(forward) else PagedDelta(forward, inputs)


def _is_known(forward: StatefulForward) -> bool:
    own = cast(Any, forward.mixer)
    weight: Tensor = own.conv1d.weight
    channels = 2 * own.num_k_heads * own.head_k_dim + own.num_v_heads * own.head_v_dim
    return (
        own.conv1d.bias is None
        and max(own.head_k_dim, own.head_v_dim) <= MAX_WIDTH
        and kinds_of(forward) == [
            (False, weight.dtype, (channels, weight.shape[-1])),
            (True, torch.float32, (own.num_v_heads, own.head_k_dim, own.head_v_dim)),
        ]
    )  # fmt: skip
