"""Who gets memory next where media requests also wait for room for their embeddings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduling.admission import PromptAdmission
from cluster.scheduling.keys import SchedulingPolicy, Ticket
from tests.fakes.watched import Watch

POLICY = SchedulingPolicy(aging_s=5.0, tokens_per_s=1000.0, text_share=0.25)
NUM_BLOCKS = 40  # 10 of them text's


def ticket(name: str, arrived_at: float = 0.0, num_tokens: int = 100, is_text: bool = True) -> Ticket:
    return Ticket(name, arrived_at, num_tokens, is_text)


def names(admission: PromptAdmission) -> list[str]:
    return [head.request_id for head in admission.heads()]


def test_the_more_urgent_head_goes_first_and_text_does_not_wait_behind_media_that_cannot_be_served():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    admission.push(ticket("video", 0.0, 8000, is_text=False), 4)
    admission.push(ticket("text", 1.0), 4)
    assert names(admission) == ["text"]  # 1.1 s against 8 s
    admission.push(ticket("late", 9.0), 4)
    admission.admit(admission.heads()[0], 1)
    assert names(admission) == ["video", "late"]


def test_media_keeps_its_order_of_arrival_whatever_its_size():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    admission.push(ticket("long", 0.0, 8000, is_text=False), 4)
    admission.push(ticket("short", 0.1, 10, is_text=False), 4)
    assert names(admission) == ["long"]


def test_media_that_is_not_ready_keeps_its_place_and_text_may_pass():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    first = ticket("first", 0.0, 1, is_text=False)
    admission.keep_place(first, 4)
    assert names(admission) == []
    admission.push(ticket("second", 0.1, 1, is_text=False), 4)
    assert names(admission) == []
    admission.push(ticket("text", 1.0), 4)
    assert names(admission) == ["text"]
    admission.push(first, 4)
    assert names(admission) == ["first", "text"]
    watch = Watch()
    admission.keep_place(ticket(watch.name("third"), 0.2, 1, is_text=False), 4)
    admission.remove("first")
    admission.remove("second")
    assert names(admission) == ["text"]
    admission.remove("third")
    assert not watch.held


def test_behind_waiting_media_text_takes_no_more_than_its_share():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    admission.push(ticket("video", 0.0, 1, is_text=False), 4)
    for i in range(4):
        admission.push(ticket(f"t{i}", 1.0 + i), 4)
    taken = []
    while len(heads := admission.heads()) > 1:
        taken.append(heads[1].request_id)
        admission.admit(heads[1], 4)
    assert taken == ["t0", "t1", "t2"]  # 12 blocks: the share was not reached before the last
    assert names(admission) == ["video"]


def test_text_that_passes_media_leaves_the_blocks_that_the_media_needs():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    admission.push(ticket("video", 0.0, 1, is_text=False), 36)
    for i in range(3):
        admission.push(ticket(f"t{i}", 1.0 + i), 2)
    taken = []
    while admission.has_share(text := admission.heads()[1], 2):
        taken.append(text.request_id)
        admission.admit(text, 2)
    assert taken == ["t0", "t1"]  # 4 blocks, and 36 for the video; its share are 10
    admission.remove("t0")
    assert admission.has_share(text, 2), "text that ends makes room for text"


def test_media_leaves_texts_share_alone_unless_one_request_needs_more():
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    first, second = ticket("a", is_text=False), ticket("b", is_text=False)
    admission.push(first, 4)
    assert admission.has_share(first, 38)
    admission.admit(first, 20)
    admission.push(second, 10)
    assert admission.has_share(second, 10) and not admission.has_share(second, 11)
    admission.remove("a")
    assert admission.has_share(second, 38)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8), st.integers(0, 3)), min_size=1, max_size=60))
def test_every_request_is_served_once_when_memory_is_free_again(arrivals):
    """Whatever arrives, a pool that gives back what it gave out serves all, and counts nothing at the end."""
    admission = PromptAdmission(POLICY, NUM_BLOCKS)
    sizes, held, free, served = {}, [], NUM_BLOCKS, []
    for i, (is_text, num_blocks, wait) in enumerate(arrivals):
        sizes[f"r{i}"] = num_blocks
        admission.push(ticket(f"r{i}", float(i + wait), 16 * num_blocks, is_text), num_blocks)
    for _ in range(10 * len(arrivals)):
        for head in admission.heads():
            num_blocks = sizes[head.request_id]
            if num_blocks <= free and admission.has_share(head, num_blocks):
                admission.admit(head, num_blocks)
                free -= num_blocks
                held.append(head.request_id)
                served.append(head.request_id)
                break
        else:
            if held:
                done = held.pop(0)
                free += sizes[done]
                admission.remove(done)
    assert sorted(served) == sorted(sizes)
    for name in held:
        admission.remove(name)
    assert not admission.heads()
    video, text = ticket("video", 0.0, is_text=False), ticket("text", 1000.0)
    assert admission.has_share(video, 10 * NUM_BLOCKS), "media holds nothing"
    admission.push(video, 4)
    room = NUM_BLOCKS - 4
    assert admission.has_share(text, room) and not admission.has_share(text, room + 1), "nor does text"
