"""Histograms and counters of requests, against what a client sees."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_runner import Script
from tests.support.scheduler_driver import SchedulerDriver, make_add

from wavecore.engine_core.scheduling.histograms import EDGES, Histogram
from wavecore.transport.errors import Overloaded, ValidationError

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=512)
ANSWERED = ("request_prompt_tokens", "request_generation_tokens", "e2e_request_latency_seconds")


def metrics(driver: SchedulerDriver) -> dict[str, Any]:
    value, _ = driver.core.utilities.call("metrics", {})
    assert isinstance(value, dict)
    return value


def check(found: dict[str, Any], values: list[float]) -> None:
    """A histogram holds these values; times from made-up clocks are rounded, and a value may lie on an edge."""
    counts = [0] * (len(found["edges"]) + 1)
    for value in values:
        counts[bisect_left(found["edges"], value)] += 1
    assert found["counts"] == counts
    assert found["sum"] == pytest.approx(sum(values))


@given(st.lists(st.one_of(st.sampled_from([0.0, 1.0, 5.0, 20.0]), st.floats(0, 1e3))))
def test_values_at_once_count_as_one_by_one(values: list[float]) -> None:
    one, other = Histogram((1.0, 2.0, 5.0)), Histogram((1.0, 2.0, 5.0))
    for value in values:
        one.add(value)
    other.add_each(np.array(values))
    check(one.report(), values)
    assert one.counts == other.counts and one.total == pytest.approx(other.total)


def test_edges_ascend() -> None:
    assert all(list(edges) == sorted(set(edges)) for edges in EDGES.values())


class Observer(SchedulerDriver):
    """Keeps when each token of each request came out."""

    def __init__(self, **config: Any) -> None:
        super().__init__(SCRIPT, **config)
        self.times: dict[int, list[float]] = {}
        self.arrived: dict[int, float] = {}

    def add(self, handle: int, *args: Any, **params: Any) -> None:
        super().add(handle, *args, **params)
        for choice in range(params.get("n", 1)):
            self.arrived[handle + choice] = self.clock.now

    def step(self) -> Any:
        before = {handle: len(tokens) for handle, tokens in self.outputs.items()}
        now = self.clock.now
        outputs = super().step()
        for handle, tokens in self.outputs.items():
            self.times.setdefault(handle, []).extend([now] * (len(tokens) - before.get(handle, 0)))
        self.clock.now += 0.0037  # so that no gap lies on an edge
        return outputs


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_times_are_those_of_the_tokens(async_scheduling: bool) -> None:
    """Prompts in chunks, choices, requests that come meanwhile, and preemptions."""
    draw = random.Random(5)
    driver = Observer(
        max_num_seqs=4, max_num_batched_tokens=24, block_size=4, num_gpu_blocks_override=26,
        async_scheduling=async_scheduling,
    )  # fmt: skip
    for handle in range(0, 60, 3):
        driver.add(handle, [draw.randrange(97) for _ in range(draw.randint(1, 40))],
                   max_tokens=draw.randint(1, 30), n=draw.randint(1, 2))  # fmt: skip
        for _ in range(draw.randint(0, 6)):
            driver.step()
    driver.run()
    driver.check_all()
    found = metrics(driver)
    assert found["preemptions"] > 0
    times, arrived, histograms = driver.times, driver.arrived, found["histograms"]
    check(histograms["time_to_first_token_seconds"], [when[0] - arrived[h] for h, when in times.items()])
    check(histograms["inter_token_latency_seconds"], [b - a for t in times.values() for a, b in pairwise(t)])
    check(histograms["request_decode_time_seconds"], [t[-1] - t[0] for t in times.values()])
    check(histograms["e2e_request_latency_seconds"], [t[-1] - arrived[h] for h, t in times.items()])
    check(histograms["request_generation_tokens"], [len(t) for t in times.values()])
    check(histograms["request_prompt_tokens"], [len(driver.sent[h][0]) for h in times])
    each = [(t[-1] - t[0]) / (len(t) - 1) for t in times.values() if len(t) > 1]
    check(histograms["request_time_per_output_token_seconds"], each)
    parts = [histograms[f"request_{part}_time_seconds"]["sum"] for part in ("queue", "prefill", "decode")]
    assert sum(parts) == pytest.approx(histograms["e2e_request_latency_seconds"]["sum"])
    inference = histograms["request_inference_time_seconds"]["sum"]
    assert inference == pytest.approx(parts[1] + parts[2])
    check(histograms["request_params_n"], [driver.sent[h][1]["n"] for h in range(0, 60, 3)])
    assert sum(histograms["iteration_tokens_total"]["counts"]) == found["steps"]
    assert histograms["iteration_tokens_total"]["sum"] >= found["prompt_tokens"]
    for phase in ("schedule", "launch", "wait", "update"):
        assert sum(histograms[f"step_{phase}_seconds"]["counts"]) == driver.steps
        assert histograms[f"step_{phase}_seconds"]["sum"] == found[f"{phase}_seconds"]
    assert found["ended"] == {"length": len(times)} and not found["failed"] and not found["refused"]


def test_ends_and_refusals_are_counted_by_their_reason() -> None:
    driver = SchedulerDriver(SCRIPT, max_num_seqs=2, max_num_queued_reqs=4)
    driver.add(0, [1, 2], max_tokens=3)
    driver.add(1, [1, 2], {"timeout": 0.015}, max_tokens=300)
    driver.add(2, [1, 2], max_tokens=300)
    driver.add(3, [7] * 9, {"pooling": "last"})
    with pytest.raises(Overloaded):
        driver.core.admit(make_add(4, [1]))
    with pytest.raises(ValidationError):
        driver.core.admit(make_add(5, [97]))
    driver.core.abort(b"c" * 16, [2])
    driver.run()
    found = metrics(driver)
    assert found["ended"] == {"length": 1, "stop": 1, "abort": 1, "timeout": 1}
    assert found["failed"] == {"timeout": 1} and found["refused"] == {"overloaded": 1, "validation": 1}
    for name in ANSWERED:  # of those that got their answer
        assert sum(found["histograms"][name]["counts"]) == 2
    assert sum(found["histograms"]["time_to_first_token_seconds"]["counts"]) == 2  # not of the embedding
    driver.core.add(driver.core.admit(make_add(6, [1])))
    assert driver.core.abort_client(b"c" * 16) == 1
    assert metrics(driver)["ended"]["abort"] == 2


def test_what_is_waited_for() -> None:
    driver = SchedulerDriver(SCRIPT, max_num_seqs=1, max_num_batched_tokens=16)
    driver.add(0, [1] * 40, max_tokens=9, n=2)
    driver.add(2, [2] * 5, max_tokens=9)
    driver.add(3, [2] * 6, max_tokens=9)
    driver.step()
    waiting = metrics(driver)["waiting_by_reason"]
    assert {reason: count for reason, count in waiting.items() if count} == {"step_budget": 2, "forking": 1}
    for _ in range(4):
        driver.step()
    waiting = metrics(driver)["waiting_by_reason"]
    assert {reason: count for reason, count in waiting.items() if count} == {"slots": 3}
    driver.run()
    assert set(metrics(driver)["waiting_by_reason"].values()) == {0}
    assert set(waiting) == {"next_step", "memory", "running_requests", "step_budget", "slots", "kv_blocks",
                            "forking", "loading", "draining"}  # fmt: skip
