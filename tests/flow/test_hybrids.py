"""The law of the house for models some of whose layers keep a state (linear attention, Mamba, convolutions):
in every pool, for several choices, after a preemption."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch

from cluster.config.settings import ClusterArgs, KvCacheArgs, PrefillArgs, TransferArgs
from cluster.engine import worker
from cluster.engine.runner import LanguageRunner
from cluster.engine.speculation import DraftedSequence
from cluster.engine.state import AnswerChoice, PromptWork
from cluster.errors import ConfigError
from cluster.kvcache.tier import KvTier
from cluster.model.language import LanguageModel
from cluster.types.request import SamplingParams
from cluster.types.structure import Structure, StructureKind
from cluster.worker.setup import set_up
from decode_service.service import decode_worker
from router.policy import ClusterView, Placement, RequestView
from tests.fakes.slow_params import often
from tests.flow.draft_heads import save_eagle3
from tests.flow.hybrid_models import CONFIGS, save_hybrid
from tests.flow.local_cluster import let_all_in, local_cluster
from tests.flow.losses import Loss
from tests.flow.test_windows import window_args
from tests.flow.text_models import BLOCK_SIZE, GREEDY, answers, draw_prompts, generated, save_mistral

NUM_TOKENS = 24
PROMPT_LENGTHS = (1, 5, 24, 37, 90, 33)


# Other families are in the slow tests: these try the engine, which knows nothing of a state but its size.
of_one_family = pytest.mark.parametrize(
    "folder", often(sorted(CONFIGS), ["qwen3_5_text"]), indirect=True, scope="module"
)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    return draw_prompts(PROMPT_LENGTHS)


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def expected(folder: Path, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    return generated(folder, prompts, NUM_TOKENS)


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_states_travel_from_prefill_to_decode(folder, prompts, expected, num_choices):
    async with local_cluster(window_args(folder, kv_blocks=4000), (0, 1, 1)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        got = await asyncio.gather(
            *(answers(cluster, prompt, NUM_TOKENS, num_choices=num_choices) for prompt in prompts)
        )
        again = await answers(cluster, prompts[4], NUM_TOKENS)  # decode has its KV already
    assert got == [[answer] * num_choices for answer in expected]
    assert again == [expected[4]]


async def test_kv_is_coded_on_the_wire_and_states_travel_as_they_are(folder, prompts, expected):
    """Coded KV is rounded, so the law does not hold; int8 changes few tokens of these models, and a wrong state
    would change nearly all."""
    args = window_args(folder, kv_blocks=4000)
    args = args.model_copy(update={"transfer": TransferArgs(codec="int8")})
    async with local_cluster(args, (0, 1, 1)) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts))
        sent = cluster.prefills[0].process.transfer_engine.sent
    assert sent.coded_groups == 1  # the one prompt of 64 tokens and more has
    same = [
        a == b
        for (answer,), known in zip(got, expected, strict=True)
        for a, b in zip(answer, known, strict=True)
    ]
    print(sum(same), len(same))
    assert sum(same) >= 0.9 * len(same)


@of_one_family
@pytest.mark.parametrize(
    ("role", "num_replicas"),
    [
        pytest.param("decode", (0, 1, 2), id="decode"),
        pytest.param("prefill", (0, 2, 1), id="prefill", marks=pytest.mark.slow),
        pytest.param("language", (0, 0, 0, 2), id="language", marks=pytest.mark.slow),
    ],
)
async def test_what_a_lost_worker_had_goes_on_at_another(
    folder, prompts, expected, role, num_replicas, stand_ins, monkeypatch
):
    """Its states are lost with it."""
    monkeypatch.setattr("kv_transfer.lease.receiver.IN_FLIGHT_S", 0.1)  # within one process nothing is
    async with local_cluster(window_args(folder, kv_blocks=4000), num_replicas) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        workers = cluster.prefills if role == "prefill" else cluster.decodes
        loss = Loss(workers, "run", 4, stand_ins)
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts))
        assert loss.victim is not None
        assert got == [[answer] for answer in expected]
        assert cluster.door.dispatcher.flow.continuation.num_replays > 0


async def test_answers_that_gave_way_are_computed_anew(folder, prompts, expected):
    """Four short prompts fit with their states, and grow out of the pool."""
    state_blocks = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE).state_blocks
    args = let_all_in(window_args(folder, kv_blocks=4 * (2 * state_blocks + 2)))
    async with local_cluster(args, (0, 1, 1), overcommits=8) as cluster:
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts[:2] * 4))
        assert got == [[answer] for answer in expected[:2]] * 4
        assert cluster.decodes[0].engine.load().totals.num_preempted > 0


async def test_a_worker_of_both_phases_computes_prompts_beside_answers(folder, prompts, expected):
    async with local_cluster(window_args(folder, kv_blocks=4000), (0, 0, 0, 1)) as cluster:
        for _ in range(2):  # nothing that the first round leaves may change the second
            got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts))
            assert got == [[answer] for answer in expected]


SNAPSHOTS = list(itertools.product(((0, 1, 1), (0, 0, 0, 1)), (8, 512)))


@pytest.mark.parametrize(("roles", "num_chunk"), often(SNAPSHOTS, (SNAPSHOTS[0], SNAPSHOTS[3])))
async def test_prompts_go_on_from_snapshots(folder, prompts, roles, num_chunk):
    """The second of three prompts with one beginning finds that its KV is known further than any state; the
    third goes on from there, and a repetition from its last full block. A chunk may end at a snapshot. The
    door knows all of it before."""
    shared = prompts[4][:56]
    crowd = [shared + tail for tail in (prompts[3], prompts[2], prompts[5])]
    crowd.append(crowd[2])
    prefill = PrefillArgs(max_batch_tokens=num_chunk, kv_blocks=1000)
    args = window_args(folder, kv_blocks=4000).model_copy(update={"prefill": prefill})
    async with local_cluster(args, roles) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        engine = (cluster.prefills or cluster.decodes)[0].engine
        num_computed, num_foreseen, got, run = [], [], [], engine.runner.run
        started = ClusterView.started

        def count(works: Any, *others: Any) -> Any:
            num_computed[-1] += sum(work.num_tokens for work in works if isinstance(work, PromptWork))
            return run(works, *others)

        def note(view: ClusterView, request: RequestView, placement: Placement, *others: Any) -> None:
            num_cached = view.num_cached_tokens(request, placement.prefill)
            num_foreseen.append(request.num_prompt_tokens - num_cached)
            started(view, request, placement, *others)

        with patch.object(engine.runner, "run", count), patch.object(ClusterView, "started", note):
            for prompt in crowd:
                num_computed.append(0)
                got += await answers(cluster, prompt, NUM_TOKENS)
    assert got == generated(folder, crowd, NUM_TOKENS)
    assert num_computed == [
        len(crowd[0]),
        len(crowd[1]),
        len(crowd[2]) - 56,
        1 + (len(crowd[3]) - 1) % BLOCK_SIZE,
    ]
    assert num_foreseen == num_computed  # by the door


@of_one_family
async def test_a_prompt_goes_on_from_a_state_that_comes_back_from_host_memory(folder, monkeypatch):
    """Others have taken its blocks, those of its state included. Two long prompts do not fit together."""
    monkeypatch.setattr(KvTier, "is_worth", lambda self, num_blocks, compute_s: True)
    state_blocks = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE).state_blocks
    first, second = draw_prompts((90, 89))
    args = window_args(folder, kv_blocks=8)
    prefill = PrefillArgs(kv_blocks=3 * state_blocks + 10)  # in all: two places, a snapshot, the tokens
    args = args.model_copy(update={"prefill": prefill, "kv_cache": KvCacheArgs(host_bytes=1 << 26)})
    crowd = [first, second, first, first[:80] + second[80:]]
    async with local_cluster(args, (0, 0, 0, 1)) as cluster:
        engine, num_loaded = cluster.decodes[0].engine, []
        got = []
        for prompt in crowd:
            got += await answers(cluster, prompt, NUM_TOKENS)
            async with asyncio.timeout(60):
                while (load := engine.load()).tier.num_stored < load.num_cached_blocks:
                    await asyncio.sleep(0.005)
            num_loaded.append(load.tier.num_loaded)
    assert got == generated(folder, crowd, NUM_TOKENS)
    assert num_loaded[:3] == [0, 0, 7 + state_blocks]  # the pool still has the first four blocks


def fail_sometimes(runner: LanguageRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps raise when they have computed everything."""
    run, num_steps = runner.run, itertools.count()

    def run_and_fail(*args: Any) -> Any:
        results = run(*args)
        if next(num_steps) % 5 == 4:
            raise ValueError("planted")
        return results

    monkeypatch.setattr(runner, "run", run_and_fail)


async def test_a_step_that_fails_after_it_wrote_states_is_repeated(folder, prompts, expected, monkeypatch):
    async with local_cluster(window_args(folder, kv_blocks=4000), (0, 0, 0, 1)) as cluster:
        fail_sometimes(cluster.decodes[0].engine.runner, monkeypatch)
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts[1:4]))
    assert got == [[answer] for answer in expected[1:4]]


class KnowingProposer:
    """Knows the answers, and is wrong now and then."""

    sequences: ClassVar[Sequence[list[int]]] = ()  # prompts and answers

    def __init__(self, forbidden: Collection[int] = ()):
        self._draw = random.Random(3)

    def propose(self, sequences: Sequence[DraftedSequence], max_tokens: Sequence[int]) -> list[list[int]]:
        return [self._guess(list(s.token_ids), most) for s, most in zip(sequences, max_tokens, strict=True)]

    def _guess(self, token_ids: list[int], most: int) -> list[int]:
        count = len(token_ids)
        right = next(known[count:] for known in self.sequences if known[:count] == token_ids)
        return [token ^ (self._draw.random() < 0.2) for token in right[:most]]

    def forget(self, request_id: str) -> None:
        pass


DRAFTED = list(itertools.product(("handed over", "failing steps", "preempted"), (0, 0.8)))


@of_one_family
@pytest.mark.parametrize(("case", "temperature"), often(DRAFTED, (DRAFTED[0], DRAFTED[3], DRAFTED[5])))
async def test_wrong_drafts_leave_no_trace_in_states(
    folder, prompts, expected, monkeypatch, case, temperature
):
    """Answers with drafts of which many are partly right are those without."""
    sampling, chosen = SamplingParams(temperature=temperature, seed=5), prompts[1:5]
    if temperature:
        async with local_cluster(window_args(folder, kv_blocks=4000), (0, 0, 0, 1)) as plain:
            asked = (answers(plain, prompt, NUM_TOKENS, sampling, 2) for prompt in chosen)
            wanted = await asyncio.gather(*asked)
    else:
        wanted = [[answer] * 2 for answer in expected[1:5]]
    known = [[*prompt, *one] for prompt, every in zip(chosen, wanted, strict=True) for one in every]
    monkeypatch.setattr(KnowingProposer, "sequences", known)
    monkeypatch.setattr(worker, "NgramProposer", KnowingProposer)
    state_blocks = LanguageModel.load(folder, dtype=torch.float32, block_size=BLOCK_SIZE).state_blocks
    kv_blocks = 16 * state_blocks + 36 if case == "preempted" else 4000
    args = let_all_in(window_args(folder, kv_blocks=kv_blocks, speculation={"method": "ngram"}))
    roles = (0, 0, 0, 1) if case == "failing steps" else (0, 1, 1)
    overcommits = len(chosen) if case == "preempted" else 0
    async with local_cluster(args, roles, overcommits=overcommits) as cluster:
        cluster.let_prefill_locally(lambda _: False)
        engine = cluster.decodes[0].engine
        if case == "failing steps":
            fail_sometimes(engine.runner, monkeypatch)
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS, sampling, 2) for prompt in chosen))
        totals = engine.load().totals
        assert got == wanted
    assert totals.num_drafted > totals.num_accepted > 60
    assert (totals.num_preempted > 0) == (case == "preempted")


@of_one_family
async def test_text_that_a_grammar_forces_leaves_no_trace_in_states(folder, prompts, monkeypatch):
    """Answers of which most is forced are those of steps of one token."""
    text = "[a-c]{3} and nothing but the truth of [0-9]{2}, then the rest of it [x-z]{4}"
    structure, forced, propose = Structure(StructureKind.REGEX, text), [], AnswerChoice.propose

    def note(choice: AnswerChoice, drafts: list[int]) -> None:
        forced.append(len(drafts))
        propose(choice, drafts)

    async def ask() -> list[list[list[int]]]:
        async with local_cluster(window_args(folder, kv_blocks=4000), (0, 1, 1)) as cluster:
            cluster.let_prefill_locally(lambda _: False)
            asked = (answers(cluster, prompt, 60, GREEDY, 2, structure=structure) for prompt in prompts[1:5])
            return await asyncio.gather(*asked)

    monkeypatch.setattr(AnswerChoice, "propose", note)
    got = await ask()
    assert sum(forced) > 60
    monkeypatch.setattr(LanguageRunner, "propose", lambda runner, requests: None)
    assert got == await ask()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["draft", "eagle3"])
async def test_drafts_of_models_and_heads_change_no_token(folder, prompts, expected, tmp_path, method):
    if method == "draft":
        save_mistral(tmp_path / "draft", None)
    else:
        save_eagle3(tmp_path / "other", tmp_path / "draft", is_right=False, layers=[0, 1, 1])
    speculation = {"method": method, "model": str(tmp_path / "draft")}
    args = window_args(folder, kv_blocks=4000, speculation=speculation)
    async with local_cluster(args, (0, 0, 0, 1)) as cluster:
        got = await asyncio.gather(*(answers(cluster, prompt, NUM_TOKENS) for prompt in prompts))
        assert cluster.decodes[0].engine.load().totals.num_drafted > 40
    assert got == [[answer] for answer in expected]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"transfer": {"codec": "int4"}}, "keeps some"),
        ({"decode": {"kv_blocks": 2}}, "hold no sequence"),
    ],
)
def test_what_is_not_served_with_states_is_refused_by_name(tmp_path, settings, words):
    folder = save_hybrid(tmp_path, "qwen3_5_text")
    args = ClusterArgs.model_validate({**window_args(folder).model_dump(exclude_unset=True), **settings})
    with pytest.raises(ConfigError, match=words):
        decode_worker(args, set_up(args, "d", transport="in_process"))
