"""The whole cluster in one process, without Ray: real services, real sockets, real door; transport in process
or NIXL.

Ends with the audit of the style page: every block free or cached, every lease closed, no flight, no task of
ours pending.
"""

from __future__ import annotations

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from bench import DEMO_MODEL
from bench.workload import Case
from cluster.config.settings import ClusterArgs, DoorArgs, WeightCacheArgs
from cluster.engine.engine import LanguageEngine
from cluster.engine.state import LanguagePhase
from cluster.engine.worker import LanguageWorker
from cluster.types.members import Role
from cluster.worker.late_memory import LateMemory
from cluster.worker.setup import set_up
from decode_service.service import decode_worker, language_worker
from deploy.whole import encode_prefill_worker, whole_worker
from encoder_service.service import EncoderService
from kv_transfer.agents.factory import Transport
from prefill_service.service import prefill_worker
from router.api.chat.schema import ChatRequest
from router.api.chat.translate import chat_call
from router.api.protocol import CallContext
from router.calls import ServedModels
from router.door import Door
from router.flow import placer
from router.policy import Policy
from tests.fakes.known_speeds import known_speeds
from tests.fakes.local_prefill import LocalPrefillPolicy

HANG_S = 120.0  # waits end with what they wait for; a busy machine may need long
PATIENCE_S = 3600.0
# Workers of one process make their memories one beside the other: each would wait until a core is idle and
# the pages of the one before are there.
AT_ONCE = LateMemory(None)
PATIENT_DOOR = {  # on a busy machine, too, a request is neither refused for a long wait nor given up
    "request_timeout_s": PATIENCE_S,
    "first_token_timeout_s": PATIENCE_S,
    "admission": {"classes": [{"name": "all", "max_wait_s": PATIENCE_S}]},
}


@dataclass
class LocalCluster:
    doors: list[Door]
    encoders: list[EncoderService]
    prefills: list[LanguageWorker]
    decodes: list[LanguageWorker]
    policies: list[LocalPrefillPolicy]  # of doors, unless the settings name one

    def let_prefill_locally(self, stays: Callable[[int], bool] = lambda _: True) -> LocalPrefillPolicy:
        """From now on the first door's prompts are placed so."""
        self.policies[0].let(stays)
        return self.policies[0]

    @property
    def door(self) -> Door:
        return self.doors[0]

    async def answer(self, case: Case, max_tokens: int) -> tuple[str, int]:
        """Text and number of tokens of a greedy answer. Raises ClusterError."""
        door = self.door
        body = {"model": "demo", "messages": case.messages, "max_tokens": max_tokens, "temperature": 0}
        (choice,) = await door.chat(
            chat_call(ChatRequest.model_validate(body), CallContext(ServedModels("demo"), door.defaults))
        )
        try:
            text = "".join([delta.text async for delta in choice])
            return text, choice.usage.completion_tokens
        finally:
            await choice.aclose()

    async def audit(self) -> None:
        """Wait until everybody is idle, then require that nothing is held."""
        try:
            async with asyncio.timeout(HANG_S):
                while not self._is_idle():
                    await asyncio.sleep(0.005)
        except TimeoutError:
            pass
        for door in self.doors:
            assert door.num_running == 0, "a request is still on its way"
            assert all(worker.num_requests == 0 for worker in door.dispatcher.flow.workers)
            for peer in door.peers:
                assert peer.is_idle, f"{peer.member.replica_id} still holds something: {peer.loads}"
            assert door.is_idle, (
                "work counts as sent that is not there, a request waits for admission, or media is held"
            )

    def _is_idle(self) -> bool:
        return all(
            door.num_running == 0 and door.is_idle and all(peer.is_idle for peer in door.peers)
            for door in self.doors
        )


def with_policy(args: ClusterArgs, policy: type[Policy]) -> ClusterArgs:
    path = f"{policy.__module__}:{policy.__name__}"
    return args.model_copy(update={"door": args.door.model_copy(update={"policy": path})})


def let_all_in(args: ClusterArgs) -> ClusterArgs:
    """However slow workers seem to be, no request waits at a door."""
    admission = args.door.admission.model_copy(update={"max_outstanding_s": PATIENCE_S})
    return args.model_copy(update={"door": args.door.model_copy(update={"admission": admission})})


def step_together(engine: LanguageEngine, door: Door, num_requests: int) -> None:
    """It steps only when so many requests have come to the door, it has all that the door has started, and
    every prompt that it has given blocks to is there: answers grow together however fast it is, and however
    busy the machine."""
    step, have_come = engine.step, False

    def step_all() -> float | None:
        nonlocal have_come
        num_started = door.num_running
        if num_started + door.num_waiting >= num_requests and len(engine.requests) >= num_started:
            have_come = True
        arrives = any(request.phase is LanguagePhase.ARRIVING for request in engine.requests.values())
        if engine.requests and (arrives or not have_come):
            engine.admit()
            return 0.001
        return step()

    engine.step = step_all


@asynccontextmanager
async def local_cluster(
    args: ClusterArgs,
    num_replicas: Sequence[int] = (1, 1, 1),
    *,
    lease_margin_s: float = 5.0,
    num_doors: int = 1,
    overcommits: int = 0,
    measures: bool = False,
) -> AsyncIterator[LocalCluster]:
    """`num_replicas`: of each role, in the order of `Role`; no more of those that are left out. The transport
    is in process unless `args` names one. `overcommits`: doors expect empty answers, so that decode is given
    more than it has memory for (with `let_all_in`: as many requests as there are), and it starts when so many
    requests are asked; prompts are handed over, since those that decode computed would begin their answers
    one by one. `measures`: workers measure at their start how fast they are; otherwise they know it
    (`known_speeds`). A cluster that has ended is a web of references with all its memory: it goes before the
    next one comes, for by itself the collector visits so large a process only now and then. What is left then
    (imported modules, models of fixtures) is not looked at again, or each of some hundred clusters would pay
    for that."""
    gc.collect()
    gc.freeze()
    unique = secrets.token_hex(4)
    if args.model != str(DEMO_MODEL) and "weight_cache" not in args.model_fields_set:
        # a model of one test would be written to this user's cache, and loaded twice for that
        args = args.model_copy(update={"weight_cache": WeightCacheArgs(max_bytes=0)})
    transport: Transport = args.transport if "transport" in args.model_fields_set else "in_process"

    def made(service: Callable[..., Any], role: Role, name: str) -> list[Any]:
        number = dict(zip(Role, num_replicas, strict=False)).get(role, 0)
        setups = [set_up(args, f"{name}{i}-{unique}", transport=transport) for i in range(number)]
        setups = [replace(setup, late_memory=AT_ONCE) for setup in setups]
        return [service(args, setup, lease_margin_s=lease_margin_s) for setup in setups]

    with nullcontext() if measures else known_speeds():
        encoders = made(lambda *args, **_: EncoderService(*args), Role.ENCODE, "e")
        prefills = made(prefill_worker, Role.PREFILL, "p") + made(
            encode_prefill_worker, Role.ENCODE_PREFILL, "ep"
        )
        decodes = made(decode_worker, Role.DECODE, "d") + made(language_worker, Role.LANGUAGE, "l")
        decodes += made(whole_worker, Role.WHOLE, "w")
    by_id = {service.replica_id: service for service in decodes}

    async def call_decode(replica_id: str, request_id: str) -> None:
        await by_id[replica_id].run(request_id)

    policies = [LocalPrefillPolicy((lambda _: False) if overcommits else None) for _ in range(num_doors)]
    has_own = args.door.policy != DoorArgs().policy
    with patch.object(placer, "ANSWER_TOKENS", 0.0 if overcommits else placer.ANSWER_TOKENS):
        doors = [Door(args, call_decode, None if has_own else policy) for policy in policies]
    services = [*encoders, *prefills, *decodes]
    members = [await service.start() for service in services]
    for door in doors:
        for role in Role:
            door.update_members(role, [member for member in members if member.role is role])
    async with asyncio.timeout(HANG_S):
        while any(len(door.peers) < len(members) for door in doors):
            await asyncio.sleep(0.005)
    for worker in decodes if overcommits else ():
        step_together(worker.engine, doors[0], overcommits)
    cluster = LocalCluster(doors, encoders, prefills, decodes, policies)
    try:
        yield cluster
        await cluster.audit()
        for service in services:
            service.check_health()
    finally:
        for door in doors:
            await door.aclose()
        for service in services:
            await service.stop()
        by_id.clear()  # FastAPI remembers the routes of an API that has ended, and with them its door
