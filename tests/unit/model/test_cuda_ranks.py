"""Two ranks of tiny models whose decoder layers are our Triton kernels, in Triton's interpreter, which has to
be asked for: TRITON_INTERPRET=1. They meet over Gloo, decide together which layers are replaced, and give the
tokens of `generate`."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.collectives import Collectives
from cluster.model.cuda.layer import CudaLayerKernels, FusedLayer
from cluster.model.cuda.merging import merge_inputs
from cluster.model.language import LanguageModel
from cluster.model.language_parts import LanguageParts, on_kernels, probed_parts
from cluster.model.layers.parts import DecoderParts
from cluster.model.layers.search import Settings
from cluster.model.loading import Half, load_half
from cluster.model.parallel import ForwardProgress, LeadingModel, follow, join_group, leave_group
from cluster.model.rank_linears import settle_linears
from cluster.model.sharding import Sharding
from tests.fakes.processes import results_of_ranks
from tests.unit.model.test_cuda_whole_layer import (
    ATTENTION,
    LAYERS,
    MODELS,
    WHOLE,
    generated,
    greedy,
    what_is_fused,
)

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
EXPECTED = {
    "qwen3": WHOLE,  # norms of heads
    "gemma2_softcap_window": LAYERS,  # norms behind the sums
    "qwen3_moe": ATTENTION,
    "phi3_window": None,  # transformers gathers what its ranks project
}
BROKEN = "a rank whose kernels fail"
DIVIDED = Sharding(2)


class BrokenKernels(CudaLayerKernels):
    """Their layers raise when they run."""

    def build(self, parts: DecoderParts, settings: Settings) -> FusedLayer:
        layer = super().build(parts, settings)
        layer.run = lambda *_: 1 / 0  # type: ignore[method-assign]
        return layer


def fused(path: Path, kernels: type[CudaLayerKernels]) -> LanguageParts:
    half = load_half(path, Half.LANGUAGE, dtype=torch.float32, device="cpu", sharding=DIVIDED)
    collectives = Collectives(half.device)
    settle_linears(half, collectives)
    with torch.inference_mode():
        merge_inputs(half, torch.device("cpu"))
    parts = probed_parts(half, 16, "auto", collectives=collectives)
    attention = CudaAttention(TorchAttention(), num_processors=2)
    return on_kernels(
        replace(parts, attention=attention),
        kernels(torch.float32, attention, is_timed=False, collectives=collectives),
    )


def run_rank(
    rank: int, num_ranks: int, meeting: Path, paths: dict[str, Path], calls: dict[str, list[Connection]],
    results: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    group = join_group(rank, num_ranks, meeting, "cpu")
    for name, path in paths.items():
        parts = fused(path, BrokenKernels if name == BROKEN and rank else CudaLayerKernels)
        model, progress = LanguageModel(parts), ForwardProgress()
        kv, width = BlockMemory(model.kv_layout, 4), model.feature_width
        if rank:
            follow(
                model, kv, group, calls[name][0], progress, torch.float32, width
            )  # fmt: skip
            continue
        leading = LeadingModel(model, calls[name], progress, torch.float32, group.device)
        results.send((name, what_is_fused(parts), greedy(leading, kv)))
        calls[name][0].close()
    results.send(None)
    leave_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | None, list[list[int]]]]:
    """By name: what was fused, and greedy tokens."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = {name: folder / name for name in EXPECTED}
    for name, path in paths.items():
        MODELS[name]().model.save_pretrained(path)
    paths[BROKEN] = paths["qwen3"]
    results, _ = results_of_ranks(run_rank, paths, folder / "meeting", paths, deadline_s=300)
    return {name: (what, tokens) for name, what, tokens in results}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*EXPECTED, BROKEN])
def test_ranks_of_our_kernels_give_the_tokens_of_generate(name: str, found) -> None:
    what, tokens = found[name]
    assert what == EXPECTED.get(name)  # nothing where one rank fails
    assert tokens == generated(MODELS["qwen3" if name == BROKEN else name]().model.eval())
