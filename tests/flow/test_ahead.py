"""The law where the next forward is enqueued before tokens are read, as on a GPU. Here the CPU computes it at
once, from the tokens that the host has not read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from bench.workload import Answer, Case, Reference, make_cases
from cluster.engine.ahead import ForwardAhead
from cluster.model.language import LanguageModel
from cluster.structure.grammar import compile_structure
from cluster.structure.matcher import Matcher
from cluster.structure.vocabulary import Vocabulary, VocabularySource
from tests.fakes.structures import of_schema
from tests.flow.hybrid_models import save_hybrid
from tests.flow.local_cluster import let_all_in, local_cluster
from tests.flow.losses import Loss, StandIns
from tests.flow.test_law import MAX_TOKENS, MODEL, check_all, cluster_args
from tests.flow.test_windows import window_args
from tests.flow.test_worker_loss import answer, asked
from tests.flow.test_worker_loss import expected as undisturbed  # noqa: F401
from tests.flow.text_models import BLOCK_SIZE, SIZES, answers, draw_prompts, generated_by, save_mistral

NUM_TOKENS = 40
STRUCTURE = of_schema(
    {
        "type": "object",
        "properties": {
            "kind": {"enum": ["person", "thing"]},
            "name": {"type": "string", "pattern": "^[a-z]{30}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
        },
        "required": ["kind", "name", "age"],
        "additionalProperties": False,
    },
    is_compact=True,
)
ROLES = [
    pytest.param((0, 1, 1), id="p-d"),
    pytest.param((0, 0, 0, 0, 0, 1), id="whole", marks=pytest.mark.slow),
]


@pytest.fixture(autouse=True)
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every worker runs ahead. Returns how many choices each forward ahead computes."""
    numbers: list[int] = []
    plan = ForwardAhead.plan

    def counted(self, batch, *, is_alone):
        choices = plan(self, batch, is_alone=is_alone)
        numbers.append(len(choices))
        return choices

    monkeypatch.setattr(ForwardAhead, "plan", counted)
    monkeypatch.setattr("cluster.engine.worker.may_run_ahead", lambda device: True)
    return numbers


@pytest.fixture(scope="module")
def expected() -> list[tuple[Case, Answer]]:
    reference = Reference(MODEL)
    return [(case, reference.answer(case, MAX_TOKENS)) for case in make_cases(5, 12)]


@pytest.mark.parametrize(
    "num_replicas",
    [
        pytest.param((1, 1, 1), id="e-p-d"),
        pytest.param((0, 0, 0, 0, 0, 1), id="whole", marks=pytest.mark.slow),
    ],
)
async def test_answers_equal_generate(expected, num_ahead, num_replicas):
    async with local_cluster(cluster_args(48), num_replicas) as cluster:
        await check_all(cluster, expected, 8)
    assert any(num_ahead)


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
async def test_a_lost_worker_costs_no_token(stand_ins: StandIns, undisturbed, num_ahead, role):  # noqa: F811
    """Choices that are drawn, and guidance, too. The answers they are compared with did not run ahead."""
    async with local_cluster(cluster_args(64), (1, 2, 2)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        loss = Loss(cluster.prefills if role == "prefill" else cluster.decodes, "run", 4, stand_ins)
        answers = await asyncio.gather(*(answer(cluster, case, fields) for case, fields in asked()))
        assert loss.victim is not None and answers == undisturbed
    assert any(num_ahead)


def save_model(folder: Path, name: str) -> Path:
    return save_mistral(folder, None) if name == "mistral" else save_hybrid(folder, name)


def wanted_of(folder: Path, prompts: Sequence[tuple[int, ...]], num_structured: int) -> list[list[int]]:
    """What `generate` answers, the first ones of tokens alone that the grammar allows."""
    vocabulary = Vocabulary(VocabularySource.load(str(folder), SIZES["vocab_size"], ()))
    root = Matcher(compile_structure(STRUCTURE, vocabulary), vocabulary)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return [
        structured(model, prompt, root) if number < num_structured else plain(model, prompt)
        for number, prompt in enumerate(prompts)
    ]


def plain(model: Any, prompt: tuple[int, ...], **options: Any) -> list[int]:
    return generated_by(model, [prompt], NUM_TOKENS, **options)[0]


def structured(model: Any, prompt: tuple[int, ...], root: Matcher) -> list[int]:
    matchers = [root.copy()]  # behind each token, until the answer is complete

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        if len(ids) > len(prompt) and not matchers[-1].is_complete:
            matchers.append(matchers[-1].copy())
            matchers[-1].accept(int(ids[-1]))
        return [0] if matchers[-1].is_complete else matchers[-1].allowed().tolist()

    tokens = plain(model, prompt, prefix_allowed_tokens_fn=allowed)
    return tokens[: len(matchers) - 1] if matchers[-1].is_complete else tokens


async def ask_all(cluster, prompts: Sequence[tuple[int, ...]], num_structured: int) -> list[list[int]]:
    """The first ones under the structure."""
    asked = (
        answers(cluster, prompt, NUM_TOKENS, structure=STRUCTURE if number < num_structured else None)
        for number, prompt in enumerate(prompts)
    )
    return [answer for (answer,) in await asyncio.gather(*asked)]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize(
    "name",
    [
        "mistral",
        "qwen3_5_text",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("lfm2", "falcon_h1")),
    ],
)
async def test_structures_and_states_go_ahead(tmp_path, num_ahead, name, roles):
    """Some answers have a structure, some none; some models keep states."""
    folder, prompts = save_model(tmp_path, name), draw_prompts((5, 24, 37, 9, 33, 12))
    async with local_cluster(window_args(folder, kv_blocks=4000), roles) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        got = await ask_all(cluster, prompts, 3)
    assert got == wanted_of(folder, prompts, 3)
    assert sum(map(bool, num_ahead)) > NUM_TOKENS / 2


async def test_a_step_that_fails_behind_its_forward_ahead_costs_no_token(tmp_path, num_ahead):
    """It cannot be repeated, as the state that it began with is written over: its answers go on in another
    attempt, and are the same."""
    folder, prompts = save_hybrid(tmp_path, "qwen3_5_text"), draw_prompts((5, 24, 37))
    async with local_cluster(window_args(folder, kv_blocks=4000), (0, 1, 1)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        runner, failed = cluster.decodes[0].engine.runner, []
        run = runner.run

        def fail_once(works: Any, on_layer: Any, then: Any = ()) -> Any:
            results = run(works, on_layer, then)
            if len(num_ahead) > 9 and then and not failed:
                failed.append(len(works))
                raise ValueError("planted")
            return results

        runner.run = fail_once
        got = await ask_all(cluster, prompts, 1)
    assert got == wanted_of(folder, prompts, 1)
    assert failed


async def test_hybrid_answers_that_gave_way_go_on(tmp_path, num_ahead):
    folder, prompts = save_hybrid(tmp_path, "qwen3_5_text"), draw_prompts((1, 5, 9, 2))
    size = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE).state_blocks
    args = let_all_in(window_args(folder, kv_blocks=4 * (2 * size + 3)))
    async with local_cluster(args, (0, 1, 1), overcommits=len(prompts)) as cluster:
        got = await ask_all(cluster, prompts, 0)
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
    assert got == wanted_of(folder, prompts, 0)
    assert any(num_ahead)
