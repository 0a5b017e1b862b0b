"""Two ranks on simulated GPUs, which meet over Gloo: recorded steps of any kind, with their collectives, give
what one process gives unrecorded; and a rank that cannot record keeps the other one from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from cluster.kvcache.memory import BlockMemory
from cluster.model.collectives import Collectives
from cluster.model.cuda import graphs
from cluster.model.cuda.graphs import RecordedSizes, recording_of
from cluster.model.cuda.merging import merge_shares
from cluster.model.language import LanguageModel
from cluster.model.language_parts import probed_parts
from cluster.model.loading import Half, load_half
from cluster.model.parallel import ForwardProgress, LeadingModel, follow, join_group, leave_group
from cluster.model.rank_linears import settle_linears
from cluster.model.sharding import Sharding
from cluster.model.step_model import StepModel
from tests.fakes.cuda_device import SimulatedCuda
from tests.fakes.cuda_ranks import collectives_on
from tests.fakes.processes import results_of_ranks
from tests.fakes.recorded_attention import RecordedAttention
from tests.unit.cuda.recorded_and_plain import NUM_BLOCKS, SIZES
from tests.unit.cuda.test_recorded_steps import ANSWERS, Answering, mixed_steps

REPORTED, SILENT, FAILING = "prefill, which reports its layers", "decode", "a rank that cannot record"
CASES = {
    REPORTED: RecordedSizes([], SIZES.mixed, has_marks=True),
    SILENT: SIZES,
    FAILING: SIZES,
}
WIDTH = 32


@dataclass(frozen=True)
class Found:
    """Of one rank in one case. The fields after the first are rank 0's."""

    num_unrecorded: int  # forwards and decodes
    recorded_tokens: int = 0
    logits: tuple[np.ndarray, ...] = ()
    num_syncs: int = 0  # of a decode over tokens on the device
    has_reported: bool = False


class Told:
    """Keeps when each layer is ready."""

    def __init__(self):
        self.layers: list[Callable[[], bool]] = []

    def __call__(self, _layer_idx: int, ready: Callable[[], bool] | None = None, /) -> None:
        assert ready is not None
        self.layers.append(ready)


def whole() -> hf.PreTrainedModel:
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=101, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=96, initializer_range=0.15,
        eos_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config).eval()


def logits_of(
    model: StepModel, kv: BlockMemory, on_layer: Callable[..., None] | None, *, decodes: bool
) -> list[Tensor]:
    found = [model.forward(chunks, kv, on_layer).cpu().clone() for chunks in mixed_steps()]
    if decodes:
        found.append(model.decode(*ANSWERS, kv).cpu().clone())
    return found


def run_rank(
    rank: int, num_ranks: int, meeting: Path, path: Path, calls: dict[str, list[Connection]],
    results: Connection,
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    group = replace(join_group(rank, num_ranks, meeting, "cpu"), device=torch.device("cuda", 0))
    for name, sizes in CASES.items():
        half = load_half(path, Half.LANGUAGE, dtype=torch.float32, device="cpu", sharding=Sharding(2))
        with SimulatedCuda() as device, collectives_on(device):
            collectives = Collectives(group.device)
            assert settle_linears(half, collectives) == 2 * 7 + 2
            merge_shares(device.put(half), group.device)
            parts = probed_parts(half, 16, "auto", collectives=collectives)
            attention = Answering() if name == FAILING and rank else RecordedAttention()
            model = LanguageModel(replace(parts, attention=attention))
            recording = recording_of(model, sizes)
            assert recording is not None
            kv = BlockMemory(model.kv_layout, NUM_BLOCKS + recording.num_blocks, "cuda")
            steps, progress = recording.over(model, kv), ForwardProgress()
            assert isinstance(steps, graphs.GraphedModel)
            with (
                mock.patch.object(model, "forward", wraps=model.forward) as forward,
                mock.patch.object(model, "decode", wraps=model.decode) as decode,
            ):
                if rank:
                    follow(
                        steps, kv, group, calls[name][0], progress,
                        torch.float32, WIDTH
                    )  # fmt: skip
                    num_layers = model.num_layers if name == REPORTED else 0
                    assert progress.has((len(list(mixed_steps())), num_layers))
                    results.send((name, Found(forward.call_count + decode.call_count)))
                    continue
                leading = LeadingModel(steps, calls[name], progress, torch.float32, group.device)
                told = Told()
                logits = logits_of(leading, kv, told if name == REPORTED else None, decodes=name != REPORTED)
                num_syncs = 0
                if name == SILENT:
                    tokens, contexts, deltas, tables = ANSWERS
                    on_device = torch.tensor(tokens, device="cuda")
                    before = device.num_syncs
                    again = leading.decode(on_device, contexts, deltas, tables, kv)
                    num_syncs = device.num_syncs - before
                    logits.append(again.cpu().clone())
                found = Found(
                    forward.call_count + decode.call_count, leading.recorded_tokens,
                    tuple(each.numpy() for each in logits), num_syncs,
                    bool(told.layers) and all(ready() for ready in told.layers),
                )  # fmt: skip
                results.send((name, found))
                calls[name][0].close()
    results.send(None)
    leave_group()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    whole().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Found]:
    """By case and rank."""
    meeting = tmp_path_factory.mktemp("group") / "meeting"
    sent = results_of_ranks(run_rank, CASES, meeting, path)
    return {(name, rank): result for rank, results in enumerate(sent) for name, result in results}


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_of_ranks_are_those_of_one_process(name: str, found, path: Path) -> None:
    leader, follower = found[name, 0], found[name, 1]
    model = LanguageModel.from_model(whole())
    kv = BlockMemory(model.kv_layout, NUM_BLOCKS)
    expected = logits_of(model, kv, None, decodes=name != REPORTED)
    if name == SILENT:
        expected.append(expected[-1])  # the same tokens again
    for ours, other in zip(leader.logits, expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(ours), other, rtol=1e-4, atol=1e-4)
    num_mixed = len(list(mixed_steps()))
    assert (leader.num_unrecorded, follower.num_unrecorded) == (
        (num_mixed,) * 2 if name == FAILING else (0, 0)
    )
    assert leader.recorded_tokens == (0 if name == FAILING else SIZES.mixed[-1].num_tokens)
    assert leader.has_reported == (name == REPORTED)
    # the inputs of the step before must have been copied before they are overwritten
    assert leader.num_syncs == (name == SILENT)
