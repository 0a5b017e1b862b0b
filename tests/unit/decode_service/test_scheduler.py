from collections import deque

from decode_service.scheduler import admit, select_batch


def test_everyone_runs_when_the_batch_is_large_enough():
    running = deque("abc")
    assert select_batch(running, 4) == ["a", "b", "c"] and list(running) == ["a", "b", "c"]


def test_more_requests_than_the_batch_take_turns():
    running = deque("abcde")
    turns = [select_batch(running, 2) for _ in range(5)]
    assert sorted(member for turn in turns for member in turn) == sorted("abcde" * 2)


def test_nobody_overtakes_a_large_request():
    sizes = {"large": 8, "small": 1, "first": 2}
    assert admit(deque(["first", "large", "small"]), 9, sizes.__getitem__) == ["first"]
    assert admit(deque(["first", "large", "small"]), 11, sizes.__getitem__) == ["first", "large", "small"]
