"""Every transfer operation of a small mixed request fails once, every notification is lost, doubled or late.
Each time the client gets the right tokens or a named error in time, nothing stays behind, and the next
request is answered correctly.

The audit waits for leases that only time can end; timeouts are short for that reason alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.workload import Answer, Case, Reference, make_cases
from cluster.config.settings import ClusterArgs, DoorArgs, TransferArgs
from cluster.errors import UnavailableError
from cluster.types.members import Role
from kv_transfer.agents.agent import PeerLostError, TransferError
from kv_transfer.agents.factory import _LOCAL_NETWORK as network
from kv_transfer.agents.in_process import FaultScript
from router.flow import continuation
from tests.fakes.clock import Leaps, leaping_clocks
from tests.fakes.slow_params import often
from tests.flow.local_cluster import HANG_S, LocalCluster, local_cluster
from tests.flow.test_law import cluster_args

MODEL = Path(__file__).parents[2] / "deploy" / "demo_model"
MAX_TOKENS = 6
FIRST_TOKEN_TIMEOUT_S, REQUEST_TIMEOUT_S, LEASE_MARGIN_S = 4.0, 6.0, 0.1
MAX_POLLS = 12  # of one verb: the threads poll as long as they wait, so there is no last one
ARGS = cluster_args(48).model_copy(
    update={
        "door": DoorArgs(first_token_timeout_s=FIRST_TOKEN_TIMEOUT_S, request_timeout_s=REQUEST_TIMEOUT_S)
    }
)
CODED_ARGS = ARGS.model_copy(update={"transfer": TransferArgs(codec="int8")})
Expected = tuple[Case, Answer]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Expected]]:
    reference = Reference(MODEL)
    pairs = [(case, reference.answer(case, MAX_TOKENS)) for case in make_cases(21, 12)]
    return {kind: [p for p in pairs if p[0].kind == kind] for kind in ("text", "image and audio")}


@pytest.fixture(autouse=True)
def clocks() -> Iterator[Leaps]:
    with leaping_clocks() as leaps:
        yield leaps
    network.faults = FaultScript()


async def ask_in_trouble(
    cluster: LocalCluster, clocks: Leaps, pair: Expected, faults: FaultScript, label: object
) -> bool:
    """One request under `faults`, the audit, one request without; whether the first was answered."""
    case, right = pair
    network.faults = faults
    started_at = time.monotonic()
    for decode in cluster.decodes:  # KV that decode has would not travel
        decode.process.loop.call(decode.engine.blocks.forget_all)
    try:
        got = await cluster.answer(case, MAX_TOKENS)
        assert got == (right.text, len(right.token_ids)), label
        was_answered = True
    except UnavailableError as error:
        assert error.message, label
        was_answered = False
    assert time.monotonic() - started_at < REQUEST_TIMEOUT_S + HANG_S, label
    clocks.leap(REQUEST_TIMEOUT_S + 1)  # only its time ends a failed lease
    await cluster.audit()
    network.faults = FaultScript()
    assert await cluster.answer(case, MAX_TOKENS) == (right.text, len(right.token_ids)), label
    await cluster.audit()
    return was_answered


Errors = tuple[type[TransferError], ...]
BOTH: Errors = (TransferError, PeerLostError)
FAILURES: list[tuple[str, Errors]] = [  # those of one entry meet one cluster; it connects once
    *(("connect", (error,)) for error in BOTH),
    ("post", BOTH),
    ("notify", (PeerLostError,)),
    *((verb, (TransferError,)) for verb in ("notify", "poll", "notifications")),
]


# the connections and the poll end in the same code as the others
OFTEN = [("post", BOTH), ("notify", (TransferError,)), ("notifications", (TransferError,))]


@pytest.mark.parametrize("kind", often(["text", "image and audio"], ["image and audio"]))
@pytest.mark.parametrize(("verb", "errors"), often(FAILURES, OFTEN))
async def test_whichever_operation_fails_the_next_request_is_answered(expected, clocks, verb, errors, kind):
    await check_each_failure(clocks, ARGS, expected[kind], verb, errors)


@pytest.mark.parametrize("verb", often(["post", "poll", "notify"], ["post"]))
async def test_whichever_operation_fails_over_coded_kv_the_next_request_is_answered(expected, clocks, verb):
    """Requests with a whole group of tokens, whose answers int8 does not change."""
    await check_each_failure(clocks, CODED_ARGS, expected["image and audio"], verb, (TransferError,))


async def check_each_failure(
    clocks: Leaps, args: ClusterArgs, pairs: list[Expected], verb: str, errors: Errors
) -> None:
    async with local_cluster(args, lease_margin_s=LEASE_MARGIN_S) as cluster:
        cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        for error in errors:
            await check_failures_of(cluster, clocks, pairs, verb, error)
        coded_groups = cluster.prefills[0].process.transfer_engine.sent.coded_groups
        assert (coded_groups > 0) == (args is CODED_ARGS)


async def check_failures_of(
    cluster: LocalCluster, clocks: Leaps, pairs: list[Expected], verb: str, error: type[TransferError]
) -> None:
    num_answered = num_asked = 0
    limit = MAX_POLLS if verb == "notifications" else 100
    for n in range(1, limit + 1):
        faults = FaultScript(post_polls=1)
        faults.fail(verb, n, error(f"scripted: {verb} {n}"))
        pair = pairs[n % len(pairs)]
        num_answered += await ask_in_trouble(cluster, clocks, pair, faults, (verb, error, n))
        num_asked += 1
        if faults.counts[verb] < n:
            break
    assert num_asked > 1
    assert num_answered >= 1, "the last request met no fault"


Trouble = Callable[[FaultScript, int], None]
TROUBLES: dict[str, tuple[Trouble, bool]] = {  # with the n-th notification, and whether it is harmless
    "lost": (FaultScript.drop, False),
    "doubled": (FaultScript.duplicate, True),
    "late": (lambda script, n: script.delay(n, 10), True),
    "never": (lambda script, n: script.delay(n, 10**9), False),
}


@pytest.mark.parametrize("kind", often(["text", "image and audio"], ["image and audio"]))
async def test_trouble_with_any_notification_harms_one_request_at_most(expected, clocks, kind):
    async with local_cluster(ARGS, lease_margin_s=LEASE_MARGIN_S) as cluster:
        cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        for name, (trouble, is_harmless) in TROUBLES.items():
            for n in range(1, 4 if kind == "image and audio" else 2):
                faults = FaultScript()
                trouble(faults, n)
                pair = expected[kind][n % len(expected[kind])]
                was_answered = await ask_in_trouble(cluster, clocks, pair, faults, (name, n))
                assert was_answered or not is_harmless, (name, n)


async def test_a_decode_worker_that_can_no_longer_be_written_to_fails_its_requests_by_name(
    expected, monkeypatch
):
    """Prefill draws a token in every attempt: with more of them it would complete a short answer."""
    monkeypatch.setattr(continuation, "MAX_REPLAYS", 1)
    (case, _), *_ = expected["text"]
    async with local_cluster(ARGS, lease_margin_s=LEASE_MARGIN_S) as cluster:
        cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        network.kill(cluster.decodes[0].replica_id)
        for _ in range(2):
            with pytest.raises(UnavailableError, match="decode"):
                await cluster.answer(case, MAX_TOKENS)


async def test_a_transfer_that_fails_is_replayed_beside_others(expected):
    pairs = expected["image and audio"] + expected["text"]
    async with local_cluster(ARGS, (1, 1, 1), lease_margin_s=LEASE_MARGIN_S) as cluster:
        cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        faults = FaultScript()
        faults.fail("post", 2)
        network.faults = faults
        outcomes = await asyncio.gather(*(cluster.answer(case, MAX_TOKENS) for case, _ in pairs))
        assert cluster.door.dispatcher.flow.continuation.num_replays == 1
    assert outcomes == [(right.text, len(right.token_ids)) for _, right in pairs]


async def test_a_worker_whose_connection_was_cut_is_dialled_again(expected):
    case, right = expected["text"][0]
    async with local_cluster(ARGS, lease_margin_s=LEASE_MARGIN_S) as cluster:
        cluster.let_prefill_locally(lambda _: False)  # text, too, is to travel
        lost = next(peer for peer in cluster.door.peers if peer.member.role is Role.DECODE)
        await lost.connection.aclose()
        async with asyncio.timeout(60):
            while len(cluster.door.peers) < 3:
                await asyncio.sleep(0.01)
        assert await cluster.answer(case, MAX_TOKENS) == (right.text, len(right.token_ids))
