"""When CUDA graphs are captured: at once in idle turns, now and then beside requests, and never beside a step."""

from __future__ import annotations

from scripted_runner import Script
from tests.support.scheduler_driver import SchedulerDriver

from wavecore.engine_core.loop.core import CAPTURE_SECONDS, OFTEN


def busy() -> SchedulerDriver:
    """A turn takes 10 ms; two steps are in flight."""
    driver = SchedulerDriver(Script(eos_token_id=[]))
    for handle in range(3):
        driver.add(handle, [1, 2, 3], max_tokens=200)
    for _ in range(5):
        driver.step()
    assert len(driver.core.in_flight) == 1
    return driver


def test_an_engine_without_requests_captures_whatever_ran() -> None:
    driver = SchedulerDriver()
    driver.runner.uses = 1
    assert driver.core.has_work
    driver.run()
    assert driver.runner.captures == 1 and not driver.core.has_work


def test_an_engine_that_ends_captures_nothing_more() -> None:
    driver = SchedulerDriver()
    driver.runner.uses = 1
    driver.core.drain()
    assert not driver.core.has_work


def test_beside_requests_the_steps_in_flight_come_back_first() -> None:
    driver = busy()
    steps, tokens = driver.runner.captures, driver.core.requests.totals.output_tokens
    driver.runner.uses = OFTEN
    while driver.runner.captures == steps:
        driver.step()
    assert driver.core.requests.totals.output_tokens > tokens, "which is no time lost for them"
    driver.run()
    driver.check_all()


def test_beside_requests_captures_keep_apart_and_what_is_rare_waits() -> None:
    driver = busy()
    turns = 0
    for _ in range(100):
        driver.runner.uses = OFTEN - 1
        driver.step()
    assert not driver.runner.captures
    started = driver.clock.now
    while driver.runner.captures < 4:
        driver.runner.uses = OFTEN
        driver.step()
        turns += 1
    assert 3 * CAPTURE_SECONDS <= driver.clock.now - started < 4.5 * CAPTURE_SECONDS
    assert len(driver.outputs[0]) > turns / 2, "most turns are steps of the requests"
    driver.runner.uses = 0
    driver.run()
    driver.check_all()
