"""Deadlines in a hierarchical timing wheel: O(1) insert and cancel, and time that nothing happens in costs nothing.

Level 0 has one bucket a tick for the next 64 ticks, level 1 one for each 64 ticks, and so on (Varghese & Lauck,
"Hashed and hierarchical timing wheels", 1987); the last level has as many buckets as far deadlines need. A bucket that
begins is spread over lower levels. Only buckets that were used exist, so the wheel goes from one to the next and walks
no empty ticks. A heap would cost O(log n) an insert, and cancelled entries, nearly all of them here, would have to stay
in it.
"""

import math
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

BITS, LEVELS = 6, 5


class TimingWheel(Generic[Item]):
    """Items with a deadline, in seconds of the caller's monotonic clock, each item once and hashable. One fires up to
    one `resolution` late, never early."""

    def __init__(self, now: float, resolution: float = 0.01) -> None:
        self._resolution = resolution
        self._tick = int(now / resolution)
        # By level and tick >> (BITS * level). A bucket holds the tick of each of its items; cancelling may empty it.
        self._levels: list[dict[int, dict[Item, int]]] = [{} for _ in range(LEVELS)]
        self._bucket_of: dict[Item, dict[Item, int]] = {}
        self._next: float = math.inf  # nothing is due before this tick

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._bucket_of)

    def insert(self, deadline: float, item: Item) -> None:
        """An infinite deadline is none."""
        assert item not in self._bucket_of, "an item has one deadline"
        if deadline < math.inf:
            self._place(item, max(int(deadline / self._resolution), self._tick) + 1)

    def cancel(self, item: Item) -> None:
        """Idempotent; an item that fired, or never was here, is no error."""
        bucket = self._bucket_of.pop(item, None)
        if bucket is not None:
            del bucket[item]

    def advance(self, now: float) -> list[Item]:
        """Move to `now`; returns the items whose deadline passed, in order of their ticks."""
        target = int(now / self._resolution)
        fired: list[Item] = []
        while self._next <= target:
            begin, level = self._first_bucket()
            self._next = begin
            if begin > target:
                break
            self._tick = int(begin)
            bucket = self._levels[level].pop(self._tick >> (BITS * level))
            for item, tick in bucket.items():
                if tick <= self._tick:
                    del self._bucket_of[item]
                    fired.append(item)
                else:
                    self._place(item, tick)
        self._tick = target
        return fired

    def _first_bucket(self) -> tuple[float, int]:
        """The tick at which the next bucket begins, and its level: the highest where several begin."""
        # Of a level below the last there are at most 65 buckets.
        begins = [(min(buckets) << (BITS * level), -level) for level, buckets in enumerate(self._levels) if buckets]
        begin, level = min(begins, default=(math.inf, 0))
        return begin, -level

    def _place(self, item: Item, tick: int) -> None:
        level = min(max((tick - self._tick).bit_length() - 1, 0) // BITS, LEVELS - 1)
        bucket = self._bucket_of[item] = self._levels[level].setdefault(tick >> (BITS * level), {})
        bucket[item] = tick
        self._next = min(self._next, tick)
