"""Who is suspected of having ended a worker, and who is refused for it."""

from __future__ import annotations

import pytest

from cluster.errors import QuarantinedError, UnavailableError
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.members import Role
from cluster.types.messages import FinishReason
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.quarantine import BARRED_S, MAX_SUSPECTS, NEAR_TOKENS, Quarantine, content_of
from tests.fakes.clock import ManualClock
from tests.unit.router.scripted_door import ITEM, REQUEST


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine(ManualClock())


def test_the_first_loss_makes_a_suspect_and_the_second_bars(quarantine):
    quarantine.lost("x", "e0")
    quarantine.lost("x", "e0")  # of another request of the same content
    assert quarantine.is_suspect("x") and not quarantine.is_barred("x")
    quarantine.lost("x", "e1")
    assert quarantine.is_barred("x") and quarantine.num_barred == 1
    assert not quarantine.is_suspect("y")


def test_what_is_lost_at_different_points_of_an_answer_is_barred_after_the_third_loss(quarantine):
    """A bystander is lost wherever it happens to be."""
    quarantine.lost("x", "d0", 40)
    quarantine.lost("x", "d1", 40 + NEAR_TOKENS + 1)
    assert not quarantine.is_barred("x")
    quarantine.lost("x", "d2", 200)
    assert quarantine.is_barred("x")


def test_who_survives_is_not_suspected_any_more(quarantine):
    quarantine.lost("x", "e0")
    quarantine.survived("x")
    quarantine.lost("x", "e1")
    assert not quarantine.is_barred("x")


def test_the_loss_of_a_connection_is_not_held_against_what_it_had(quarantine):
    quarantine.lost("x", "e0")
    quarantine.came_back("e0")
    assert len(quarantine) == 0


def test_suspicion_ends_with_time_and_is_bounded(quarantine):
    quarantine.lost("x", "e0")
    quarantine.lost("x", "e1")
    quarantine._clock.at += BARRED_S
    assert not quarantine.is_barred("x")
    for number in range(MAX_SUSPECTS + 1):
        quarantine.lost(number, "e0")
    assert len(quarantine) == MAX_SUSPECTS and not quarantine.is_suspect(0)


def test_prompts_are_told_apart_by_tokens_and_media():
    def content(*token_ids: int, media: str = "hash", block: bytes = b"b") -> object:
        placed = (PlacedMedia(Modality.IMAGE, media, ((0, 1),), MediaGeometry(1)),)
        request = GenerateRequest("r", Prompt(token_ids, placed), (SamplingParams(),), StopParams(3))
        return content_of(request, [block], 2)

    assert content(1, 2, 3) == content(1, 2, 3)
    assert (
        len({content(1, 2, 3), content(1, 2, 4), content(1, 2, 3, media="m"), content(1, 2, 3, block=b"c")})
        == 4
    )


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_request_that_took_two_workers_with_it_is_refused_when_it_comes_again(door, role):
    task, _ = await door.start()
    (flight,) = door.dispatcher._flights.values()
    door.dispatcher.quarantine.lost(flight.content, "an earlier worker")
    door.dispatcher.on_lost(door.members.peers[role])
    with pytest.raises(QuarantinedError, match="this prompt were lost"):
        await task
    num_sent = sum(len(door.sent(each)) for each in Role)
    (stream,) = door.generate(REQUEST, [ITEM], [b"block"])
    with pytest.raises(QuarantinedError, match="this prompt were lost"):
        await anext(stream)
    assert sum(len(door.sent(each)) for each in Role) == num_sent


async def test_the_first_loss_of_a_request_is_no_reason_to_refuse_it(door):
    task, _ = await door.start()
    door.dispatcher.on_lost(door.members.peers[Role.DECODE])
    with pytest.raises(UnavailableError, match="decode worker was lost"):
        await task
    door.dispatcher.on_joined(door.members.peers[Role.DECODE])
    assert len(door.dispatcher.quarantine) == 0, "it is there again: only its connection was lost"


async def test_a_request_with_a_barred_item_is_refused_at_once_by_name(door):
    for worker in ("e0", "e1"):
        door.dispatcher.quarantine.lost(ITEM.media_hash, worker)
    (stream,) = door.generate(REQUEST, [ITEM], [])
    with pytest.raises(QuarantinedError, match=r"item 0 \(image\): the workers that encoded it were lost"):
        await anext(stream)
    assert not any(door.sent(role) for role in Role)


async def test_an_answer_clears_its_request_of_suspicion(door):
    task, _ = await door.start()
    (flight,) = door.dispatcher._flights.values()
    door.dispatcher.quarantine.lost(flight.content, "an earlier worker")
    door.token(Role.PREFILL, 5, reason=FinishReason.STOP)
    await task
    assert len(door.dispatcher.quarantine) == 0
