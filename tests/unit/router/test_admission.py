"""Who goes, who waits and who is refused, one decision at a time; and budgets that come back whatever
happens."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from pydantic import ValidationError

from cluster.config.settings import AdmissionArgs, AdmissionClassArgs
from router.admission.queue import (
    SPEED_WINDOW_S,
    AdmissionQueue,
    AdmissionRefusal,
    AdmissionTicket,
    Admitted,
    Capacity,
    Queued,
    RefusalReason,
    Reported,
    _QueueRate,
)
from tests.fakes.door_world import one_class, two_classes


def ticket(name: str, tenant: str = "", class_name: str = "interactive", **fields) -> AdmissionTicket:
    given = {
        "is_text": True,
        "work_s": 1.0,
        "num_blocks": 1,
        "ttft_s": 1.0,
        "arrived_at": 0.0,
        **fields,
    }
    return AdmissionTicket(name, tenant, class_name, **given)


def queue(
    *classes: AdmissionClassArgs, text_share: float = 0.3, capacity: Capacity | None = None, **args
) -> AdmissionQueue:
    """With one prefill worker, one encoder and, by default, one class."""
    settings_ = AdmissionArgs.model_validate({"classes": classes or (one_class(),), **args})
    return AdmissionQueue(settings_, text_share, capacity or Capacity(1, 1, 1000))


def fill(admission: AdmissionQueue, number: int = 2, **fields) -> None:
    """Admit what keeps the workers busy."""
    for idx in range(number):
        admission.offer(ticket(f"busy {idx}", **fields), 0.0)
        admission.freed(0.0)


def names(tickets) -> list[str]:
    return [each.request_id for each in tickets]


# Text and media


def test_text_may_pass_media_that_waits_for_memory_until_text_has_its_share():
    admission = queue(text_share=0.3, capacity=Capacity(8, 8, 100))
    admission.offer(ticket("long", num_blocks=60), 0.0)
    admission.done("long")
    assert admission.offer(ticket("video", is_text=False, encode_s=0.5, num_blocks=50), 0.0) == Queued()
    assert admission.offer(ticket("a", num_blocks=10), 0.0) == Queued()  # text has more than 30 already
    admission.leave("long")
    assert names(admission.freed(1.0)) == ["video", "a"]
    assert admission.offer(ticket("large", is_text=False, encode_s=0.5, num_blocks=45), 1.0) == Queued()
    assert [type(admission.offer(ticket(name, num_blocks=10), 1.0)) for name in "bcd"] == [
        Admitted,
        Admitted,
        Queued,
    ]


def test_text_that_passes_media_leaves_the_blocks_that_the_media_needs():
    admission = queue(text_share=0.3, capacity=Capacity(8, 8, 100))
    for name in ("a", "b"):
        assert admission.offer(ticket(name, num_blocks=5), 0.0) == Admitted()
    assert admission.offer(ticket("video", is_text=False, encode_s=0.5, num_blocks=96), 0.0) == Queued()
    assert admission.offer(ticket("c", num_blocks=5), 0.0) == Queued()  # text's share are 30
    admission.leave("a")
    assert names(admission.freed(1.0)) == []
    admission.leave("b")
    assert names(admission.freed(2.0)) == ["video"]


def test_media_that_leaves_before_it_is_encoded_makes_room_at_the_encoders():
    admission = queue(capacity=Capacity(1, 8, 1000))
    fields = {"is_text": False, "encode_s": 0.9, "work_s": 0.95}
    for name in ("a", "b"):
        assert admission.offer(ticket(name, **fields), 0.0) == Admitted()
    assert admission.offer(ticket("c", **fields), 0.0) == Queued()
    admission.leave("a")
    admission.leave("b")
    assert names(admission.freed(0.0)) == ["c"]
    assert admission.offer(ticket("d", **fields), 0.0) == Admitted()
    assert admission.offer(ticket("e", **fields), 0.0) == Queued()


def test_text_passes_media_that_waits_for_encoders_however_much_text_holds():
    admission = queue(text_share=0.0, capacity=Capacity(1, 8, 100))
    for name in ("a", "b", "c"):
        admission.offer(ticket(name, is_text=False, encode_s=0.9), 0.0)
    assert admission.num_waiting == 1
    assert admission.offer(ticket("text"), 0.0) == Admitted()
    admission.encoded("a")
    assert names(admission.freed(1.0)) == ["c"]


def test_media_leaves_text_its_share_of_prefill():
    admission = queue(text_share=0.5, capacity=Capacity(8, 8, 1000), max_outstanding_s=1.0)
    for idx in range(9):
        admission.offer(ticket(f"r{idx}", is_text=False, encode_s=0.1, work_s=1.1), 0.0)
    assert admission.num_waiting == 1
    assert admission.offer(ticket("text"), 0.0) == Admitted()


# One decision


def test_an_idle_cluster_takes_whatever_comes():
    admission = queue(one_class(target_ttft_s=1.0, max_wait_s=0.1))
    assert admission.offer(ticket("slow", work_s=0.5, ttft_s=50.0, num_blocks=10**6), 0.0) == Admitted()


def test_work_beyond_what_keeps_workers_busy_waits_at_the_door():
    admission = queue(capacity=Capacity(0, 2, 1000), max_outstanding_s=1.0)
    answers = [admission.offer(ticket(f"r{idx}", work_s=0.3), 0.0) for idx in range(9)]
    assert answers == [Admitted()] * 7 + [Queued()] * 2  # two seconds, and what the seventh exceeds them


def test_large_requests_leave_no_worker_without_one_in_work_and_one_behind_it():
    admission = queue(capacity=Capacity(0, 8, 1000))
    answers = [admission.offer(ticket(f"r{idx}", work_s=20.0), 0.0) for idx in range(17)]
    assert answers == [Admitted()] * 16 + [Queued()]


def test_a_request_that_would_miss_its_target_is_refused_with_the_time_at_which_it_would_not():
    admission = queue(one_class(target_ttft_s=5.0))
    fill(admission)
    answer = admission.offer(ticket("late", ttft_s=12.5), 0.0)
    assert isinstance(answer, AdmissionRefusal)
    assert (answer.retry_after_s, answer.reason) == (8, RefusalReason.TARGET)


def test_a_prompt_too_long_for_any_target_is_served_like_one_without():
    admission = queue(one_class(target_ttft_s=5.0))
    fill(admission)
    assert admission.offer(ticket("long", work_s=6.0, ttft_s=8.0), 0.0) == Queued()


def test_a_waiting_request_is_refused_when_its_time_is_over_and_only_once():
    admission = queue(one_class(max_wait_s=3.0))
    fill(admission)
    waiting = ticket("waiting")
    assert admission.offer(waiting, 1.0) == Queued()
    assert admission.next_deadline() == 4.0 and admission.expired(3.9) == []
    [(given_up, answer)] = admission.expired(4.0)
    assert given_up is waiting and answer.reason is RefusalReason.WAIT and answer.retry_after_s >= 1
    assert admission.expired(4.0) == [] and admission.next_deadline() is None


def test_whose_time_is_over_does_not_go_though_there_is_room():
    admission = queue(one_class(max_wait_s=3.0))
    fill(admission)
    admission.offer(ticket("waiting"), 1.0)
    admission.done("busy 0")
    assert admission.freed(4.0) == [] and names(each for each, _ in admission.expired(4.0)) == ["waiting"]


def test_whose_time_is_over_is_in_nobodys_way():
    admission = queue(one_class(max_wait_s=3.0))
    fill(admission)
    admission.offer(ticket("waiting"), 1.0)
    admission.done("busy 0")
    assert admission.offer(ticket("next"), 4.0) == Admitted()


def test_within_a_tenant_who_must_start_first_goes_first():
    admission = queue(one_class(target_ttft_s=30.0))
    fill(admission)
    admission.offer(ticket("quick", ttft_s=2.0), 0.0)
    admission.offer(ticket("slow", ttft_s=9.0), 0.0)
    admission.done("busy 0")
    assert names(admission.freed(1.0)) == ["slow"]


def test_a_full_queue_gives_places_of_batch_to_interactive_and_keeps_one_of_each_class():
    admission = queue(*two_classes(), max_queued=3)
    fill(admission)
    for name in "abc":
        assert admission.offer(ticket(name, class_name="batch"), 0.0) == Queued()
    answer = admission.offer(ticket("d", class_name="batch"), 0.0)
    assert isinstance(answer, AdmissionRefusal) and answer.reason is RefusalReason.FULL
    assert [type(admission.offer(ticket(name), 0.0)) for name in "xyz"] == [Queued, Queued, AdmissionRefusal]
    lost = admission.expired(0.0)
    assert [(each.request_id, answer.reason) for each, answer in lost] == [
        ("c", RefusalReason.DISPLACED),
        ("b", RefusalReason.DISPLACED),
    ]


def test_a_full_queue_gives_places_of_the_longest_line_to_other_tenants():
    admission = queue(max_queued=3)
    fill(admission)
    for name in "abc":
        admission.offer(ticket(name, tenant="many"), 0.0)
    assert admission.offer(ticket("one", tenant="few"), 0.0) == Queued()
    assert [each.request_id for each, _ in admission.expired(0.0)] == ["c"]
    assert isinstance(admission.offer(ticket("d", tenant="many"), 0.0), AdmissionRefusal)


def test_what_other_doors_have_sent_counts_as_far_as_workers_report_it():
    admission = queue(capacity=Capacity(0, 1, 100))
    fill(admission, work_s=0.1)
    admission.report(Reported(prefill_s=5.0))
    assert admission.offer(ticket("a", work_s=0.1), 0.0) == Queued()
    admission.report(Reported(num_blocks=100))
    assert admission.freed(1.0) == []
    admission.report(Reported())
    assert names(admission.freed(2.0)) == ["a"]


def test_each_of_several_doors_admits_its_share():
    admission = queue(capacity=Capacity(0, 8, 100), num_doors=4, max_outstanding_s=1.0)
    answers = [admission.offer(ticket(f"r{idx}", work_s=0.5), 0.0) for idx in range(5)]
    assert answers == [Admitted()] * 4 + [Queued()]


def test_a_door_that_takes_its_share_is_not_kept_out_by_the_shares_of_others():
    admission = queue(capacity=Capacity(0, 8, 100), num_doors=4)
    admission.offer(ticket("a", num_blocks=5), 0.0)
    admission.report(Reported(prefill_s=3.0, num_blocks=80))
    assert admission.offer(ticket("b", num_blocks=5), 0.0) == Admitted()
    assert admission.offer(ticket("c", num_blocks=5), 0.0) == Admitted()
    assert admission.offer(ticket("d", num_blocks=20), 0.0) == Queued()


def test_new_workers_let_waiting_requests_in():
    admission = queue()
    fill(admission)
    admission.offer(ticket("a"), 0.0)
    admission.resize(Capacity(1, 2, 1000))
    assert names(admission.freed(1.0)) == ["a"]


def test_a_refusal_is_an_overload_with_the_time_to_come_back():
    error = AdmissionRefusal(7, RefusalReason.WAIT, "busy").to_error()
    assert (error.status, error.retry_after_s, error.message) == (429, 7, "busy")


def test_a_request_is_offered_once():
    admission = queue()
    fill(admission)
    admission.offer(ticket("a"), 0.0)
    for name in ("a", "busy 0"):
        with pytest.raises(ValueError, match="is here already"):
            admission.offer(ticket(name), 0.0)


# Settings


def test_priorities_belong_to_the_first_class_that_reaches_so_far():
    admission = queue(*two_classes())
    assert [admission.class_name(priority) for priority in (-8, 0, 1, 8)] == ["interactive"] * 2 + [
        "batch"
    ] * 2


@pytest.mark.parametrize("bounds", [(0, 1), (None, None), (1, 0, None), ()])
def test_classes_that_leave_a_priority_without_a_class_or_a_class_without_priorities_are_refused(bounds):
    classes = [{"name": str(idx), "max_priority": bound} for idx, bound in enumerate(bounds)]
    with pytest.raises(ValidationError, match="max_priority must grow"):
        AdmissionArgs.model_validate({"classes": classes})


def test_two_classes_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two classes have one name"):
        AdmissionArgs.model_validate({"classes": [{"name": "a", "max_priority": 0}, {"name": "a"}]})


# Everything that can happen, in any order


class Door(RuleBasedStateMachine):
    """A door that does whatever it may. Each request is refused at most once, and never after it was
    admitted."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.admission = queue(
            *two_classes(target_ttft_s=6.0, max_wait_s=5.0), max_queued=6, capacity=Capacity(1, 2, 100)
        )
        self.state: dict[str, str] = {}  # request id → waiting, admitted or ended
        self.blocks: dict[str, int] = {}

    @rule(
        tenant=st.sampled_from("abc"),
        class_name=st.sampled_from(["interactive", "batch"]),
        encode_s=st.sampled_from([0.0, 0.4, 3.0]),
        prefill_s=st.floats(0, 3),
        num_blocks=st.integers(0, 120),
        ttft_s=st.floats(0, 8),
    )
    def offer(self, tenant, class_name, encode_s, prefill_s, num_blocks, ttft_s):
        name = f"r{len(self.state)}"
        offered = ticket(
            name, tenant, class_name, is_text=encode_s == 0, encode_s=encode_s, work_s=encode_s + prefill_s,
            num_blocks=num_blocks, ttft_s=ttft_s, arrived_at=self.now,
        )  # fmt: skip
        answer = self.admission.offer(offered, self.now)
        self.blocks[name] = num_blocks
        self.state[name] = {Admitted: "admitted", Queued: "waiting", AdmissionRefusal: "ended"}[type(answer)]
        if isinstance(answer, AdmissionRefusal):
            assert answer.retry_after_s >= 1

    @rule(passed_s=st.floats(0, 4))
    def pass_time(self, passed_s):
        self.now += passed_s

    @rule()
    def let_in(self):
        for each in self.admission.freed(self.now):
            assert self.state[each.request_id] == "waiting"
            self.state[each.request_id] = "admitted"
        if not any(state == "admitted" for state in self.state.values()):
            assert self.admission.num_waiting == 0

    @rule()
    def give_up(self):
        for each, answer in self.admission.expired(self.now):
            assert self.state[each.request_id] == "waiting" and answer.retry_after_s >= 1
            self.state[each.request_id] = "ended"

    @rule(data=st.data(), event=st.sampled_from(["encoded", "done", "leave"]))
    def tell(self, data, event):
        name = data.draw(st.sampled_from(sorted(self.state) or ["unknown"]))
        getattr(self.admission, event)(name)
        if event == "leave" and name in self.state:
            refused_ = {each.request_id for each, _ in self.admission.expired(self.now)}
            self.state |= dict.fromkeys({name} | refused_, "ended")

    @invariant()
    def nobody_is_lost(self):
        told = sum(state == "waiting" for state in self.state.values())
        not_yet_told = self.admission.next_deadline()
        assert self.admission.num_waiting <= told
        assert told == self.admission.num_waiting or not_yet_told is not None
        assert self.admission.num_waiting <= 6 + 2

    @invariant()
    def memory_is_never_given_twice(self):
        held = [self.blocks[name] for name, state in self.state.items() if state == "admitted"]
        assert sum(held) <= 100 or Counter(block > 0 for block in held)[True] == 1

    def teardown(self):
        for name in self.state:
            self.admission.leave(name)
        assert self.admission.is_idle
        fresh = [ticket(f"fresh {idx}", work_s=2.0, num_blocks=25, arrived_at=self.now) for idx in range(4)]
        assert [self.admission.offer(each, self.now) for each in fresh] == [Admitted()] * 4


TestDoor = Door.TestCase
TestDoor.settings = settings(max_examples=60, stateful_step_count=40)


@pytest.mark.parametrize("every_s", [0.1, 1.0, 30.0])
def test_the_speed_of_a_queue_is_the_same_however_seldom_it_is_looked_at(every_s):
    """Requests wait for a minute, and leave at half the speed that is predicted."""
    rate = _QueueRate()
    rate.advance(1000.0, is_waiting=False)
    for step in range(1, round(60.0 / every_s) + 1):
        rate.advance(1000.0 + step * every_s, is_waiting=True)
    rate.started(SPEED_WINDOW_S / 2)
    assert rate.speed == pytest.approx(0.5, abs=0.01)
