"""Native kernels of mixers compute what transformers' mixers compute, for every variant of the kernels."""

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers as hf
from torch import Tensor

import cluster.model  # noqa: F401  (prepares torchvision)
from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.cpu.layer_search import CpuLayerKernels
from cluster.model.cpu.mixers import MixerOfModules
from cluster.model.kv_format import kv_segments
from cluster.model.layers.mixers import replace_mixers
from cluster.model.probe import probe_backbone
from cluster.model.state_step import MixerKernel, StatefulForward, StepState, StepStates, install
from cluster.model.states import StateSpan
from tests.unit.model.native_kernels import best_kernels, each_dtype, each_variant, needs_kernels

HIDDEN = 64
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "pad_token_id": None,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 48,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}  # by default 512, large


FALCON: dict[str, Any] = {
    "mamba_d_ssm": 96, "mamba_n_heads": 3, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 3,
    "mamba_chunk_size": 8, "ssm_in_multiplier": 0.7, "ssm_multipliers": [0.9, 1.2, 0.6, 1.1, 0.8],
}  # fmt: skip
# Of Mamba 2: groups; limits that most steps of time pass; norms
STATE_SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "groups, limits": ("Bamba", {
        "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": 80, "mamba_d_state": 32,
        "mamba_n_groups": 2, "mamba_expand": 5, "mamba_chunk_size": 8, "mamba_conv_bias": False,
        "mamba_d_conv": 3, "time_step_limit": (0.6, 0.8),
    }),
    "one group": ("NemotronH", {
        "layers_block_type": ["linear_attention", "full_attention"], "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 80, "n_groups": 1, "chunk_size": 8, "use_bias": True, "time_step_min": 0.5,
    }),
    "multipliers": ("FalconH1", FALCON),
    "norm first": ("FalconH1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    "gate first": ("FalconH1", {**FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}),
}  # fmt: skip


def stateful(name: str, dtype: torch.dtype, **changes: Any) -> StepStates:
    """The mixers of a model; of those with the gated delta rule, value heads are wider than the kernel takes
    at once, and three share a key head."""
    torch.manual_seed(0)
    usual = {**SIZES, **DELTA} if name.startswith("Qwen") else SIZES
    if name == "Qwen3Next":
        usual |= EXPERTS
    config = getattr(hf, f"{name}Config")(**{**usual, **changes})
    text = getattr(hf, f"{name.removesuffix('Text')}ForCausalLM")(config).to(dtype).eval().model
    for parameter in text.parameters():
        parameter.requires_grad_(False).add_(0.1 * torch.randn_like(parameter))
    probed = probe_backbone(text, HIDDEN)
    layout = MemoryLayout(kv_segments([(1, 16)] * 2, 16, dtype))
    return install(text, probed.states, probed.attention, layout)


class Memory:
    """Of the states of some sequences, which are 0 at first."""

    def __init__(self, forward: StatefulForward, num_sequences: int):
        self._forward, size = forward, forward.layout.num_blocks
        self._blocks = [range(i * size, (i + 1) * size) for i in range(num_sequences)]
        self._kv = BlockMemory(forward.layout.kv_layout, num_sequences * size)

    def run(self, rows: Tensor) -> Tensor:
        """rows [B, N, hidden_size]: N more tokens of each sequence."""
        assert isinstance(self._forward.kernel, MixerOfModules)
        spans = [[StateSpan(rows.shape[1], own, own)] for own in self._blocks]
        step = StepState(self._forward.layout, self._kv, spans)
        with torch.inference_mode():
            return self._forward.kernel(rows.flatten(0, 1), step).view_as(rows)

    def states(self, sequence: int) -> list[Tensor]:
        layout = self._forward.layout
        pages = layout.page_ids(torch.tensor([[*self._blocks[sequence]]]), self._kv)
        stored = layout.load(0, pages, self._kv)[0]
        return [stored[place].view(tensor.dtype) for tensor, place in self._forward.states.places]


@needs_kernels
@each_variant
@each_dtype
@pytest.mark.parametrize("name", ["Qwen3_5Text", "Qwen3Next"])
def test_mixers_of_the_gated_delta_rule_are_replaced_and_agree(name, dtype, kernels) -> None:
    step = stateful(name, dtype)
    assert replace_mixers(step, CpuLayerKernels(kernels, "auto"), HIDDEN) == 1
    (forward,) = step.forwards
    whole, apart = Memory(forward, 1), Memory(forward, 1)
    rows = torch.randn(1, 70, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = whole.run(rows)
    pieces = [apart.run(piece) for piece in rows.split([1, 2, 64, 3], 1)]
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2  # linears of torch round by the number of rows
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=tolerance, atol=tolerance)
    for mine, theirs in zip(apart.states(0), whole.states(0), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)


@needs_kernels
@each_variant
@each_dtype
@pytest.mark.parametrize("form", STATE_SPACES)
def test_mixers_of_mamba_2_are_replaced_and_agree(form, dtype, kernels, caplog) -> None:
    name, changes = STATE_SPACES[form]
    step = stateful(name, dtype, **changes)
    replaced = replace_mixers(step, CpuLayerKernels(kernels, "auto"), HIDDEN)
    assert replaced == len(step.forwards) > 0, caplog.text


@needs_kernels
@each_variant
def test_a_sequence_does_not_depend_on_the_others(kernels) -> None:
    """But for the last bits: a library's products around the kernel multiply one row otherwise than five."""
    step = stateful("Qwen3_5Text", torch.float32)
    replace_mixers(step, CpuLayerKernels(kernels, "auto"), HIDDEN)
    (forward,) = step.forwards
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(5, 3, HIDDEN, generator=generator)
    together = Memory(forward, 5)
    expected = together.run(rows)
    for i in range(5):
        alone = Memory(forward, 1)
        torch.testing.assert_close(alone.run(rows[i : i + 1])[0], expected[i], rtol=0, atol=1e-5)
        for mine, theirs in zip(alone.states(0), together.states(i), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("changes", [{"linear_value_head_dim": 20}, {"hidden_act": "gelu"}])
def test_what_the_kernel_does_not_know_stays_as_it_is(changes) -> None:
    step = stateful("Qwen3_5Text", torch.float32, **changes)
    assert replace_mixers(step, CpuLayerKernels(best_kernels, "auto"), HIDDEN) == 0


@needs_kernels
def test_a_kernel_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    step = stateful("Qwen3_5Text", torch.float32)
    ours = CpuLayerKernels(best_kernels, "auto")
    kernel = ours.mixer(step.forwards[0])
    assert kernel is not None
    size = step.forwards[0].states.num_bytes

    def wrong(rows: Tensor, step: StepState) -> Tensor:
        out, kept = kernel(rows, step), step.target_pages[step.target_pages[:, 0] >= 0]
        states = step.layout.load(0, kept, step.kv)
        states[:, size - 4 : size] = 0
        step.layout.store(0, kept, states, step.kv)
        return out

    monkeypatch.setattr(ours, "mixer", lambda _: wrong)
    assert replace_mixers(step, ours, HIDDEN) == 0


@needs_kernels
def test_every_mixer_is_compared_those_of_a_known_form_over_fewer_steps(monkeypatch) -> None:
    """The third kernel has the weights of another layer."""
    types = ["linear_attention"] * 3 + ["full_attention"]
    step = stateful("Qwen3_5Text", torch.float32, num_hidden_layers=4, layer_types=types)
    ours, calls = CpuLayerKernels(best_kernels, "auto"), [0] * 3
    kernels = [ours.mixer(forward) for forward in step.forwards]

    def watched(forward: StatefulForward) -> MixerKernel | None:
        kernel = kernels[min(forward.number, 1)]
        assert kernel is not None

        def counted(rows: Tensor, step: StepState) -> Tensor:
            calls[forward.number] += 1
            return kernel(rows, step)

        return counted

    monkeypatch.setattr(ours, "mixer", watched)
    assert replace_mixers(step, ours, HIDDEN) == 2
    assert [forward.kernel is not None for forward in step.forwards] == [True, True, False]
    assert 0 < calls[1] < calls[0]
