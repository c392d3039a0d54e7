"""The timers against a dictionary of deadlines."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from wavecore.engine_core.scheduling.timers import Timers

moves = st.lists(
    st.tuples(
        st.sampled_from(["insert", "cancel", "again", "advance"]),
        st.integers(0, 30) | st.floats(0.0, 1e9),
        st.integers(0, 20),
    ),
    max_size=60,
)


@settings(max_examples=200)
@given(moves)
def test_fires_like_a_sorted_list(moves: list[tuple[str, float, int]]) -> None:
    now = 1000.0
    timers: Timers[int] = Timers()
    due: dict[int, float] = {}
    for i, (move, seconds, which) in enumerate(moves):
        key = which % i if i else 0  # it may have fired, or be cancelled, or never have been there
        if move == "advance":
            now += seconds
            fired = timers.advance(now)
            assert sorted(fired) == sorted(key for key, at in due.items() if at <= now)
            assert [due[key] for key in fired] == sorted(due[key] for key in fired)
            due = {key: at for key, at in due.items() if at > now}
        if move in ("cancel", "again"):
            timers.cancel(key)
            timers.cancel(key)
            due.pop(key, None)
        if move in ("insert", "again"):  # "again": another deadline of an item whose old entry may still be there
            key = i if move == "insert" else key
            timers.insert(now + seconds, key)
            due[key] = now + seconds
        assert len(timers) == len(due) == len(set(timers))
    assert sorted(timers.advance(math.inf)) == sorted(due)


def test_time_that_stands_or_steps_back_is_harmless() -> None:
    timers: Timers[str] = Timers()
    timers.insert(11.0, "a")
    assert timers.advance(9.0) == timers.advance(10.0) == []
    timers.insert(9.5, "past")
    assert timers.advance(8.0) == []
    assert timers.advance(11.1) == ["past", "a"]


def test_an_infinite_deadline_is_none() -> None:
    timers: Timers[str] = Timers()
    timers.insert(1e12, "in 30,000 years")
    timers.insert(math.inf, "never")
    assert len(timers) == 1
    timers.cancel("never")
    assert timers.advance(9e11) == []
    assert timers.advance(1e12) == ["in 30,000 years"]


def test_what_is_cancelled_does_not_pile_up() -> None:
    """Nearly all deadlines are cancelled, long before their time."""
    timers: Timers[int] = Timers()
    for i in range(10_000):
        timers.insert(1e6 + i, i)
        if i >= 10:
            timers.cancel(i - 10)
        assert len(timers._heap) <= 2 * len(timers) + 1
    assert timers.advance(1e9) == list(range(9_990, 10_000))
