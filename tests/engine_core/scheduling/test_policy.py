"""Order of the queue, urgent arrivals, ageing."""

from __future__ import annotations

import heapq
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import Script
from tests.support.scheduler_driver import Clock, SchedulerDriver, make_add

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.scheduling.policy import Policy, WaitingQueue

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=512)


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 100)), max_size=30), st.floats(0.5, 20), st.data())
def test_hybrid_order_is_that_of_aged_priorities_at_any_time(
    arrivals: list[tuple[int, float]], tau: float, data: st.DataObject
) -> None:
    now = data.draw(st.floats(100, 1000))
    policy = Policy(EngineConfig(scheduling_policy="hybrid", ageing_seconds=tau))
    aged = [priority - (now - arrival) / tau for priority, arrival in arrivals]
    keys = [policy.major(priority, arrival) for priority, arrival in arrivals]
    for i in range(len(keys)):
        for j in range(len(keys)):
            if aged[i] < aged[j] - 1e-6:
                assert keys[i] < keys[j] + 1e-6


def test_first_come_first_served_asks_neither_priority_nor_a_clock() -> None:
    policy = Policy(EngineConfig(scheduling_policy="fcfs"))
    assert policy.major(5, 9.0) == policy.major(-5, 7.0)


def test_queue_against_a_sorted_list() -> None:
    driver = SchedulerDriver(SCRIPT)
    rng = random.Random(5)
    queue = WaitingQueue()
    model = []
    for i in range(3000):
        if rng.random() < 0.55:
            request = driver.core.admit(make_add(i, [1, 2, 3]))
            request.major, request.minor = float(rng.randrange(5)), i
            queue.push(request)
            model.append(request)
        elif model:
            request = rng.choice(model) if rng.random() < 0.5 else min(model, key=lambda r: (r.major, r.minor))
            model.remove(request)
            queue.remove(request)
        best = min(model, key=lambda r: (r.major, r.minor), default=None)
        assert queue.peek() is best and len(queue) == len(model) and queue.num_tokens == 3 * len(model)
    assert queue.in_order() == sorted(model, key=lambda r: (r.major, r.minor))


def test_dead_entries_of_the_queue_go_when_they_are_the_majority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not earlier: a removal costs the same however many wait."""
    compactions: list[int] = []

    def heapify(heap: list[Any]) -> None:
        compactions.append(len(heap))
        heapq.heapify(heap)

    names = SimpleNamespace(heappush=heapq.heappush, heappop=heapq.heappop, heapify=heapify)
    monkeypatch.setattr("wavecore.engine_core.scheduling.policy.heapq", names)
    driver, queue = SchedulerDriver(SCRIPT), WaitingQueue()
    requests = [driver.core.admit(make_add(i, [1, 2, 3])) for i in range(400)]
    for i, request in enumerate(requests):
        request.minor = i
        queue.push(request)
    queue.remove(requests[0])  # the best one, which may come back
    queue.push(requests[0])
    assert queue.in_order() == requests
    for request in requests[:0:-1]:
        queue.remove(request)
        assert len(queue._heap) <= 2 * len(queue)
    assert len(compactions) <= 9 and compactions[0] == 199  # each halves it


@pytest.mark.parametrize(("policy", "first"), [("fcfs", [0, 1, 2, 3]), ("priority", [2, 0, 1, 3])])
def test_waiting_order(policy: str, first: list[int]) -> None:
    driver = SchedulerDriver(SCRIPT, max_num_seqs=1, scheduling_policy=policy)
    for handle, priority in enumerate((0, 0, -1, 1)):
        driver.add(handle, [1 + handle] * 5, {"priority": priority}, max_tokens=3)
    driver.run()
    assert sorted(driver.first_step, key=driver.first_step.__getitem__) == first


@pytest.mark.parametrize("policy", ["priority", "hybrid"])
def test_an_urgent_arrival_pushes_out_a_running_request(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "wavecore")
    driver = SchedulerDriver(SCRIPT, max_num_seqs=2, scheduling_policy=policy, ageing_seconds=1e6)
    for handle in range(2):
        driver.add(handle, [1 + handle] * 20, {"priority": 5}, max_tokens=100)
    for _ in range(10):
        driver.step()
    driver.add(9, [7] * 20, {"priority": 1}, max_tokens=3)
    driver.run()
    driver.check_all()
    assert driver.first_step[9] - 10 <= 4
    assert driver.core.requests.totals.preemptions == 1
    assert "preempted request 1: request 9 of priority 1 is more urgent" in caplog.text
    assert "computed tokens lost" in caplog.text


def test_equal_priority_pushes_nobody_out() -> None:
    driver = SchedulerDriver(SCRIPT, max_num_seqs=2, scheduling_policy="priority")
    for handle in range(3):
        driver.add(handle, [1 + handle] * 20, {"priority": 1}, max_tokens=20)
    driver.run()
    assert driver.core.requests.totals.preemptions == 0


def test_an_urgent_request_that_cannot_fit_costs_nobody_its_place() -> None:
    """Pushing out the one that it outranks would not free enough blocks."""
    driver = SchedulerDriver(SCRIPT, block_size=4, num_gpu_blocks_override=21, scheduling_policy="priority")
    driver.add(0, [1] * 50, {"priority": 0}, max_tokens=6)
    driver.add(1, [2] * 7, {"priority": 5}, max_tokens=5)
    driver.step()
    driver.add(2, [3] * 60, {"priority": 3}, max_tokens=2)
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.preemptions == 0


def test_nobody_is_pushed_out_for_a_reserve_or_for_blocks_that_others_hold() -> None:
    driver = SchedulerDriver(
        SCRIPT, block_size=4, num_gpu_blocks_override=21, watermark=0.3, scheduling_policy="priority"
    )
    driver.add(0, [1] * 20, {"priority": 0}, max_tokens=30)
    driver.add(1, [1] * 20 + [2] * 4, {"priority": 5}, max_tokens=4)  # five of its six blocks are shared
    driver.step()
    driver.add(2, [3] * 64, {"priority": 3}, max_tokens=2)
    for _ in range(3):
        driver.step()
    assert driver.core.requests.totals.preemptions == 0
    driver.run()
    driver.check_all()


def test_the_one_that_others_made_room_for_may_use_the_reserve() -> None:
    driver = SchedulerDriver(
        SCRIPT, block_size=4, num_gpu_blocks_override=21, watermark=0.3, scheduling_policy="priority"
    )
    driver.add(0, [1] * 20, {"priority": 0}, max_tokens=60)
    driver.add(1, [2] * 20, {"priority": 5}, max_tokens=12)
    for _ in range(4):
        driver.step()
    driver.add(2, [3] * 36, {"priority": 1}, max_tokens=4)
    driver.run()
    driver.check_all()
    assert driver.first_step[2] <= 4 + 4 and driver.core.requests.totals.preemptions == 1


def test_the_more_urgent_prompt_gets_the_budget_first() -> None:
    driver = SchedulerDriver(SCRIPT, max_num_batched_tokens=32, max_num_seqs=8, scheduling_policy="priority")
    for handle in range(4):
        driver.add(handle, [1 + handle] * 300, {"priority": 5}, max_tokens=2)
    for _ in range(4):
        driver.step()
    driver.add(9, [7] * 60, {"priority": 0}, max_tokens=2)
    driver.run()
    assert driver.first_step[9] <= 4 + 4


def test_priority_can_starve_and_hybrid_cannot() -> None:
    """One low request against a stream of high ones that keeps the only place busy."""
    started = {}
    for policy in ("priority", "hybrid"):
        clock = Clock()
        driver = SchedulerDriver(SCRIPT, clock=clock, max_num_seqs=1, scheduling_policy=policy, ageing_seconds=1.0)
        driver.add(0, [1, 2, 3], {"priority": 5}, max_tokens=2)
        for handle in range(1, 120):
            driver.add(handle, [4, 5, 6], {"priority": 0}, max_tokens=2)
            clock.now += 0.1
            driver.step()
            driver.step()
        started[policy] = 0 in driver.first_step
        driver.run()
        driver.check_all()
    assert started == {"priority": False, "hybrid": True}


@pytest.mark.parametrize("later, preemptions", [(60.0, 0), (59.0, 1)])
def test_of_two_with_equal_keys_the_one_that_came_first_keeps_its_place(later: float, preemptions: int) -> None:
    """Waiting has just made up for the difference of their priorities."""
    clock = Clock()
    driver = SchedulerDriver(SCRIPT, clock=clock, max_num_seqs=1, scheduling_policy="hybrid", ageing_seconds=60.0)
    driver.add(0, [1] * 20, {"priority": 1}, max_tokens=30)
    driver.step()
    clock.now += later
    driver.add(1, [2] * 20, {"priority": 0}, max_tokens=3)
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.preemptions == preemptions


def test_a_better_key_alone_pushes_nobody_out() -> None:
    """A further choice arrived with its request, before the one that has taken the place beside it meanwhile."""
    driver = SchedulerDriver(SCRIPT, max_num_seqs=2, max_num_batched_tokens=16, scheduling_policy="priority")
    driver.add(0, [1] * 40, {"priority": 1}, max_tokens=30, n=2)
    driver.add(5, [2] * 4, {"priority": 1}, max_tokens=30)
    driver.run()
    driver.check_all()
    assert driver.first_step[5] < driver.first_step[1]
    assert driver.core.requests.totals.preemptions == 0
