"""Deadlines of waiting and running requests, by a clock that moves by hand."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import Clock, SchedulerDriver

from wavecore.transport.wire.messages import FinishReason

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=512)


def make(clock: Clock, **config: Any) -> SchedulerDriver:
    return SchedulerDriver(SCRIPT, clock=clock, max_num_seqs=1, **config)


@pytest.mark.parametrize("n", [1, 3])
def test_total_time(n: int) -> None:
    clock = Clock()
    driver = make(clock)
    driver.add(0, [1, 2], {"timeout": 2.0}, max_tokens=400, n=n)
    for _ in range(5):
        driver.step()
    clock.now += 1.9
    driver.step()
    assert not driver.finish
    clock.now += 0.2
    driver.run()
    assert [driver.finish[handle] for handle in range(n)] == [FinishReason.TIMEOUT] * n
    assert driver.extras[0]["code"] == "timeout" and "timeout is 2.0 s" in driver.extras[0]["message"]


@pytest.mark.parametrize("idle", [86_400.0, 16 * 86_400.0, 200 * 86_400.0, 10 * 365 * 86_400.0])
def test_an_idle_engine_wakes_up_at_once(idle: float) -> None:
    """The first request with deadlines after a day, or ten years: none of them has passed, and none is late."""
    clock = Clock()
    driver = make(clock, max_holding_seconds=50.0)
    driver.add(0, [1, 2], {"timeout": 5.0}, max_tokens=3)
    driver.run()
    clock.now += idle
    driver.add(1, [1, 2], {"timeout": 9.0, "queue_timeout": 4.0, "first_token_timeout": 6.0}, max_tokens=400)
    driver.add(2, [1, 2], {"timeout": 7 * 86_400.0, "queue_timeout": 3.0}, max_tokens=400)
    for _ in range(5):
        driver.step()
    assert driver.finish == {0: FinishReason.LENGTH} and driver.outputs[1]
    clock.now += 3.02
    driver.step()
    assert driver.finish == {0: FinishReason.LENGTH, 2: FinishReason.TIMEOUT}
    clock.now += 6.0
    driver.run()
    assert driver.finish[1] is FinishReason.TIMEOUT and "timeout is 9.0 s" in driver.extras[1]["message"]


def test_queue_time_counts_until_the_first_step_only() -> None:
    clock = Clock()
    driver = make(clock, max_queue_seconds=1.0)
    driver.add(0, [1, 2], max_tokens=20)
    driver.step()
    driver.add(1, [1, 2], max_tokens=20)
    driver.add(2, [1, 2], {"queue_timeout": 500.0}, max_tokens=20)
    clock.now += 5.0
    driver.run()
    assert driver.finish == {0: FinishReason.LENGTH, 1: FinishReason.TIMEOUT, 2: FinishReason.LENGTH}
    assert "waited 5 s" in driver.extras[1]["message"]


def test_first_token_time() -> None:
    clock = Clock()
    driver = make(clock)
    driver.add(0, [1, 2], {"first_token_timeout": 1.0}, max_tokens=20)
    driver.step()
    driver.step()
    driver.add(1, [1, 2], {"first_token_timeout": 1.0}, max_tokens=20)
    clock.now += 2.0
    driver.run()
    assert driver.finish == {0: FinishReason.LENGTH, 1: FinishReason.TIMEOUT}
    assert "first_token_timeout is 1.0 s" in driver.extras[1]["message"]


def test_holding_time_starts_anew_after_a_preemption() -> None:
    clock = Clock()
    driver = make(clock, max_holding_seconds=10.0, scheduling_policy="priority")
    driver.add(0, [1, 2], {"priority": 1}, max_tokens=100)
    driver.step()
    clock.now += 8.0
    driver.add(1, [3, 4], {"priority": 0}, max_tokens=4)
    for _ in range(8):
        driver.step()
    assert driver.core.requests.totals.preemptions == 1 and 1 in driver.finish
    clock.now += 8.0
    driver.step()
    assert 0 not in driver.finish
    clock.now += 3.0
    driver.run()
    assert driver.finish[0] is FinishReason.TIMEOUT and "max_holding_seconds" in driver.extras[0]["message"]


def test_two_deadlines_at_once_end_a_request_once() -> None:
    clock = Clock()
    driver = make(clock)
    driver.add(0, [1, 2], max_tokens=5)
    driver.add(1, [1, 2], {"timeout": 1.0, "queue_timeout": 1.0, "first_token_timeout": 1.0}, max_tokens=20)
    clock.now += 2.0
    driver.run()
    assert driver.finish[1] is FinishReason.TIMEOUT


def test_the_queue_deadline_is_of_the_request_not_of_its_choices() -> None:
    clock = Clock()
    driver = make(clock)
    driver.add(0, [1, 2], {"queue_timeout": 1.0}, max_tokens=20, n=3)
    driver.step()
    clock.now += 5.0
    driver.run()
    driver.check_all()
