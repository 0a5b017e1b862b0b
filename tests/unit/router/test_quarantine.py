"""Which work is suspected of having ended a worker, and refused for it."""

from __future__ import annotations

import msgspec
import pytest

from cluster.errors import QuarantinedError
from cluster.types.media import MediaGeometry, Modality, PlacedMedia
from cluster.types.members import Role
from cluster.types.messages import FinishReason
from cluster.types.request import GenerateRequest, Prompt, SamplingParams, StopParams
from router.flow.quarantine import BARRED_S, MAX_SUSPECTS, NEAR_TOKENS, Quarantine, content_of
from tests.fakes.placement import EPD
from tests.fakes.scripted_flow import ITEM, REQUEST

NOW = 5.0


@pytest.fixture
def quarantine() -> Quarantine:
    return Quarantine()


def test_the_first_loss_makes_a_suspect_and_the_second_bars(quarantine):
    quarantine.lost("x", "e0", NOW)
    quarantine.lost("x", "e0", NOW)  # of another request of the same content
    assert quarantine.is_suspect("x", NOW) and not quarantine.is_barred("x", NOW)
    quarantine.lost("x", "e1", NOW)
    assert quarantine.is_barred("x", NOW) and quarantine.num_barred == 1
    assert not quarantine.is_suspect("y", NOW)


def test_what_is_lost_at_different_points_of_an_answer_is_barred_after_the_third_loss(quarantine):
    """A bystander is lost wherever it happens to be."""
    quarantine.lost("x", "d0", NOW, 40)
    quarantine.lost("x", "d1", NOW, 40 + NEAR_TOKENS + 1)
    assert not quarantine.is_barred("x", NOW)
    quarantine.lost("x", "d2", NOW, 200)
    assert quarantine.is_barred("x", NOW)


def test_work_that_a_worker_survives_is_not_suspected_any_more(quarantine):
    quarantine.lost("x", "e0", NOW)
    quarantine.survived("x")
    quarantine.lost("x", "e1", NOW)
    assert not quarantine.is_barred("x", NOW)


def test_the_loss_of_a_connection_is_not_held_against_what_it_had(quarantine):
    quarantine.lost("x", "e0", NOW)
    quarantine.came_back("e0")
    assert len(quarantine) == 0


def test_suspicion_ends_with_time_and_is_bounded(quarantine):
    quarantine.lost("x", "e0", NOW)
    quarantine.lost("x", "e1", NOW)
    assert not quarantine.is_barred("x", NOW + BARRED_S)
    for number in range(MAX_SUSPECTS + 1):
        quarantine.lost(number, "e0", NOW)
    assert len(quarantine) == MAX_SUSPECTS and not quarantine.is_suspect(0, NOW)


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
def test_a_request_that_took_two_workers_with_it_is_refused_when_it_comes_again(door, role):
    reader = door.start_media()
    door.flow.quarantine.lost(door.attempt().content, "an earlier worker", door.now)
    door.lose(role)
    reader.check_error(QuarantinedError, "this prompt were lost")
    num_sent = sum(len(door.sent(each)) for each in EPD)
    (again,) = door.submit(msgspec.structs.replace(REQUEST, request_id="again"), [ITEM], [b"block"])
    again.check_error(QuarantinedError, "this prompt were lost")
    assert sum(len(door.sent(each)) for each in EPD) == num_sent


def test_the_first_loss_of_a_request_is_no_reason_to_refuse_it(door):
    reader = door.start_media()
    door.lose(Role.DECODE)
    assert len(door.flow.quarantine) == 1 and not reader.has_ended
    door.join(Role.DECODE)
    assert len(door.flow.quarantine) == 0, "it is there again: only its connection was lost"


def test_a_request_with_a_barred_item_is_refused_at_once_by_name(door):
    for worker in ("e0", "e1"):
        door.flow.quarantine.lost(ITEM.media_hash, worker, door.now)
    (reader,) = door.submit(REQUEST, [ITEM])
    reader.check_error(QuarantinedError, r"item 0 \(image\): the workers that encoded it were lost")
    assert not any(door.sent(role) for role in EPD)


def test_an_answer_clears_its_request_of_suspicion(door):
    reader = door.start_media()
    door.flow.quarantine.lost(door.attempt().content, "an earlier worker", door.now)
    door.token(Role.PREFILL, 5, reason=FinishReason.STOP)
    assert reader.token_ids == [5] and len(door.flow.quarantine) == 0
