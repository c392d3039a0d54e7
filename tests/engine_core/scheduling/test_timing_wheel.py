"""The timing wheel against sorted deadlines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from wavecore.engine_core.scheduling.timing_wheel import TimingWheel

moves = st.lists(
    st.tuples(st.sampled_from(["insert", "cancel", "advance"]), st.integers(0, 30_000), st.integers(0, 20)),
    max_size=60,
)


@settings(max_examples=200)
@given(moves)
def test_fires_like_a_sorted_list(moves: list[tuple[str, int, int]]) -> None:
    """Times in whole ticks, so that both sides round alike; up to several turns of the first three levels."""
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
    assert sorted(wheel.advance(float(now + 100_000))) == sorted(due)


def test_never_early_and_at_most_one_tick_late() -> None:
    wheel: TimingWheel[str] = TimingWheel(0.0, resolution=0.01)
    wheel.insert(0.5, "a")
    assert wheel.advance(0.5) == []
    assert wheel.advance(0.511) == ["a"]


def test_a_deadline_in_the_past_fires_at_the_next_tick() -> None:
    wheel: TimingWheel[str] = TimingWheel(10.0)
    wheel.insert(3.0, "late")
    assert wheel.advance(10.02) == ["late"]


def test_time_that_stands_or_steps_back_is_harmless() -> None:
    wheel: TimingWheel[str] = TimingWheel(10.0)
    wheel.insert(11.0, "a")
    assert wheel.advance(9.0) == wheel.advance(10.0) == []
    assert wheel.advance(11.1) == ["a"]


def test_far_deadlines_are_kept() -> None:
    wheel: TimingWheel[str] = TimingWheel(0.0)
    wheel.insert(3600.0, "hour")
    assert wheel.advance(3599.9) == []
    assert wheel.advance(3600.1) == ["hour"]
    wheel.insert(1e12, "beyond the horizon")
    assert len(wheel) == 1
