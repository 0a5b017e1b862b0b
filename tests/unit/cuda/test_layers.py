"""The search for layers knows no device: kernels that are nothing like the CPU's, on a simulated GPU. They
take halves of layers, try forms of the norm, and must be faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from cluster.kvcache.memory import MemoryLayout
from cluster.model.attention import ATTENTION_NAME, AttentionBackend, LayerAttention, PagedBatch
from cluster.model.attention_torch import TorchAttention
from cluster.model.kv_format import kv_segments, layer_cache
from cluster.model.layers.parts import DecoderParts, epsilon_of
from cluster.model.layers.search import (
    Compared,
    LayerKernels,
    Settings,
    TextParts,
    replace_layers,
    whole_decoder,
)
from cluster.model.layers.trial import Observed, Trial
from cluster.model.state_step import StatefulForward
from tests.fakes.cuda_device import SimulatedCuda

_TINY: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 64, "intermediate_size": 90, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0,
    "head_dim": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
Norm = Callable[[Tensor, Tensor, float], Tensor]
NORMS: Mapping[str, Norm] = {  # one launch each
    "weight": lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight, epsilon),
    "one more": lambda x, weight, epsilon: F.rms_norm(x, weight.shape, weight + 1, epsilon),
}


class FusedLayer(nn.Module):
    """One matrix for q, k and v, and one for gate and up; a half that is not recognised runs by its
    modules."""

    def __init__(self, parts: DecoderParts, settings: Settings, launch: Callable):
        super().__init__()
        attention = parts.attention.inner
        assert attention is not None
        self._parts, self._settings, self._launch = parts, settings, launch
        self._attention = attention
        self._qkv = torch.cat([linear.weight for linear in attention.projections])

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor],
        paged: tuple[PagedBatch, AttentionBackend], **_keywords: object,
    ) -> Tensor:  # fmt: skip
        batch, backend = paged
        half, (num_query, num_kv, width) = self._parts.attention, self._settings["heads"]
        qkv = F.linear(self._norm(half.pre, hidden_states), self._qkv)[0].view(
            -1, num_query + 2 * num_kv, width
        )
        head_norms = self._attention.head_norms
        query, key, value = self._launch(
            rotated, qkv, num_query, *(each[0] for each in position_embeddings),
            [(self._weight_of(norm), epsilon_of(norm)) for norm in head_norms],
        )  # fmt: skip
        cache = layer_cache(batch.kv, self._parts.layer_idx)
        backend.write(batch, cache, key, value)
        layer = LayerAttention(self._settings["scaling"])
        out = backend.attend(batch, layer, query, key, value, cache)
        x = hidden_states + half.scale * F.linear(out.flatten(1), self._attention.out.weight)[None]
        return self._parts.mlp.run_modules(x)

    def _weight_of(self, norm: nn.Module) -> Tensor:
        weight = norm.get_parameter("weight")
        return weight + 1 if self._settings["norm"] == "one more" else weight

    def _norm(self, norm: nn.Module | None, x: Tensor) -> Tensor:
        assert norm is not None
        return self._launch(NORMS[self._settings["norm"]], x, norm.weight, epsilon_of(norm))


def rotated(qkv: Tensor, num_query: int, cos: Tensor, sin: Tensor, norms: list) -> tuple[Tensor, ...]:
    """[T, heads, D] of all three → q, k, v."""
    num_kv = (qkv.shape[1] - num_query) // 2
    query, key, value = qkv.split([num_query, num_kv, num_kv], dim=1)
    if norms:
        query, key = (
            F.rms_norm(x, weight.shape, weight, eps)
            for x, (weight, eps) in zip((query, key), norms, strict=True)
        )
    turned = []
    for x in (query, key):
        low, high = x.chunk(2, dim=-1)
        turned.append(x * cos[:, None] + torch.cat([-high, low], dim=-1) * sin[:, None])
    return *turned, value.contiguous()


class FusedKernels:
    """Implements `LayerKernels`."""

    name = "fused"
    is_timed = True
    whole_tolerance = 1e-4
    mixer_tolerances: Mapping[torch.dtype, float] = MappingProxyType({})

    def __init__(self, device: SimulatedCuda, num_wasted: int = 0):
        self.source = Compared()
        self.built: list[str] = []
        self._device, self._num_wasted = device, num_wasted

    def can_replace(self, parts: DecoderParts) -> bool:
        return parts.attention.inner is not None and parts.attention.post is None

    def candidates(self, parts: DecoderParts, observed: Observed) -> Iterator[Settings]:
        seen = observed.heads
        assert seen is not None
        heads = (seen.num_query, seen.num_kv, seen.key_width)
        for norm in NORMS:
            yield {"norm": norm, "heads": heads, "scaling": seen.attention.scaling}

    def build(self, parts: DecoderParts, settings: Settings) -> nn.Module:
        self.built.append(settings["norm"])
        return FusedLayer(parts, settings, self._launch)

    def tolerance(self, parts: DecoderParts, settings: Settings) -> float:
        return 1e-5

    def replace_modules(self, text_model: nn.Module, head: nn.Module) -> None:
        return None

    def mixer(self, forward: StatefulForward) -> None:
        """Replaces none."""

    def whole(self, parts: TextParts) -> FusedTextModel | None:
        is_fused = all(isinstance(layer, FusedLayer) for layer in parts.layers)
        return FusedTextModel(parts) if is_fused else None

    def _launch(self, work: Callable, *args: object) -> object:
        for _ in range(self._num_wasted):
            torch.zeros(1, device="cuda")
        return self._device.kernel(work, *args)


class FusedTextModel:
    kernels_s = None

    def __init__(self, parts: TextParts):
        self._parts, self._attention = parts, TorchAttention()

    def logits(self, embeds: Tensor, positions: Tensor, batch: PagedBatch, wanted: Tensor) -> Tensor:
        rotary = self._parts.rotary(embeds, positions)
        for layer in self._parts.layers:
            embeds = layer(embeds, position_embeddings=rotary, paged=(batch, self._attention))
        return self._parts.head(self._parts.norm(embeds)[0, wanted]).float()


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as simulated, torch.inference_mode():
        torch.manual_seed(0)
        yield simulated


def on_gpu(device: SimulatedCuda, text: hf.PreTrainedModel) -> hf.PreTrainedModel:
    for parameter in text.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.1 * torch.randn_like(parameter))
    text.set_attn_implementation(ATTENTION_NAME)
    device.put(text.eval())
    return text


def trial_of(device: SimulatedCuda, text: hf.PreTrainedModel) -> Trial:
    """Time is the number of launches."""
    rows = [(text.config.num_key_value_heads, text.config.head_dim)] * 2 * text.config.num_hidden_layers
    layout = MemoryLayout(kv_segments(rows, 4, text.dtype))
    return Trial(text, layout, TorchAttention(), lambda ids: ids[None], lambda: len(device.operators))


TEXTS: dict[str, Callable[[], hf.PreTrainedModel]] = {
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**_TINY)),
    "norms that add one": lambda: hf.GemmaModel(hf.GemmaConfig(**_TINY)),
    "experts and norms of heads": lambda: hf.Qwen3MoeModel(hf.Qwen3MoeConfig(**_TINY, **_EXPERTS)),
    "scaled residuals": lambda: hf.GraniteModel(hf.GraniteConfig(**_TINY, residual_multiplier=0.5)),
}


@pytest.mark.parametrize(
    ("text", "tried"),
    [
        ("llama", ["weight", "weight"]),
        ("norms that add one", ["weight", "one more"] * 2),
        ("experts and norms of heads", ["weight", "weight"]),
        ("scaled residuals", ["weight", "weight"]),
    ],
)
def test_the_comparison_finds_the_form_of_a_norm_in_halves_of_layers(text, tried, device: SimulatedCuda):
    model = on_gpu(device, TEXTS[text]())
    kernels: LayerKernels = FusedKernels(device)
    trial = trial_of(device, model)
    head = device.put(nn.Linear(64, 31, bias=False))
    assert replace_layers(model, kernels, trial) == 2
    assert kernels.built == tried
    decoder = whole_decoder(model, head, kernels, trial)
    multiplies_embeddings = text == "scaled residuals" and model.embedding_multiplier != 1
    assert (decoder is None) == multiplies_embeddings


def test_a_layer_stays_if_no_candidate_agrees(device: SimulatedCuda):
    model = on_gpu(device, hf.Ernie4_5Model(hf.Ernie4_5Config(**_TINY)))  # rotates pairs of neighbours
    kernels = FusedKernels(device)
    assert replace_layers(model, kernels, trial_of(device, model)) == 0
    assert kernels.built == [*NORMS] * 2


def test_a_layer_that_the_kernels_cannot_replace_is_not_run(device: SimulatedCuda):
    model = on_gpu(device, hf.Olmo2Model(hf.Olmo2Config(**_TINY)))
    before = len(device.operators)
    trial = trial_of(device, model)
    made = len(device.operators)
    assert replace_layers(model, FusedKernels(device), trial) == 0
    assert before < made == len(device.operators)


def test_a_layer_that_is_given_more_than_rows_and_keywords_is_not_tried(device: SimulatedCuda):
    sizes = {"head_dim": 16, "global_head_dim": 16, "hidden_size_per_layer_input": 0}
    model = on_gpu(device, hf.Gemma4TextModel(hf.Gemma4TextConfig(**{**_TINY, **sizes})))
    trial = trial_of(device, model)
    (layer, _) = cast(nn.ModuleList, model.layers)
    assert trial.observe(layer) is None
    assert replace_layers(model, FusedKernels(device), trial) == 0


def test_a_layer_stays_if_its_replacement_is_slower(device: SimulatedCuda):
    """All layers with equal settings share one measurement."""
    model = on_gpu(device, TEXTS["llama"]())
    slow = FusedKernels(device, num_wasted=100)
    assert replace_layers(model, slow, trial_of(device, model)) == 0
    assert replace_layers(model, FusedKernels(device), trial_of(device, model)) == 2
