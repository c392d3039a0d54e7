"""Deadlines in a hierarchical timing wheel: O(1) insert and cancel, O(1) amortised tick.

Level 0 has one bucket a tick for the next 64 ticks, level 1 one bucket per 64 ticks, and so on (Varghese & Lauck,
"Hashed and hierarchical timing wheels", 1987). When level 0 wraps, the next bucket of level 1 is spread over it. A
heap would cost O(log n) an insert, and cancelled entries, nearly all of them here, would have to stay in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")

BITS, LEVELS = 6, 5
SIZE, HORIZON = 1 << BITS, (1 << (BITS * LEVELS)) - 1


@dataclass(slots=True, eq=False)
class Timer(Generic[Item]):
    """One deadline; `wheel.cancel(timer)` takes it back."""

    tick: int
    item: Item
    bucket: dict[Timer[Item], None] | None = None


class TimingWheel(Generic[Item]):
    """Timers in seconds of the caller's monotonic clock; one fires up to one `resolution` late, never early."""

    def __init__(self, now: float, resolution: float = 0.01) -> None:
        self._resolution = resolution
        self._tick = int(now / resolution)
        self._buckets: list[list[dict[Timer[Item], None]]] = [[{} for _ in range(SIZE)] for _ in range(LEVELS)]
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def insert(self, deadline: float, item: Item) -> Timer[Item]:
        """Beyond about 124 days at 10 ms a tick a deadline is cut to that."""
        tick = int(deadline / self._resolution) + 1
        timer = Timer(min(max(tick, self._tick + 1), self._tick + HORIZON), item)
        self._count += 1
        self._place(timer)
        return timer

    def cancel(self, timer: Timer[Item]) -> None:
        """Idempotent; a fired timer is no error."""
        if timer.bucket is not None:
            del timer.bucket[timer]
            timer.bucket = None
            self._count -= 1

    def advance(self, now: float) -> list[Item]:
        """Move to `now`; returns the items whose deadline passed."""
        target = int(now / self._resolution)
        fired: list[Item] = []
        while self._count and self._tick < target:
            self._tick += 1
            for level in range(1, LEVELS):
                if self._tick & ((1 << (BITS * level)) - 1):
                    break
                bucket = self._buckets[level][(self._tick >> (BITS * level)) % SIZE]
                timers = list(bucket)
                bucket.clear()
                for timer in timers:  # nearer now: they move to lower levels
                    self._place(timer)
            bucket = self._buckets[0][self._tick % SIZE]
            for timer in bucket:
                timer.bucket = None
                fired.append(timer.item)
            self._count -= len(bucket)
            bucket.clear()
        self._tick = max(self._tick, target)
        return fired

    def _place(self, timer: Timer[Item]) -> None:
        level = min(max((timer.tick - self._tick).bit_length() - 1, 0) // BITS, LEVELS - 1)
        bucket = self._buckets[level][(timer.tick >> (BITS * level)) % SIZE]
        bucket[timer] = None
        timer.bucket = bucket
