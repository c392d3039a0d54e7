"""The size of steps follows from how long they take: made-up durations, made-up clock."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import Clock, SchedulerDriver

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import StepPlan, StepResult
from wavecore.engine_core.scheduling import pace

LONG = Script(vocab_size=97, eos_token_id=[], max_model_len=40_000, block_size=64, num_blocks=4000)


class Timed(SchedulerDriver):
    """A step takes `base` seconds, `a_token` more for each token and `a_row` for each decoding row; twice as much for a
    token at position 30,000. Nothing is hashed."""

    def __init__(self, base: float, a_token: float, a_row: float = 0.0, script: Script = LONG, **config: Any) -> None:
        clock = Clock()
        super().__init__(script, clock, check=False, **config)
        self.clock = clock
        self.base, self.a_token, self.a_row = base, a_token, a_row
        self.plans: list[StepPlan] = []
        self.gaps: dict[int, list[float]] = defaultdict(list)  # seconds between two tokens, by handle
        self._last: dict[int, float] = {}
        self.runner.run = self._run  # type: ignore[method-assign]

    def _run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.clock.now += self.seconds(plan)
        return StepResult(np.where(plan.samples, 7, -1).astype(np.int32), np.zeros(plan.num_rows, np.uint8))

    def seconds(self, plan: StepPlan) -> float:
        tokens = float((plan.query_lens * (1 + plan.starts / 30_000 * (plan.query_lens > 1))).sum())
        return self.base + self.a_token * tokens + self.a_row * int((plan.query_lens == 1).sum())

    def step(self) -> Any:
        outputs, _ = self.core.step()
        for columns in outputs.values():
            for handle in columns.handles.tolist():
                if handle in self._last:
                    self.gaps[handle].append(self.clock.now - self._last[handle])
                self._last[handle] = self.clock.now
        return outputs

    def first_token_after(self, handle: int) -> float:
        """Seconds until the first token of a request that comes now."""
        begin = self.clock.now
        while handle not in self._last:
            self.step()
        return self.clock.now - begin


def decoding(driver: Timed, count: int) -> None:
    for handle in range(count):
        driver.add(handle, [1 + handle] * 8, max_tokens=100_000)
    for _ in range(40):
        driver.step()
    driver.gaps.clear()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize(("base", "a_token", "length"), [(0.04, 1.6e-3, 6_000), (0.012, 50e-6, 30_000)])
def test_a_long_prompt_does_not_stop_decoding_rows(
    rows: int, base: float, a_token: float, length: int, asynchronous: bool
) -> None:
    """A CPU and a GPU; without the target the gap is that of a whole budget."""
    script = replace(LONG, token_seconds=2 * a_token)
    driver = Timed(base, a_token, script=script, max_num_seqs=80, async_scheduling=asynchronous)
    decoding(driver, rows)
    driver.add(900, [5] * length, max_tokens=2)
    first = driver.first_token_after(900)
    gaps = np.concatenate([driver.gaps[handle] for handle in range(rows)])
    assert np.percentile(gaps, 99) < max(0.25, 2.2 * (base + rows * a_token)) and gaps.max() < 0.35
    assert first < 2.4 * 1.5 * length * a_token + 1.0, "the prompt moves on"


def test_without_a_target_prompts_get_the_whole_budget() -> None:
    driver = Timed(0.012, 50e-6, max_inter_token_ms=None)
    decoding(driver, 4)
    driver.add(900, [5] * 30_000, max_tokens=2)
    driver.first_token_after(900)
    assert max(plan.num_tokens for plan in driver.plans) == 8192
    assert max(driver.gaps[0]) > 0.4


def test_prompts_alone_have_the_whole_budget() -> None:
    driver = Timed(0.012, 50e-6)
    for handle in range(3):
        driver.add(handle, [1 + handle] * 30_000, max_tokens=1)
    while driver.core.has_work:
        driver.step()
    assert [plan.num_tokens for plan in driver.plans[:-1]] == [8192] * 10


def test_where_decoding_takes_longer_than_the_target_prompts_move_on() -> None:
    """64 rows take 0.8 s, the target is 0.2 s: a step takes twice as long."""
    driver = Timed(0.1, 1e-3, a_row=0.01, max_num_seqs=80)
    decoding(driver, 64)
    driver.add(900, [5] * 30_000, max_tokens=2)
    begin = driver.clock.now
    driver.first_token_after(900)
    assert driver.clock.now - begin < 2.4 * 45_000 * 1e-3
    assert np.percentile(np.concatenate(list(driver.gaps.values())), 99) < 1.8


def test_how_long_decoding_takes_is_seen_under_steady_load_too() -> None:
    """Prompts come all the time, so no step would have decoding rows alone, which take longer than the target."""
    driver = Timed(0.1, 1e-3, a_row=0.01, max_num_seqs=80)
    for handle in range(64):
        driver.add(handle, [1 + handle] * 64, max_tokens=100_000)
    driver.add(900, [5] * 30_000, max_tokens=2)
    begin = driver.clock.now
    driver.first_token_after(900)
    assert driver.clock.now - begin < 2.4 * 45_000 * 1e-3 + 60.0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_steps_without_prompt_tokens_stop_nobody(asynchronous: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where decoding rows cannot run, because blocks are short."""
    monkeypatch.setattr(pace, "PROBE_STEPS", 1)
    for seed in range(16):
        rng = random.Random(seed)
        script = Script(vocab_size=97, eos_token_id=[], max_model_len=64, num_host_blocks=20)
        driver = SchedulerDriver(
            script, block_size=4, max_num_seqs=4, num_gpu_blocks_override=rng.randint(17, 22), watermark=0.0,
            max_num_batched_tokens=rng.choice([6, 32]), swap_space_gib=rng.choice([0.0, 1.0]),
            async_scheduling=asynchronous, scheduling_policy=rng.choice(["fcfs", "priority"]),
        )  # fmt: skip
        for handle in range(7):
            prompt = [rng.randint(1, 96) for _ in range(rng.randint(1, 30))]
            driver.add(handle, prompt, {"priority": rng.randint(0, 2)}, max_tokens=rng.randint(1, 30))
            for _ in range(rng.randint(0, 4)):
                driver.step()
        driver.run(limit=2000)
        driver.check_all()


def test_one_step_that_takes_long_is_soon_forgotten() -> None:
    """A hiccup of the machine, while prompts run beside decoding rows."""
    driver = Timed(0.012, 50e-6)
    decoding(driver, 4)
    driver.add(900, [5] * 30_000, max_tokens=2)
    for _ in range(6):
        driver.step()
    driver.clock.now += 30.0
    begin = driver.clock.now
    driver.first_token_after(900)
    assert driver.clock.now - begin < 3.0


@pytest.mark.parametrize("estimate", [0.0, 1e-4, 0.02])
def test_steps_of_a_cpu_take_about_a_second(estimate: float) -> None:
    """One prompt of 8,000 tokens at 10 ms each, with the defaults: whatever the first guess was."""
    script = Script(eos_token_id=[], max_model_len=9000, num_blocks=600, token_seconds=estimate)
    driver = Timed(0.05, 0.01, script=script)
    driver.add(0, [5] * 8000, max_tokens=2)
    while driver.core.has_work:
        driver.step()
    seconds = [driver.seconds(plan) for plan in driver.plans]
    later = seconds[4:-3]
    if estimate == 0.02:
        assert max(seconds) < 1.3
    assert all(0.7 < s < 1.3 for s in later[8:]), seconds
    assert sum(seconds) < 80 * 1.6


def test_without_chunked_prefill_a_prompt_is_one_step_all_the_same() -> None:
    driver = Timed(0.05, 0.01, enable_chunked_prefill=False)
    decoding(driver, 4)
    driver.add(900, [5] * 8000, max_tokens=2)
    driver.first_token_after(900)
    assert max(plan.num_tokens for plan in driver.plans) == 8004


def test_the_size_of_a_step_is_told_before_it_is_waited_for() -> None:
    """Who watches for a step without an end knows how long it should take."""
    script = Script(eos_token_id=[], max_model_len=9000, num_blocks=600, token_seconds=0.02)
    driver = Timed(0.0, 0.01, script=script, enable_chunked_prefill=False, async_scheduling=False)
    told: list[float] = []
    driver.core._expect = told.append
    driver.add(0, [5] * 8000, max_tokens=3)
    while driver.core.has_work:
        driver.step()
    assert told == pytest.approx([160.0, 0.018, 0.018])  # the guess was twice as much; what was seen counts a fifth


def sizes(first: float, *learned: tuple[int, float, float]) -> list[int]:
    """Of steps that should take a second, after each of (tokens, seconds of them, seconds of the decoding rows)."""
    size = pace.StepSize(1.0, first)
    found = [size.tokens]
    for step in learned:
        size.learn(*step)
        found.append(size.tokens)
    return found


def test_the_size_of_a_step_is_scaled_by_the_last_one() -> None:
    assert sizes(1000, (1000, 2.0, 0.0), (500, 0.8, 0.0)) == [1000, 500, 625]
    assert sizes(1000, (1000, 0.01, 0.0)) == [1000, 2000], "at most twice as large at once"
    assert sizes(1000, (1000, 100.0, 0.0)) == [1000, 250], "and a quarter: a hiccup says little of the tokens"
    assert sizes(1000, (10, 0.1, 0.0)) == [1000, 1000], "a small step that was fast says nothing against larger ones"
    assert sizes(1000, (4000, 2.0, 0.0)) == [1000, 1000], "nor does a larger one that was slow ask for more"
    assert sizes(4, (16, 100.0, 0.0)) == [pace.LEAST_TOKENS] * 2
    assert sizes(1000, (1000, 0.5, 0.6), (1200, 1.2, 0.6)) == [1000, 1200, 600]  # twice what the decoding rows take


def stepping(**changes: Any) -> tuple[pace.Pace, Callable[..., None]]:
    """A pace with these settings, and `step(seconds, *query_lens)`, which tells it of a step."""
    fields = {name: changes.pop(name) for name in ("device", "token_seconds") if name in changes}
    info = replace(SchedulerDriver(LONG).runner.info, **fields)
    made = pace.Pace(EngineConfig(model="scripted:", **changes), info)

    def step(seconds: float, *query_lens: int) -> None:
        count = len(query_lens)
        lens, yes = np.array(query_lens, np.int32), np.ones(count, np.bool_)
        made.learn(StepPlan(0, np.arange(count), np.zeros(count, np.int32), lens, yes), seconds)

    return made, step


def test_the_smaller_bound_holds_beside_decoding_rows_on_a_cpu() -> None:
    made, _ = stepping(device="cpu", token_seconds=0.01, max_inter_token_ms=3000.0)
    assert (made.prompt_tokens(True), made.prompt_tokens(False)) == (100, 100)
    made, _ = stepping(device="cpu", token_seconds=0.01, max_inter_token_ms=500.0)
    assert (made.prompt_tokens(True), made.prompt_tokens(False)) == (50, 100)
    made, _ = stepping(device="cuda:0", token_seconds=0.01, max_inter_token_ms=500.0)
    assert (made.prompt_tokens(True), made.prompt_tokens(False)) == (50, pace.UNLIMITED)
    made, _ = stepping(device="cpu", token_seconds=0.01, max_inter_token_ms=500.0, enable_chunked_prefill=False)
    assert (made.prompt_tokens(True), made.prompt_tokens(False)) == (pace.UNLIMITED, pace.UNLIMITED)
    made, _ = stepping(device="cuda:0", max_inter_token_ms=None)
    assert made.prompt_tokens(True) == pace.UNLIMITED


def test_a_step_with_decoding_rows_bounds_what_those_take_alone() -> None:
    """The first one alone was slow, as first ones are; a later step took less, with a prompt in it."""
    made, step = stepping(device="cuda:0", token_seconds=1e-4, max_inter_token_ms=50.0)
    before = made.prompt_tokens(True)
    step(0.1, 1, 1, 1, 1)
    step(0.04, 1, 1, 1, 1, before)
    assert made.prompt_tokens(True) == 2 * before
    step(0.12, 1, 1, 1, 1, 2 * before)  # 80 ms of its 120 were the prompt's: half of that fits
    assert made.prompt_tokens(True) == before


def test_decoding_rows_are_measured_alone_only_after_many_steps_without() -> None:
    made, step = stepping(device="cuda:0", token_seconds=1e-4, max_inter_token_ms=50.0)
    for _ in range(2):
        for _ in range(pace.PROBE_STEPS - 1):
            step(0.02, 1, 1, 64)
            assert made.prompt_tokens(True) > 0
        step(0.01, 1, 1)  # no prompt waited just then
    for _ in range(pace.PROBE_STEPS):
        assert made.prompt_tokens(True) > 0
        step(0.02, 1, 1, 64)
    assert [made.prompt_tokens(True) > 0 for _ in range(3)] == [False, True, True]


def test_what_a_token_takes_is_learned_from_steps_of_prompts() -> None:
    made, step = stepping(token_seconds=0.0)
    step(1.0, 100)
    assert made.token_seconds == pytest.approx(0.01)
    step(2.0, 100)
    assert made.token_seconds == pytest.approx(0.012)
    step(9.0, *[1] * 40, 60)  # mostly the work of decoding rows
    assert made.token_seconds == pytest.approx(0.012)
