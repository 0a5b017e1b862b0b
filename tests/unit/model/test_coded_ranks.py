"""Two ranks of tiny quantised models that hold codes of their shares alone, meet over Gloo, and give the
tokens of `generate` with the plain weights. Their layers are modules with products of plain torch; in
Triton's interpreter, which has to be asked for (TRITON_INTERPRET=1), our kernels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cluster.kvcache.memory import BlockMemory
from cluster.model.attention_cuda import CudaAttention
from cluster.model.attention_torch import TorchAttention
from cluster.model.collectives import Collectives
from cluster.model.cuda.coded_choice import CODED_KERNELS
from cluster.model.cuda.layer import CudaLayerKernels
from cluster.model.cuda.merging import merge_inputs
from cluster.model.half_files import HalfSizes
from cluster.model.language import LanguageModel
from cluster.model.language_parts import LanguageParts, on_kernels, probed_parts
from cluster.model.layers.codes import CodedExperts, CodedLinear, Codes
from cluster.model.loading import Half, load_half
from cluster.model.parallel import ForwardProgress, LeadingModel, follow, join_group, leave_group
from cluster.model.rank_linears import SummedLinear, settle_linears
from cluster.model.sharding import Sharding
from tests.fakes.processes import results_of_ranks
from tests.flow.quantised_formats import FORMS, compressed_entry, fp8
from tests.flow.test_tensor_parallel import BLOCK_SIZE, answers, memory
from tests.unit.model.test_cuda_coded_models import (
    HOLDING,
    OF_PLAIN,
    experts_of_plain,
    folders,
    is_of_text,
    product_of_plain,
)
from tests.unit.model.test_cuda_whole_layer import ATTENTION, LAYERS, WHOLE, generated, greedy, what_is_fused

interpreted = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs Triton's interpreter: wants triton and TRITON_INTERPRET=1",
)
# Blocks in which ranks cut both rows and columns: they have 48 of the MLP's
_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
FORMS["fp8 in wide blocks"] = fp8(
    compressed_entry("float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [64, 32]}),
    ".weight_scale", (64, 32), (0, 0),
)  # fmt: skip
GATHERED = "gathered"  # by transformers' plan
HYBRID = "mixers"  # that keep states
CASES = {  # by name: family, format, what our kernels fuse
    "blocks": ("llama", "fp8 in wide blocks", WHOLE),
    "rows": ("qwen3", "compressed fp8 by rows", WHOLE),
    "one scale": ("qwen2", "modelopt fp8", WHOLE),
    "awq": ("qwen2", "AWQ", WHOLE),
    "gptq": ("gemma2_softcap_window", "GPTQ", LAYERS),
    "gptq zeros": ("llama", "GPTQ with zeros", WHOLE),
    "packed": ("llama", "W4A16", WHOLE),
    "packed zeros": ("qwen2_5_vl", "W4A16 with zeros", WHOLE),
    "8 bits": ("llama", "GPTQ of 8 bits", WHOLE),
    "experts": ("qwen3_moe", "W4A16 with zeros", ATTENTION),
    "experts in blocks": ("qwen3_moe", "compressed fp8 in blocks", ATTENTION),
    "whole experts": ("qwen3_moe", "AWQ", ATTENTION),
    GATHERED: ("phi3_window", "W4A16 with zeros", None),
    HYBRID: ("qwen3_5_moe", "fp8 in blocks", None),
    "whole fused experts": ("gpt_oss_sinks_window", "MXFP4", ATTENTION),
    "turned experts": ("aria", "W4A16 for each", ATTENTION),
    "whole alternating experts": ("gpt_oss_sinks_window", "AWQ for each", ATTENTION),
}
BROKEN = "awq, wrong on one rank"
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
BROKEN_EXPERTS = "experts, wrong on one rank"
OFTEN = (
    "blocks",
    "rows",
    "awq",
    "experts",
    "whole fused experts",
    "turned experts",
    GATHERED,
    HYBRID,
    BROKEN,
    BROKEN_EXPERTS,
)  # by modules; `test_code_parts` has all formats


FUSED = (*(name for name in CASES if name != HYBRID), BROKEN)


@dataclass(frozen=True)
class Found:
    """On one rank."""

    # by a linear's name: the digest of its plain weight, and whether it is summed
    codes: dict[str, tuple[str, bool]]
    experts: dict[str, str]  # by a parameter's name: the digest of its plain matrices
    held: list[str]  # parameters
    least_bytes: int  # known before a weight is read
    weight_bytes: int
    what: str | None  # is fused
    tokens: list[list[int]]  # of rank 0


def digest(weight: Tensor) -> str:
    """Small: what one rank sends must not wait until the other one's is read."""
    return hashlib.sha256(weight.detach().contiguous().numpy().tobytes()).hexdigest()


def wrong_on_one_rank(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
    is_wrong = torch.distributed.get_rank() and codes.width == 32  # the output projection
    return product_of_plain(x, codes, bias) * (1.1 if is_wrong else 1)


def experts_wrong_on_one_rank(experts: nn.Module, *arguments: Tensor) -> Tensor:
    return experts_of_plain(experts, *arguments) * (1.1 if torch.distributed.get_rank() else 1)


KERNELS = {
    BROKEN: replace(OF_PLAIN, product=wrong_on_one_rank),
    BROKEN_EXPERTS: replace(OF_PLAIN, experts=experts_wrong_on_one_rank),
}


def parts_of(name: str, path: Path, *, is_fused: bool) -> tuple[LanguageParts, HalfSizes]:
    collectives, said = Collectives(torch.device("cpu")), list[HalfSizes]()
    half = load_half(
        path, Half.LANGUAGE, dtype=torch.float32, device="cpu", collectives=collectives,
        sharding=Sharding(2, expert_parallel=name.startswith("whole")),
        check_room=said.append,
        coded=KERNELS.get(name, CODED_KERNELS if is_fused else OF_PLAIN),
    )  # fmt: skip
    settle_linears(half, collectives)
    if is_fused:
        with torch.inference_mode():
            merge_inputs(half, torch.device("cpu"))
    return probed_parts(half, 16, "auto", collectives=collectives), said[0]


def with_kernels(parts: LanguageParts) -> LanguageParts:
    attention = CudaAttention(TorchAttention(), num_processors=2)
    kernels = CudaLayerKernels(torch.float32, attention, is_timed=False, collectives=parts.collectives)
    return on_kernels(replace(parts, attention=attention), kernels)


def run_rank(
    rank: int, num_ranks: int, meeting: Path, paths: dict[str, Path], is_fused: bool,
    calls: dict[str, list[Connection]], results: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    group = join_group(rank, num_ranks, meeting, "cpu")
    for name, path in paths.items():
        parts, sizes = parts_of(name, path, is_fused=is_fused)
        modules = [*parts.model.named_modules()]
        linears = [(name, each) for name, each in modules if isinstance(each, CodedLinear)]
        experts = [(name, each) for name, each in modules if isinstance(each, CodedExperts)]
        found = Found(
            {name: (digest(each.weight), isinstance(each, SummedLinear)) for name, each in linears},
            {name: digest(each.codes.plain(torch.float32)) for name, each in experts},
            [name for name, _ in parts.model.named_parameters()],
            sizes.num_bytes,
            parts.weight_bytes,
            None,
            [],
        )
        if is_fused:
            parts = with_kernels(parts)
            found = replace(found, what=what_is_fused(parts))
        model, progress = LanguageModel(parts), ForwardProgress()
        kv, width = memory(model) if name == HYBRID else BlockMemory(model.kv_layout, 4), model.feature_width
        if rank:
            results.send((name, found))
            follow(
                model, model.prepared_adapter, kv, group, calls[name][0], progress, torch.float32, width
            )  # fmt: skip
            continue
        leading = LeadingModel(model, calls[name], progress, torch.float32, group.device)
        tokens = answers(leading, model, kv)[0] if name == HYBRID else greedy(leading, kv)
        results.send((name, replace(found, tokens=tokens)))
        calls[name][0].close()
    results.send(None)
    leave_group()


class Checkpoints:
    """In a folder, each made when it is asked for."""

    def __init__(self, folder: Path):
        self._folder, self._plain = folder, {}

    def path(self, name: str) -> Path:
        self.plain(name)
        return self._folder / _case(name) / "stored"

    def plain(self, name: str) -> Any:
        """The model that it stands for."""
        if (name := _case(name)) not in self._plain:
            family, form, _ = CASES[name]
            _, expected = folders(family, form, self._folder / name)
            read = expected.model_class.from_pretrained
            self._plain[name] = read(self._folder / name / "plain", dtype=torch.float32).eval()
        return self._plain[name]


def _case(name: str) -> str:
    return name.partition(",")[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


def of_ranks(
    names: Iterable[str], checkpoints: Checkpoints, meeting: Path, *, is_fused: bool
) -> dict[str, list[Found]]:
    paths = {name: checkpoints.path(name) for name in names}
    ranks = results_of_ranks(run_rank, paths, meeting, paths, is_fused, deadline_s=400)
    return {name: [dict(own)[name] for own in ranks] for name in paths}


@pytest.fixture(scope="module")
def found(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return of_ranks(OFTEN, checkpoints, tmp_path_factory.mktemp("modules") / "meeting", is_fused=False)


@pytest.fixture(scope="module")
def fused(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return of_ranks(FUSED, checkpoints, tmp_path_factory.mktemp("fused") / "meeting", is_fused=True)


@pytest.mark.parametrize("name", OFTEN[:-3])
def test_ranks_hold_codes_of_their_shares_and_no_plain_weights(
    name: str, found, checkpoints: Checkpoints
) -> None:
    plain = checkpoints.plain(name)
    weights = {
        each.removesuffix(".weight"): own for each, own in plain.named_parameters() if is_of_text(each)
    }
    experts = {each: own for each, own in plain.named_parameters() if each.endswith(EXPERTS)}
    has_turned = CASES[name][0] in HOLDING  # columns first
    for rank, own in enumerate(found[name]):
        linears = {} if "MXFP4" in CASES[name] else weights
        assert {*own.codes} == {*linears} and {*own.experts} == {*experts}
        assert not {*own.held} & {*experts, *(f"{path}.weight" for path in linears)}
        plain_bytes = sum(each.nbytes for each in plain.parameters())
        assert own.least_bytes <= own.weight_bytes < plain_bytes // 2
        for path, (weight, is_summed) in own.codes.items():
            has_columns = path.endswith(("o_proj", "down_proj"))
            assert is_summed == (has_columns and name != GATHERED)
            assert weight == digest(weights[path].chunk(2, 1 if has_columns else 0)[rank]), path
        for path, matrices in own.experts.items():
            whole = experts[path].mT if has_turned else experts[path]
            share = share_of_experts(whole, path, rank, is_whole=name.startswith("whole"))
            assert matrices == digest(share), path
    assert found[name][0].tokens == generated(plain)


def test_mixers_of_ranks_keep_their_codes(found, checkpoints: Checkpoints) -> None:
    half = load_half(checkpoints.path(HYBRID), Half.LANGUAGE, dtype=torch.float32, device="cpu")
    model = LanguageModel.from_model(half, block_size=BLOCK_SIZE)
    assert found[HYBRID][0].tokens == answers(model, model, memory(model))[0]
    weights = {name for name, _ in half.named_parameters() if is_of_text(name)}
    for own in found[HYBRID]:
        assert {f"{path}.weight" for path in own.codes} == weights
        assert not {*own.held} & weights
    assert any("linear_attn.out_proj" in path for path in found[HYBRID][0].codes)


def share_of_experts(whole: Tensor, name: str, rank: int, *, is_whole: bool) -> Tensor:
    if is_whole:
        return whole.chunk(2)[rank]
    if name.endswith("down_proj"):
        return whole.chunk(2, 2)[rank]
    return torch.cat([half.chunk(2, 1)[rank] for half in whole.chunk(2, 1)], 1)


def test_what_is_wrong_on_one_rank_is_plain_on_all(found, checkpoints: Checkpoints) -> None:
    for own, right in zip(found[BROKEN], found["awq"], strict=True):
        outputs = {path for path in right.codes if path.endswith("o_proj")}
        assert {*own.codes} == {*right.codes} - outputs
        assert {*own.held} == {*right.held, *(f"{path}.weight" for path in outputs)}
    for own, right in zip(found[BROKEN_EXPERTS], found["experts"], strict=True):
        assert not own.experts and {*own.held} == {*right.held, *right.experts} and own.codes == right.codes
    for name in (BROKEN, BROKEN_EXPERTS):
        assert found[name][0].tokens == generated(checkpoints.plain(name))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_ranks_of_our_kernels_give_the_tokens_of_generate(name: str, fused, checkpoints: Checkpoints) -> None:
    assert fused[name][0].what == CASES[_case(name)][2]
    assert fused[name][0].tokens == generated(checkpoints.plain(name))
