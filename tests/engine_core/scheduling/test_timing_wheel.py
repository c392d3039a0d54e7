"""The timing wheel against sorted deadlines."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavecore.engine_core.scheduling.timing_wheel import TimingWheel

DAY = 86400.0
YEAR = 365 * DAY
moves = st.lists(
    st.tuples(
        st.sampled_from(["insert", "cancel", "advance"]),
        st.integers(0, 30_000) | st.integers(0, 1 << 33),
        st.integers(0, 20),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(moves)
def test_fires_like_a_sorted_list(moves: list[tuple[str, int, int]]) -> None:
    """Times in whole ticks, so that both sides round alike; up to several turns of all levels."""
    now = 1000
    wheel: TimingWheel[int] = TimingWheel(float(now), resolution=1.0)
    due = {}
    for i, (move, ticks, which) in enumerate(moves):
        if move == "insert":
            wheel.insert(float(now + ticks), i)
            due[i] = now + ticks + 1
        elif move == "cancel" and i:
            key = which % i  # it may have fired, or be cancelled, or never have been there
            wheel.cancel(key)
            wheel.cancel(key)
            due.pop(key, None)
        elif move == "advance":
            now += ticks
            fired = wheel.advance(float(now))
            assert sorted(fired) == sorted(key for key, at in due.items() if at <= now)
            due = {key: at for key, at in due.items() if at > now}
        assert len(wheel) == len(due)
    assert sorted(wheel.advance(float(now + (1 << 34)))) == sorted(due)


def test_never_early_and_at_most_one_tick_late() -> None:
    wheel: TimingWheel[str] = TimingWheel(0.0, resolution=0.01)
    wheel.insert(0.5, "a")
    assert wheel.advance(0.5) == []
    assert wheel.advance(0.511) == ["a"]


def test_a_deadline_in_the_past_fires_at_the_next_tick() -> None:
    wheel: TimingWheel[str] = TimingWheel(10.0)
    for past in (3.0, -1e6, 9.99):
        wheel.insert(past, f"late by {past}")
    wheel.insert(12.0, "in time")
    assert wheel.advance(10.005) == []
    assert sorted(wheel.advance(10.02)) == ["late by -1000000.0", "late by 3.0", "late by 9.99"]
    assert wheel.advance(12.01) == ["in time"]


def test_time_that_stands_or_steps_back_is_harmless() -> None:
    wheel: TimingWheel[str] = TimingWheel(10.0)
    wheel.insert(11.0, "a")
    assert wheel.advance(9.0) == wheel.advance(10.0) == []
    wheel.insert(9.5, "past")
    assert wheel.advance(8.0) == []
    assert wheel.advance(11.1) == ["past", "a"]


def test_far_deadlines_are_kept() -> None:
    wheel: TimingWheel[str] = TimingWheel(0.0)
    wheel.insert(3600.0, "hour")
    assert wheel.advance(3599.9) == []
    assert wheel.advance(3600.1) == ["hour"]
    wheel.insert(1e12, "in 30,000 years")
    wheel.insert(math.inf, "never")
    assert len(wheel) == 1
    wheel.cancel("never")
    assert wheel.advance(9e11) == []
    assert wheel.advance(1e12 + 1) == ["in 30,000 years"]


@pytest.mark.parametrize("far", [None, 400 * DAY, 10 * YEAR])
def test_time_in_which_nothing_is_due_costs_nothing(far: float | None) -> None:
    """A year idle, with an empty wheel and with one far deadline in it; then dense ones."""
    wheel: TimingWheel[object] = TimingWheel(0.0)
    if far is not None:
        wheel.insert(far, "far")
    looks = 0
    first_bucket = wheel._first_bucket

    def counted() -> tuple[float, int]:
        nonlocal looks
        looks += 1
        return first_bucket()

    wheel._first_bucket = counted  # type: ignore[method-assign]
    now = YEAR
    for i in range(100):  # the first ones before the wheel has seen what time it is
        wheel.insert(now + 0.05 * i, i)
    fired: list[object] = []
    for _ in range(600):
        fired += wheel.advance(now)
        now += 0.01
    assert fired == list(range(100))
    assert looks < 600
    assert wheel.advance(10 * YEAR + 1) == ([] if far is None else ["far"])
    assert looks < 700


def test_a_deadline_after_months_of_silence_is_not_early() -> None:
    """The wheel has seen no time for longer than its first levels reach."""
    wheel: TimingWheel[str] = TimingWheel(0.0)
    now = 200 * DAY
    wheel.insert(now + 10.0, "a")
    assert wheel.advance(now) == wheel.advance(now + 9.9) == []
    assert wheel.advance(now + 10.1) == ["a"]
