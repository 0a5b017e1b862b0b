"""Which launch multiplies few tokens with a model's matrices, on a simulated GPU: the fastest that is right.
What the launches compute: test_cuda_layer_kernels.py in tests/unit/model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cluster.model.cuda.capture import Replay
from cluster.model.cuda.product_choice import NUM_ROUNDS, TrialProduct, measure
from cluster.model.cuda.products import CANDIDATES, SEVERAL, SMALLEST, ProductChoice, ProductCut, product
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.strict_triton import Launch, strict_triton

WIDTH, OUTPUTS = 32, 48
NARROW, WIDE = CANDIDATES[64]


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    with SimulatedCuda() as simulated, strict_triton():
        yield simulated


def matrices(dtype: torch.dtype = torch.bfloat16, count: int = 2) -> list[TrialProduct]:
    return [TrialProduct(torch.randn(OUTPUTS, WIDTH).to("cuda", dtype), None) for _ in range(count)]


class Products:
    """Our products, some of which are wrong or do not compile; the time of each that was recorded."""

    def __init__(self, seconds: dict[ProductCut | None, float], wrong: ProductCut, broken: ProductCut):
        self._seconds, self._wrong, self._broken = seconds, wrong, broken
        self._last: ProductCut | None = None
        self.recorded: list[ProductCut | None] = []

    def times(self, matrix: TrialProduct, x: Tensor, cut: ProductCut | None) -> Tensor:
        if cut is not None and cut == self._broken:
            raise RuntimeError("out of registers")
        self._last = cut
        return F.linear(x, matrix.weight, matrix.bias)[None] * (2 if cut == self._wrong else 1)

    def seconds(self, _replay: Replay) -> float:
        self.recorded.append(self._last)
        return self._seconds.get(self._last, 1.0)


def test_the_fastest_product_that_is_right_serves(device: SimulatedCuda, monkeypatch, caplog) -> None:
    """Which may be the library's."""
    of = Products({SMALLEST: 1.5, SEVERAL: 0.5, NARROW: 0.9, WIDE: 0.1}, wrong=WIDE, broken=SEVERAL)
    monkeypatch.setattr(TrialProduct, "times", lambda matrix, x, cut: of.times(matrix, x, cut))
    choice, every = ProductChoice(), matrices()
    measure(every, choice, of.seconds)
    weight = every[1].weight
    rows = {count: torch.zeros(count, WIDTH, dtype=torch.bfloat16) for count in (1, 2, 16, 17, 64, 65)}
    found = {count: choice.cut(x, weight) for count, x in rows.items()}
    assert found == {1: None, 2: None, 16: None, 17: NARROW, 64: NARROW, 65: None}
    assert set(of.recorded) == {None, SMALLEST, NARROW}
    assert "out of registers" in caplog.text and "its numbers are wrong by 100.0 %" in caplog.text
    other = torch.zeros(OUTPUTS, 2 * WIDTH, dtype=torch.bfloat16)
    assert choice.cut(rows[16], other) == SEVERAL  # as without a measurement
    assert choice.cut(rows[1].float(), weight.float()) is None


def test_matrices_of_one_size_are_measured_together(device: SimulatedCuda, monkeypatch) -> None:
    """Each once in a round, recorded: nothing is read from the cache, and no launch waits for the host."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(F, "linear", lambda x, weight, bias=None: launched.append(x.shape) or x @ weight.T)
    every, before = matrices(count=3), device.num_syncs
    with strict_triton() as launches:
        measure(every, ProductChoice())
    limits = list(CANDIDATES)
    assert {shape[0] for shape in launched} == set(limits)
    # our launches compute nothing here, so the library is all that is recorded
    in_recordings = len(launched) - sum(len(tried) for tried in CANDIDATES.values())
    assert in_recordings == len(limits) * 3 * len(every)  # two runs before each recording
    tried = [launch for launch in launches if launch.kernel.startswith("product")]
    assert len(tried) == sum(len(each) for each in CANDIDATES.values())
    assert device.num_syncs - before >= len(limits) * NUM_ROUNDS


def test_a_choice_is_what_a_product_goes_by(device: SimulatedCuda) -> None:
    choice, weight = ProductChoice(), matrices()[0].weight
    choice.set(weight, {1: None, 16: SEVERAL, 64: WIDE})

    def launched(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
        with strict_triton() as launches, torch.inference_mode():
            x = torch.ones(num_tokens, WIDTH, dtype=dtype, device="cuda")
            assert product(x, weight.to(dtype), None, choice).shape[1:] == (num_tokens, OUTPUTS)
        return launches

    assert [len(launched(count)) for count in (1, 2, 16, 24, 64, 65)] == [0, 1, 1, 1, 1, 0]
    assert {each.kernel for each in launched(16)} == {"product_rows"}
    (launch,) = launched(24)
    assert launch.kernel == "product_tile" and launch.arguments["ROWS"] == 64
    assert launch.arguments["TILE"] == WIDE.outputs and not launched(24, torch.float32)


def test_a_start_goes_on_where_nothing_can_be_measured(device: SimulatedCuda, caplog) -> None:
    def fails(_replay: Replay) -> float:
        raise torch.OutOfMemoryError("no memory for a graph")

    every, choice = matrices(), ProductChoice()
    measure(every, choice, fails)
    assert choice.cut(torch.zeros(2, WIDTH).bfloat16(), every[0].weight) == SEVERAL
    assert "not measured: no memory for a graph" in caplog.text


def test_float32_stays_the_librarys(device: SimulatedCuda) -> None:
    recorded: list[Replay] = []
    measure(matrices(torch.float32), ProductChoice(), lambda replay: recorded.append(replay) or 1.0)
    assert not recorded
