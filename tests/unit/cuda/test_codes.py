"""A quantised checkpoint on a simulated GPU: linears keep their codes, which lie merged on the device, a
product is one launch, and no step reads the host. What the kernels compute: test_cuda_coded_*.py in
tests/unit/model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from cluster.model import language_parts
from cluster.model.cuda import choice
from cluster.model.cuda.coded_choice import keep_right_codes
from cluster.model.cuda.coded_products import CODED_ROWS, coded_product
from cluster.model.cuda.expert_products import experts_forward
from cluster.model.cuda.graphs import capture_cuda
from cluster.model.cuda.merging import merged_codes
from cluster.model.language_parts import load_parts
from cluster.model.layers.codes import CodedLinear, CodedProduct, CodeKind, Codes
from cluster.model.loading import Half, load_half
from cluster.model.sharding import UNDIVIDED
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import strict_triton
from tests.flow.quantised_folders import is_linear, plain
from tests.flow.quantised_formats import FORMS, in_form
from tests.unit.model.test_cuda_coded_models import OF_PLAIN, coded_experts


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as simulated:
        monkeypatch.setattr(hf.PreTrainedModel, "to", lambda model, _device: simulated.put(model))
        yield simulated


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    stored, _ = in_form(plain("llama", path), FORMS["AWQ"], is_linear)
    return stored.save(path / "stored")


def coded(model: nn.Module) -> list[CodedLinear]:
    return [each for each in model.modules() if isinstance(each, CodedLinear)]


def test_codes_lie_merged_on_the_device(folder: Path, device: SimulatedCuda) -> None:
    model: Any = load_half(folder, Half.LANGUAGE, dtype=torch.float32, device="cuda", coded=OF_PLAIN)
    assert len(coded(model)) == 21
    assert {each.numbers.device.type for each in coded(model)} == {"cuda"}
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linears in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
            whole = merged_codes([linear.codes for linear in linears])
            assert whole is not None and whole.numbers.data_ptr() == linears[0].numbers.data_ptr()


def test_codes_of_experts_go_to_the_device_one_by_one(tmp_path: Path, device: SimulatedCuda) -> None:
    """And are all that is there of their weights."""
    stored, _ = in_form(plain("qwen3_moe", tmp_path), FORMS["AWQ"], is_linear)
    path = stored.save(tmp_path / "stored")
    model: Any = load_half(path, Half.LANGUAGE, dtype=torch.float32, device="cuda", coded=OF_PLAIN)
    experts = coded_experts(model)
    assert len(experts) == 6 and {each.numbers.device.type for each in experts.values()} == {"cuda"}
    assert not [name for name, _ in model.named_parameters() if ".experts." in name]


def test_kernels_that_compute_nothing_leave_plain_weights(folder: Path, device, monkeypatch, caplog) -> None:
    """A worker's own load: triton is in form only."""
    monkeypatch.setattr(language_parts, "has_triton", lambda: True)
    monkeypatch.setattr(choice, "has_triton", lambda: False)  # attention is not what is tried
    with strict_triton() as launches:
        parts = load_parts(
            folder, dtype=torch.float32, device="cuda", block_size=16, kv_cache_dtype="auto",
            weight_dtype="auto", sharding=UNDIVIDED, weight_cache=None,
        )  # fmt: skip
    assert "coded_rows" in {launch.kernel for launch in launches}
    assert not coded(parts.model) and "dequantised, because its product of 1 rows is wrong" in caplog.text
    assert parts.scratch_bytes == 0


@pytest.mark.parametrize("has_bias", [False, True])
def test_kernels_that_lose_the_smallest_numbers_leave_plain_weights(has_bias: bool, caplog) -> None:
    """E4M3 has eight numbers below its normal ones, too small for an error of a whole product."""
    codes = Codes(
        CodeKind.E4M3, (torch.arange(64 * 256) % 127).to(torch.uint8).view(64, 256), torch.ones(64, 1), None,
        256, 256, 1,
    )  # fmt: skip

    def without(least: float) -> CodedProduct:
        def product(x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
            weight = codes.plain(torch.float32)
            more = None if bias is None else bias.float()
            return F.linear(x.float(), weight * (weight.abs() >= least), more).to(x.dtype)

        return product

    for least, num_left in ((0.0, 1), (2.0**-6, 0)):
        linear = CodedLinear(codes, torch.randn(64).bfloat16() if has_bias else None, without(least))
        model = nn.ModuleDict({"only": linear})
        keep_right_codes(model, torch.bfloat16, experts_forward)
        assert len(coded(model)) == num_left
    assert "its numbers are not those of its codes" in caplog.text


@pytest.mark.parametrize(
    ("num_tokens", "kernel"),
    [(1, "coded_rows"), (CODED_ROWS, "coded_rows"), (CODED_ROWS + 1, "plain_weight")],
)
def test_a_product_is_one_launch_and_may_be_recorded(num_tokens: int, kernel: str, device) -> None:
    words = torch.zeros(48, 2, 16, dtype=torch.int32, device="cuda")
    scales = torch.ones(48, 4, dtype=torch.float16, device="cuda")
    codes = Codes(CodeKind.NIBBLE, words, scales, None, 256, 64, 1)
    with strict_triton() as launches, torch.inference_mode():
        x = torch.ones(num_tokens, 256, dtype=torch.bfloat16, device="cuda")
        before = device.num_syncs
        replay = capture_cuda()(lambda: coded_product(x, codes, None))
        assert replay().shape[1:] == (num_tokens, 48) and device.num_syncs == before
    assert {launch.kernel for launch in launches} == {kernel}
    assert all(launch.arguments["zeros"] is None for launch in launches)
