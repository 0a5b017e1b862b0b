import threading

import pytest

from cluster.worker.loop import StepLoop


class CountingEngine:
    def __init__(self, wait_s: float | None = None):
        self.wait_s = wait_s
        self.num_steps = 0
        self.stepped = threading.Event()

    def step(self) -> float | None:
        self.num_steps += 1
        self.stepped.set()
        return self.wait_s


def test_an_idle_engine_is_not_stepped():
    engine = CountingEngine()
    loop = StepLoop("test", engine)
    loop.start()
    loop.call(lambda: None)
    assert engine.stepped.wait(60)
    loop.stop(60)
    assert engine.num_steps == 1


def test_calls_run_in_order_before_the_step():
    engine = CountingEngine()
    loop = StepLoop("test", engine)
    seen: list[int] = []
    for i in range(100):
        loop.call(seen.append, i)
    loop.start()
    assert engine.stepped.wait(60)
    loop.stop(60)
    assert seen == list(range(100))


def test_an_engine_that_dies_is_reported():
    stepped = threading.Event()

    class BrokenEngine:
        def step(self) -> float | None:
            stepped.set()
            raise ValueError("broken")

    loop = StepLoop("test", BrokenEngine())
    loop.check_health()
    loop.start()
    loop.call(lambda: None)
    assert stepped.wait(60)
    loop.stop(60)
    with pytest.raises(RuntimeError, match="the engine stopped"):
        loop.check_health()


def test_an_engine_with_a_deadline_is_stepped_when_it_comes():
    engine = CountingEngine(wait_s=0.01)
    loop = StepLoop("test", engine)
    loop.start()
    loop.call(lambda: None)
    done = threading.Event()
    loop.call(done.set)
    assert done.wait(60)
    for _ in range(3):
        engine.stepped.clear()
        assert engine.stepped.wait(60)
    loop.stop(60)
    assert engine.num_steps >= 3


def test_an_engine_that_hangs_can_be_failed_from_outside():
    hanging, failures = threading.Event(), []

    class HangingEngine:
        def step(self) -> float | None:
            hanging.wait(60)
            return None

    loop = StepLoop("test", HangingEngine())
    loop.on_failure(lambda: failures.append(threading.current_thread().name))
    loop.start()
    loop.call(lambda: None)
    loop.fail(RuntimeError("a rank has ended"))
    loop.fail(RuntimeError("another one, too"))
    assert failures == [threading.current_thread().name]
    with pytest.raises(RuntimeError, match="the engine stopped") as raised:
        loop.check_health()
    assert "a rank has ended" in str(raised.value.__cause__)
    loop.on_failure(lambda: failures.append("told late"))
    assert failures[1:] == ["told late"], "a late caller is told, too"
    hanging.set()
    loop.stop(60)
