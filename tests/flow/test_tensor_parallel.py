"""Tensor and expert parallelism over Gloo: two processes read their shares of a checkpoint and answer like
one process, in every family that transformers can share out. In every run those that are shared out in
different ways."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import re
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file

from cluster.config.adapters import NO_ADAPTERS, Adapter, AdapterRoom, read_adapters
from cluster.config.settings import REPOSITORY, ClusterArgs
from cluster.errors import ConfigError
from cluster.kvcache.memory import BlockMemory
from cluster.model.language import FeatureSlice, LanguageModel, SequenceChunk
from cluster.model.loading import Half, load_half
from cluster.model.logprobs import PromptScores
from cluster.model.parallel import (
    ForwardProgress,
    LeadingModel,
    ParallelGroup,
    follow,
    join_group,
    leave_group,
    smallest_of,
)
from cluster.model.sharding import Sharding
from cluster.model.step_model import StepModel
from cluster.worker.setup import set_up
from decode_service.service import decode_worker
from tests.fakes.processes import results_of_ranks
from tests.flow.adapter_folders import ATTENTION, LATENT, MIXERS, MLP, save_adapter
from tests.flow.hybrid_models import CONFIGS as HYBRIDS
from tests.flow.hybrid_models import save_hybrid
from tests.flow.quantised_folders import (
    FP8_ENTRY,
    MXFP4_ENTRY,
    fused_fp8,
    in_fp8_blocks,
    in_mxfp4,
    is_expert,
    is_linear,
    plain,
    quantised,
    with_entries,
)
from tests.flow.quantised_formats import FORMS, in_form
from tests.flow.state_pair import StatePair
from tests.flow.tiny_media_models import MEDIA_FAMILIES
from tests.flow.tiny_models import DEEPSEEK, TEXT, TEXT_FAMILIES

BLOCK_SIZE = 4
NUM_BLOCKS = 14  # of KV; states lie behind them
SLOTS = (1, 2)  # adapters of the two prompts, where there are some
TABLES = ([3, 1, 2, 7, 9], [4, 5, 6, 8, 10])
FAMILIES = {**TEXT_FAMILIES, **MEDIA_FAMILIES}
HUB, WHOLE = "_of_the_hub", "_whole_experts"  # endings of names: how experts lie in the folder and on ranks
REFUSED: dict[str, str] = {
    "gemma3n_layer_inputs": "cannot distribute model type 'gemma3n_text'",
    "step3p7": "only give ranks whole ones: set expert_parallel true",
    f"llama{WHOLE}": "has no experts that ranks could have whole: set expert_parallel false",
    f"no_experts{WHOLE}": "has no experts that ranks could have whole: set expert_parallel false",
    f"three_experts{WHOLE}": "Cannot evenly shard 3 experts across 2 expert-parallel ranks",
}
if not hf.HunYuanVLTextConfig.base_model_tp_plan:  # transformers 5.23
    REFUSED["hunyuan_vl"] = "cannot distribute model type 'hunyuan_vl'"
# By how linears, norms and experts are dealt out, by positions and attention, and by where the text model
# lies. The others are like one of them, and `test_families` has their arithmetic in one process.
DIFFERENT = (
    "llama", "qwen3", "phi3_window", "qwen3_moe", "gpt_oss_sinks_window", "olmo2", "glm4",
    "cohere2_logit_scale", "deepseek_v3_mla", "gemma4_layer_inputs",
    "qwen2_vl", "qwen3_omni", "kimi_k25", "gemma3", "idefics3", "llama4",
    "qwen3_vl_moe",
    "qwen3_5_moe", "falcon_h1",  # states; others: `test_hybrid_ranks`
)  # fmt: skip
# Experts with biases and transposed, after a dense layer, beside shared ones, in a part of the width; square
# ones, in both layouts
WHOLE_EXPERTS = tuple(
    f"{name}{WHOLE}" for name in (
        "qwen3_moe", "gpt_oss_sinks_window", "deepseek_v3_mla", "qwen3_omni", "muse_spark", "step3p7", "aria",
        "qwen3_vl_moe", f"qwen3_vl_moe{HUB}", "qwen3_moe_w4a16", "gpt_oss_mxfp4", "llama", "no_experts",
        "three_experts", "qwen3_vl_moe_fp8", "gpt_oss_sinks_window_w4a16", "aria_w4a16",
    )
)  # fmt: skip
QUANTISED = {
    "llama_fp8": ("llama", in_fp8_blocks, is_linear, FP8_ENTRY),
    "qwen3_5_moe_fp8": ("qwen3_5_moe", in_fp8_blocks, is_linear, FP8_ENTRY),
    "gpt_oss_mxfp4": ("gpt_oss_sinks_window", in_mxfp4, is_expert, MXFP4_ENTRY),
}
IN_FORMS = {  # packed along rows; experts, one by one; blocks that a rank's share does not fill
    "llama_awq": ("llama", "AWQ"),
    "qwen3_moe_w4a16": ("qwen3_moe", "W4A16 with zeros"),
    "llama_fp8_uneven": ("llama", "fp8 in blocks that are not filled"),
}
EXPERTS = {  # quantised, transposed in one tensor; an entry for each, also of models with columns first
    "qwen3_vl_moe_fp8": lambda original: fused_fp8(original, 24, is_hub=True)[0],
    "qwen3_vl_moe_awq": lambda original: in_form(with_entries(original), FORMS["AWQ"], is_linear)[0],
    "gpt_oss_sinks_window_w4a16": lambda original: in_form(
        with_entries(original, columns_first=True, alternates=True), FORMS["W4A16"], is_linear
    )[0],
    "aria_w4a16": lambda original: in_form(
        with_entries(original, columns_first=True), FORMS["W4A16"], is_linear
    )[0],
    "llama4_entries": lambda original: with_entries(original, columns_first=True),
}
ADAPTED = "_adapted"
# Linears that are divided in pieces, or whole at the layer's ends; beside experts; latent projections
ADAPTED_FAMILIES = tuple(
    f"{name}{ADAPTED}" for name in ("llama", "phi3_window", "qwen3_moe", "deepseek_v3_mla", "qwen3_5_text")
)
OFTEN = (*DIFFERENT, *QUANTISED, *IN_FORMS, *EXPERTS, f"qwen3_vl_moe{HUB}", *WHOLE_EXPERTS, *ADAPTED_FAMILIES)
RARELY = (
    *(name for name in FAMILIES if name not in OFTEN),
    *(f"{name}{WHOLE}" for name in ("mixtral", "mistral4_mla", "glm4v_moe", "kimi_k25", "deepseek_ocr2")),
)
Answers = tuple[list[list[int]], torch.Tensor]


def adapters_in(folder: Path) -> list[Adapter]:
    return read_adapters({path.name: str(path) for path in folder.glob("adapters/*")}, max_rank=16)


def answers(
    model: StepModel, language: LanguageModel, kv: BlockMemory, slots: Sequence[int] = (0, 0)
) -> Answers:
    """Greedy tokens of two prompts, of which one comes in two chunks and has rows in place of tokens, one of
    them from copied blocks on; then the logits of two tokens at once, and log-probabilities of tokens of the
    second prompt."""
    rows = torch.randn(3, language.feature_width, generator=torch.Generator().manual_seed(5))
    features = (FeatureSlice(1, rows),)
    scores = PromptScores([0, 1, 3], [31, 32, 34], 2)
    of_first, of_second = slots
    pairs = [StatePair(language, NUM_BLOCKS + 2 * i * language.state_blocks) for i in range(2)]
    # of clips with sound, positions may be broken numbers
    positions = torch.arange(6) + 0.5 if language.family == "llama" else torch.arange(6)
    first = [
        SequenceChunk(
            list(range(5, 11)), positions, 0, TABLES[0], features, num_logits=0, adapter=of_first,
            states=pairs[0].of(6),
        ),
        SequenceChunk(
            list(range(30, 35)), torch.arange(5), 0, TABLES[1], scores=scores, adapter=of_second,
            states=pairs[1].of(5),
        ),
    ]  # fmt: skip

    def decode(new: list[int], step: int, tables: Sequence[Sequence[int]]) -> list[int]:
        lens = [9 + step, 5 + step]
        if not language.state_blocks:
            # as a forward ahead has them: on the device
            tokens = torch.tensor(new) if step % 2 else new
            return model.decode(tokens, lens, [0, 0], tables, kv, slots).argmax(-1).tolist()
        if step % 2:
            last = [pair.of(1)[0] for pair in pairs]
            return model.decode(new, lens, [0, 0], tables, kv, slots, last).argmax(-1).tolist()
        chunks = [
            SequenceChunk([token], at, at, table, states=pair.of(1), adapter=slot)
            for token, at, table, pair, slot in zip(new, lens, tables, pairs, slots, strict=True)
        ]
        return model.forward(chunks, kv, _sent).argmax(-1).tolist()

    last = [
        SequenceChunk([40, 41, 42], torch.arange(6, 9), 6, TABLES[0], adapter=of_first, states=pairs[0].of(3))
    ]
    second_token = model.forward(first, kv, _sent)[0].argmax()
    tokens = [[int(model.forward(last, kv, _sent)[0].argmax()), int(second_token)]]
    for step in range(4):
        tokens.append(decode(tokens[-1], step, TABLES))
    model.copy_blocks(TABLES[1][:3], [11, 12, 13], kv)
    for step in range(4, 6):
        tokens.append(decode(tokens[-1], step, (TABLES[0], [11, 12, 13])))
    both = SequenceChunk([7, 8], 15, 15, TABLES[0], num_logits=2, adapter=of_first, states=pairs[0].of(2))
    verified = model.forward([both], kv, _sent).flatten()
    return tokens, torch.cat([verified, torch.tensor([each.drawn for each in scores.found()])])


def _sent(_layer_idx: int, _ready: Callable[[], bool] | None = None, /) -> None:
    """A worker that sends KV asks for its layers."""


def num_forwards(language: LanguageModel) -> int:
    """Of `answers`: with states, every second step is one, too."""
    return 6 if language.state_blocks else 3


def memory(language: LanguageModel) -> BlockMemory:
    return BlockMemory(language.kv_layout, NUM_BLOCKS + 4 * language.state_blocks)


def run_rank(
    rank: int, num_ranks: int, meeting: Path, paths: dict[str, Path], calls: dict[str, list[Connection]],
    results: Connection,
) -> None:  # fmt: skip
    """One after another, on the pipes `calls` of each; sends what rank 0 found out. In a group each: the
    threads and sockets that transformers makes for a model end with the group."""
    torch.set_num_threads(1)
    gc.freeze()
    for number, (name, path) in enumerate(paths.items()):
        group = join_group(rank, num_ranks, meeting.with_name(f"{meeting.name}-{number}"), "cpu")
        assert smallest_of(group, 5 - rank) == 6 - num_ranks
        try:
            found = run_model(group, path, Sharding(num_ranks, name.endswith(WHOLE)), calls[name])
        except ConfigError as error:
            found = str(error)
        leave_group()
        gc.collect()
        gc.freeze()  # classes of the model's type are not looked at again
        if found is not None:
            # by value: the memory of a tensor that a pipe passes on ends with this process
            results.send_bytes(pickle.dumps((name, found)))
    results.send(None)


def run_model(
    group: ParallelGroup, path: Path, sharding: Sharding, calls: list[Connection]
) -> tuple[Any, ...] | None:
    """What rank 0 found out. None: it is another rank."""
    adapters = adapters_in(path)
    room = AdapterRoom(2, 16, adapters[:1], is_open=True) if adapters else NO_ADAPTERS
    model = LanguageModel.load(
        path, dtype=torch.float32, block_size=BLOCK_SIZE, sharding=sharding, adapters=room
    )
    for slot, adapter in enumerate(adapters[1:], 2):
        model.write_adapter(slot, model.read_adapter(adapter))
    kv, progress = memory(model), ForwardProgress()
    if group.rank > 0:
        follow(model, kv, group, calls[0], progress, torch.float32, model.feature_width)
        assert progress.has((num_forwards(model), model.num_layers))
        return None
    leading = LeadingModel(model, calls, progress, torch.float32, group.device)
    found = answers(leading, model, kv, SLOTS if adapters else (0, 0))
    for call in calls:
        call.close()
    return *found, progress.now, model.weight_bytes, model.kv_layout.block_bytes


@pytest.fixture(scope="module", params=[OFTEN], ids=["often"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for name in request.param:
        save(name.removesuffix(WHOLE), folder / name)
    return {name: folder / name for name in request.param}


def save(name: str, folder: Path) -> None:
    if name in QUANTISED:
        family, matrix, is_chosen, entry = QUANTISED[name]
        checkpoint = quantised(plain(family, folder), matrix, is_chosen)
        checkpoint.config["quantization_config"] = entry
        checkpoint.save(folder)
    elif name in EXPERTS:
        EXPERTS[name](plain(name.rpartition("_")[0], folder)).save(folder)
    elif name in IN_FORMS:
        family, form = IN_FORMS[name]
        in_form(plain(family, folder), FORMS[form], is_linear)[0].save(folder)
    elif name == "no_experts":  # of a family that has some
        config = hf.DeepseekV3Config(**{**TEXT, **DEEPSEEK, "first_k_dense_replace": 3})
        hf.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    elif name == "three_experts":
        hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**TEXT, num_experts=3)).save_pretrained(folder)
    elif name in HYBRIDS:
        save_hybrid(folder, name)
    elif name.endswith(ADAPTED):
        family = name.removesuffix(ADAPTED)
        if family in HYBRIDS:
            whole = hf.AutoModelForCausalLM.from_pretrained(save_hybrid(folder, family))
        else:
            whole = FAMILIES[family]().model
            whole.save_pretrained(folder)
        # PEFT refuses out_proj of Mamba's kind
        linears = (*ATTENTION, *MLP, *LATENT, *MIXERS[: -1 if family == "falcon_h1" else None])
        save_adapter(whole, folder / "adapters" / "all", targets=linears, r=8)
        save_adapter(whole, folder / "adapters" / "out", seed=1, targets=("o_proj",), r=4, lora_alpha=16)
    else:
        FAMILIES[name.removesuffix(HUB)]().model.save_pretrained(folder)
        if name.endswith(HUB):
            transpose_experts(folder / "model.safetensors")


def transpose_experts(file: Path) -> None:
    weights = load_file(file)
    for name in filter(re.compile(r"experts\.(gate_up|down)_proj$").search, weights):
        weights[name] = weights[name].transpose(1, 2).contiguous()
    save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def shared(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple]:
    """By family: what two ranks found out."""
    return answers_of_ranks(checkpoints, tmp_path_factory.mktemp("group") / "meeting")


def answers_of_ranks(paths: dict[str, Path], meeting: Path, num_ranks: int = 2) -> dict[str, tuple]:
    """By name: what `answers` gives, progress, and bytes of weights and of a block; or why it was refused."""
    return dict(results_of_ranks(run_rank, paths, meeting, paths, num_ranks=num_ranks)[0])


def each_of(is_refused: bool) -> pytest.MarkDecorator:
    names = [(OFTEN, name) for name in OFTEN] + [(RARELY, name) for name in RARELY]
    chosen = [each for each in names if (each[1] in REFUSED) == is_refused]
    return pytest.mark.parametrize(
        ("checkpoints", "name"),
        [
            pytest.param(group, name, id=name, marks=pytest.mark.slow if group is RARELY else ())
            for group, name in chosen
        ],
        indirect=["checkpoints"],
        scope="module",
    )


@each_of(is_refused=False)
def test_two_ranks_answer_like_one_process(name: str, shared, checkpoints: dict[str, Path]) -> None:
    tokens, verified, progress, weight_bytes, block_bytes = shared[name]
    adapters = adapters_in(checkpoints[name])
    if adapters:
        room = AdapterRoom(2, 16, adapters, is_open=True)
        model = LanguageModel.load(
            checkpoints[name], dtype=torch.float32, block_size=BLOCK_SIZE, adapters=room
        )
    else:
        half = load_half(checkpoints[name], Half.LANGUAGE, dtype=torch.float32, device="cpu")
        model = LanguageModel.from_model(half, block_size=BLOCK_SIZE)
    slots = SLOTS if adapters else (0, 0)
    expected = answers(model, model, memory(model), slots)
    assert tokens == expected[0]
    torch.testing.assert_close(verified, expected[1], rtol=1e-4, atol=1e-4)
    assert progress == (num_forwards(model), model.num_layers)
    assert weight_bytes < model.weight_bytes
    assert block_bytes in (model.kv_layout.block_bytes // 2, model.kv_layout.block_bytes)


@each_of(is_refused=True)
def test_a_family_that_cannot_be_shared_out_is_refused(name: str, shared) -> None:
    assert REFUSED[name] in shared[name]


def test_heads_that_cannot_be_dealt_out_evenly_are_refused(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match="2 KV heads cannot be distributed evenly to 4 ranks"):
        load_half(
            checkpoints["llama"], Half.LANGUAGE, dtype=torch.float32, device="cpu", sharding=Sharding(4)
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_dtype": "int8"}, "weight_dtype int8 needs tensor_parallel_size 1"),
        pytest.param(
            {"expert_parallel": True},
            "has no experts that ranks could have whole",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_shared_out_is_refused_and_leaves_no_process(changes, message) -> None:
    settings = {"model": str(REPOSITORY / "deploy" / "demo_model"), "tensor_parallel_size": 2, **changes}
    args = ClusterArgs.model_validate(settings)
    with pytest.raises(ConfigError, match=message):
        decode_worker(args, set_up(args, "d"))
    assert not multiprocessing.active_children() and not children_of(os.getpid())


def children_of(pid: int) -> list[str]:
    """Command lines of rank processes."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [Path(f"/proc/{child}/cmdline").read_bytes().decode() for child in pids]
    return [line for line in found if "cluster.worker.follower" in line]


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="tensor_parallel_size 2 needs as many GPUs; this replica sees 1"):
        join_group(0, 2, Path("meeting"), "cuda")


def test_progress_is_reached_layer_by_layer_and_when_the_device_has_caught_up() -> None:
    progress, is_written = ForwardProgress(), False
    assert progress.has((0, 0))
    progress.begin()
    assert not progress.has((1, 1))
    progress.layer(lambda: is_written)
    assert progress.now == (1, 1) and not progress.has((1, 1))
    is_written = True
    assert progress.has((1, 1)) and not progress.has((1, 2)) and not progress.has((2, 1))
    progress.end()
    assert progress.has((1, 2)) and not progress.has((2, 1))
