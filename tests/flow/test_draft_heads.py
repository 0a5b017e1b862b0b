"""The law of the house with drafts of heads that read the model's hidden rows."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers

from cluster.config.settings import ClusterArgs
from cluster.engine import worker
from cluster.engine.head_drafts import HeadProposer
from cluster.engine.speculation import KnownTokens
from cluster.ids import new_request_id
from cluster.model.draft_head import DraftHead
from cluster.model.hidden_rows import HiddenRows
from cluster.types.request import GenerateRequest, Guidance, Prompt, SamplingParams, StopParams
from router.flow.state import ClientRequest
from router.telemetry.timeline import RequestTimeline
from tests.fakes.slow_params import often
from tests.flow.draft_heads import save_eagle3, save_with_mtp
from tests.flow.local_cluster import LocalCluster, let_all_in, local_cluster
from tests.flow.test_crossover import cut_stretches, folder_args
from tests.flow.text_models import GREEDY, answers, draw_prompts, generated

NUM_TOKENS = 30
SAMPLED = SamplingParams(temperature=0.8, seed=5)
NAMES = ("deepseek_v3", "eagle3", "glm4_moe", "qwen3_5_text", "qwen3_next")
CASES = [f"{kind} {name}" for name in NAMES for kind in ("right", "random")]
ALWAYS = (*CASES[:3], "right qwen3_next")


@dataclass(frozen=True)
class Drafted:
    """A model, the speculation that drafts for it, and what it answers without."""

    folder: Path
    speculation: dict[str, Any]
    is_right: bool
    prompts: list[tuple[int, ...]]
    greedy: list[list[int]]

    def args(self, **changes: Any) -> ClusterArgs:
        """`changes`: of the settings of decode."""
        return folder_args(self.folder, {"kv_blocks": 512, "speculation": self.speculation, **changes})


@pytest.fixture(scope="module", params=often(CASES, ALWAYS))
def drafted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    kind, name = request.param.split()
    is_right = kind == "right"
    folder, speculation = tmp_path_factory.mktemp(name), {"method": "mtp"}
    if name == "eagle3":
        speculation = {"method": name, "model": str(save_eagle3(folder, folder / "head", is_right=is_right))}
    else:
        save_with_mtp(folder, name, is_right=is_right)
    prompts = draw_prompts((1, 2, 9, 16, 33, 64, 120))
    return Drafted(folder, speculation, is_right, prompts, generated(folder, prompts, NUM_TOKENS))


async def ask(
    cluster: LocalCluster, drafted: Drafted, sampling: SamplingParams = GREEDY, num_choices: int = 1
) -> list[list[list[int]]]:
    asked = (answers(cluster, prompt, NUM_TOKENS, sampling, num_choices) for prompt in drafted.prompts)
    return list(await asyncio.gather(*asked))


def counts(cluster: LocalCluster) -> tuple[int, int]:
    """Tokens that were drafted, and accepted."""
    totals = cluster.decodes[0].engine.load().totals
    return totals.num_drafted, totals.num_accepted


async def test_drafts_change_no_token_of_prompts_that_are_handed_over(drafted):
    async with local_cluster(folder_args(drafted.folder), (0, 1, 1)) as plain:
        sampled = await ask(plain, drafted, SAMPLED, 2)
    async with local_cluster(drafted.args(), (0, 1, 1)) as cluster:
        assert await ask(cluster, drafted) == [[answer] for answer in drafted.greedy]
        assert await ask(cluster, drafted, SAMPLED, 2) == sampled
        num_drafted, num_accepted = counts(cluster)
    # the head has not seen the prompts: it is right now and then
    assert num_drafted > 100 and (num_accepted > 20 or not drafted.is_right)


async def test_a_head_that_has_seen_all_tokens_is_right(drafted):
    """Decode computes the prompts, in stretches. The second time their beginnings are cached, and so is what
    the head has computed of them."""
    async with local_cluster(drafted.args(), (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally()
        for num_choices in (1, 2):
            got = await ask(cluster, drafted, num_choices=num_choices)
            assert got == [[answer] * num_choices for answer in drafted.greedy]
        num_drafted, num_accepted = counts(cluster)
    assert num_drafted > 100
    if drafted.is_right:
        assert num_accepted == num_drafted


class RecordingProposer(HeadProposer):
    """Keeps the rows that it is given, with the tokens that they are said to be of."""

    seen: ClassVar[list[tuple[Sequence[int], int, torch.Tensor]]] = []

    def __init__(self, head: DraftHead, rows: HiddenRows, num_blocks: int, forbidden: Collection[int]):
        super().__init__(head, rows, num_blocks, forbidden)
        self._given = rows

    def take(self, known: Iterable[KnownTokens]) -> None:
        known = list(known)
        for each in known:
            for i in range(each.count):
                (row,) = self._given.take([each.first_row + i])
                self.seen.append((each.sequence.token_ids, each.first_token + i, row))
        super().take(known)


async def test_a_head_gets_the_hidden_rows_of_the_tokens_that_it_is_told(drafted, monkeypatch):
    """In steps of prompts, answers with drafts and without, several choices, and guidance side by side."""
    monkeypatch.setattr(worker, "HeadProposer", RecordingProposer)
    monkeypatch.setattr(RecordingProposer, "seen", [])
    async with local_cluster(drafted.args(), (0, 1, 1)) as cluster:
        cut_stretches(cluster)
        cluster.let_prefill_locally(lambda number: number % 3 > 0)
        guided = [guided_answer(cluster, prompt) for prompt in drafted.prompts[::2]]
        await asyncio.gather(ask(cluster, drafted, SAMPLED, 2), ask(cluster, drafted), *guided)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(drafted.folder, dtype=torch.float32).eval()
    rows_of: dict[tuple[int, ...], torch.Tensor] = {}
    for token_ids, idx, row in RecordingProposer.seen:
        with torch.inference_mode():
            if (key := tuple(token_ids)) not in rows_of:
                rows_of[key] = hidden_rows(model, key, drafted.speculation["method"])
        torch.testing.assert_close(row, rows_of[key][idx], atol=1e-3, rtol=1e-3)
    assert len(RecordingProposer.seen) > 3 * NUM_TOKENS * len(drafted.prompts)


def hidden_rows(model: Any, token_ids: tuple[int, ...], method: str) -> torch.Tensor:
    every = model.model(torch.tensor([token_ids]), output_hidden_states=True)
    if method == "mtp":
        return every.last_hidden_state[0]
    return torch.cat([every.hidden_states[i][0] for i in (2, 2, 1)], dim=-1)


async def guided_answer(cluster: LocalCluster, prompt: tuple[int, ...]) -> None:
    guidance = Guidance(1.5, Prompt(prompt[:5]))
    request = GenerateRequest(
        new_request_id(), Prompt(prompt), (GREEDY,) * 2, StopParams(NUM_TOKENS), guidance=guidance
    )
    for stream in cluster.door.dispatcher.generate(ClientRequest(request, (), (), RequestTimeline(0.0))):
        assert sum([len(event.token_ids) async for event in stream]) == NUM_TOKENS
        await stream.aclose()


async def test_drafts_change_no_token_of_answers_that_are_preempted(drafted):
    # a hybrid's 14 choices have two places for their states, of three blocks each
    args = let_all_in(drafted.args(kv_blocks=116 if drafted.folder.name.startswith("qwen") else 26))
    async with local_cluster(args, (0, 1, 1), overcommits=len(drafted.prompts)) as cluster:
        got = await ask(cluster, drafted, num_choices=2)
        assert got == [[answer] * 2 for answer in drafted.greedy]
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0
