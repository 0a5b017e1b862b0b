"""A model of fused layers on a simulated GPU: merged weights that modules and kernels share, ten launches a
layer, and a step that reads nothing on the host. What the kernels compute: test_cuda_whole_layer.py in
tests/unit/model, in Triton's interpreter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers as hf
from torch import Tensor

from cluster.kvcache.memory import BlockMemory, MemoryLayout
from cluster.model.attention import LayerAttention, PagedBatch
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.collectives import Collectives
from cluster.model.cuda.graphs import capture_cuda
from cluster.model.cuda.layer import CudaLayerKernels, FusedTextModel
from cluster.model.cuda.merging import merge_inputs, merged
from cluster.model.cuda.paged_attention import step_tensors
from cluster.model.kv_format import kv_segments
from cluster.model.language_parts import on_kernels, probed_parts
from cluster.model.layers.parts import decoder_parts
from cluster.model.layers.search import TextParts
from cluster.model.layers.trial import NUM_TOKENS, Heads, Observed
from cluster.model.rank_linears import SummedLinear
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.cuda_ranks import collectives_on
from tests.fakes.strict_triton import Launch, strict_triton

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "attention_bias": True,
}  # fmt: skip
MODEL = hf.Qwen3ForCausalLM  # imported here, not while modules are replaced
HEADS = Heads(4, 2, 16, 16, LayerAttention(0.25))
PRODUCTS = {"mm", "addmm", "linear"}


@dataclass
class Fused:
    device: SimulatedCuda
    launches: list[Launch]
    model: hf.Qwen3ForCausalLM
    decoder: FusedTextModel
    kv: BlockMemory

    def batch(self, counts: list[int], contexts: list[int]) -> PagedBatch:
        return PagedBatch(
            self.kv, 16, torch.zeros(sum(counts), dtype=torch.int64, device="cuda"), counts, contexts,
            torch.zeros(len(counts), 4, dtype=torch.int64, device="cuda"),
            torch.ones(len(counts), dtype=torch.int64, device="cuda"), [()] * len(counts),
        )  # fmt: skip

    def logits(self, batch: PagedBatch, wanted: Tensor) -> Tensor:
        embeds = torch.zeros(1, len(batch.slots), 24, device="cuda")
        positions = torch.zeros(1, len(batch.slots), dtype=torch.int64, device="cuda")
        return self.decoder.logits(embeds, positions, batch, wanted)


@contextmanager
def as_rank(model: Any, device: SimulatedCuda) -> Iterator[None]:
    """Two linears of each layer give sums over ranks, of which there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    collectives = Collectives(torch.device("cuda", 0))
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            plain = getattr(parent, name)
            summed = SummedLinear(plain.in_features, plain.out_features, plain.bias is not None)
            summed.weight, summed.bias, summed.collectives = plain.weight, plain.bias, collectives
            setattr(parent, name, summed)
    try:
        with collectives_on(device):
            yield
    finally:
        dist.destroy_process_group()


@pytest.fixture(params=[False])
def fused(request: pytest.FixtureRequest) -> Iterator[Fused]:
    """The parameter: whether it is a rank's."""
    with SimulatedCuda() as device, strict_triton() as launches, torch.inference_mode(), ExitStack() as stack:
        model = MODEL(hf.Qwen3Config(**SIZES)).eval()
        if request.param:
            stack.enter_context(as_rank(model, device))
        merge_inputs(model, torch.device("cuda", 0))
        device.put(model)
        attention = CudaAttention(TorchAttention(), num_processors=132)
        kernels = CudaLayerKernels(torch.float32, attention, is_timed=False)
        text, layers = model.model, []
        rotary = tuple(torch.zeros(1, NUM_TOKENS, 16, device="cuda") for _ in range(2))
        for layer in text.layers:
            parts = decoder_parts(layer)
            assert parts is not None and kernels.can_replace(parts)
            settings = next(iter(kernels.candidates(parts, Observed(torch.zeros(1), HEADS, rotary))))
            layers.append(kernels.build(parts, settings))
        decoder = kernels.whole(TextParts(text.rotary_emb, layers, text.norm, model.lm_head))
        assert decoder is not None
        kv = BlockMemory(MemoryLayout(kv_segments([(2, 16)] * 6, 16, torch.float32)), 8, "cuda")
        yield Fused(device, launches, model, decoder, kv)


def test_modules_and_kernels_share_one_copy_of_the_weights(fused: Fused) -> None:
    layers: Any = fused.model.model.layers
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        for linears in (qkv, [mlp.gate_proj, mlp.up_proj]):
            whole = merged([linear.weight for linear in linears])
            assert whole is not None and whole.device.type == "cuda"
            assert whole.data_ptr() == linears[0].weight.data_ptr()
            assert torch.equal(whole.cpu(), torch.cat([linear.weight.cpu() for linear in linears]))
        assert merged([linear.bias for linear in qkv]) is not None
        assert merged([mlp.down_proj.weight, attention.o_proj.weight]) is None


@pytest.mark.parametrize(
    ("fused", "counts"), [(False, [1, 1, 1]), (False, [1, 5]), (True, [1, 1, 1])], indirect=["fused"]
)
def test_a_layer_is_ten_launches_and_one_more_where_prompts_have_their_own(
    fused: Fused, counts, request: pytest.FixtureRequest
) -> None:
    """On ranks, and two sums over them."""
    batch = fused.batch(counts, [30, 9, 4][: len(counts)])
    fused.launches.clear()
    fused.device.operators.clear()
    fused.logits(batch, torch.zeros(len(counts), dtype=torch.int64, device="cuda"))
    of_layer = [
        "add_norm",
        "rope_write",
        *["attend"] * (1 if batch.is_decode else 2),
        "merge",
        "add_norm",
        "gate",
    ]
    first = [*of_layer[:2], "plan", *of_layer[2:]]
    names = [each.kernel for each in fused.launches]
    assert names == [*first, *of_layer * 2, "add_norm"]
    counted = Counter(name.split(".")[1] if "." in name else name for name in fused.device.operators)
    products = sum(number for name, number in counted.items() if name in PRODUCTS)
    assert products == 4 * 3 + 1, counted
    is_rank = request.node.callspec.params["fused"]
    assert counted["all_reduce"] == (2 * 3 if is_rank else 0)


def test_steps_of_other_sizes_run_the_same_kernels(fused: Fused) -> None:
    """Nothing that the compiler makes a constant follows from them."""
    found = []
    for counts, contexts in (
        ([1, 5, 40], [30, 9, 40]),
        ([31, 1], [31, 48]),
        ([64], [70]),
        ([7, 9, 1], [8, 9, 1]),
    ):
        fused.launches.clear()
        fused.logits(fused.batch(counts, contexts), torch.zeros(1, dtype=torch.int64, device="cuda"))
        found.append([launch.variant for launch in fused.launches])
    assert found[0] and all(variants == found[0] for variants in found)


def test_a_step_is_recorded_without_the_host(fused: Fused) -> None:
    batch = fused.batch([1, 5], [30, 9])
    recorded = replace(batch, device=step_tensors(batch), query_lens=[], context_lens=[])
    wanted = torch.zeros(2, dtype=torch.int64, device="cuda")
    before = fused.device.num_syncs
    replay = capture_cuda()(lambda: fused.logits(replace(recorded, memo={}), wanted))
    assert replay().shape == (2, 40)
    assert fused.device.num_syncs == before


def test_layers_are_announced_as_they_are_written(fused: Fused) -> None:
    seen: list[int] = []
    batch = replace(fused.batch([1, 5], [30, 9]), on_layer=seen.append)
    fused.logits(batch, torch.zeros(2, dtype=torch.int64, device="cuda"))
    assert seen == [0, 1, 2]


def test_a_step_that_wants_no_logits_gives_none(fused: Fused) -> None:
    wanted = torch.zeros(0, dtype=torch.int64, device="cuda")
    assert fused.logits(fused.batch([5], [9]), wanted).shape == (0, 40)


def test_kernels_that_fail_leave_the_layers_to_their_modules(caplog) -> None:
    """Here nothing can be launched: the tensors are on no GPU."""
    parts = probed_parts(MODEL(hf.Qwen3Config(**SIZES)).eval(), 16, "auto")
    merge_inputs(parts.model, torch.device("cpu"))
    attention = CudaAttention(TorchAttention(), num_processors=132)
    with strict_triton(), torch.inference_mode():
        served = on_kernels(parts, CudaLayerKernels(torch.float32, attention, is_timed=False))
    assert served.decoder is None
    layers: Any = served.text.layers
    assert {type(layer).__name__ for layer in layers} == {"Qwen3DecoderLayer"}
    assert "fails: add_norm: residual is a Tensor" in caplog.text
