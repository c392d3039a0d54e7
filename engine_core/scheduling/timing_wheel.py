"""Deadlines in a hierarchical timing wheel: O(1) insert and cancel, O(1) amortised tick.

Level 0 has one bucket a tick for the next 64 ticks, level 1 one for each 64 ticks, and so on (Varghese & Lauck,
"Hashed and hierarchical timing wheels", 1987). When level 0 wraps, the next bucket of level 1 is spread over it. A
heap would cost O(log n) an insert, and cancelled entries, nearly all of them here, would have to stay in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

BITS, LEVELS = 6, 5
SIZE, HORIZON = 1 << BITS, (1 << (BITS * LEVELS)) - 1


class TimingWheel(Generic[Item]):
    """Items with a deadline, in seconds of the caller's monotonic clock, each item once and hashable. One fires up to
    one `resolution` late, never early."""

    def __init__(self, now: float, resolution: float = 0.01) -> None:
        self._resolution = resolution
        self._tick = int(now / resolution)
        self._buckets: list[list[dict[Item, int]]] = [[{} for _ in range(SIZE)] for _ in range(LEVELS)]
        self._bucket_of: dict[Item, dict[Item, int]] = {}  # a bucket holds the tick of each of its items

    def __len__(self) -> int:
        return len(self._bucket_of)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._bucket_of)

    def insert(self, deadline: float, item: Item) -> None:
        """Beyond about 124 days at 10 ms a tick a deadline is cut to that."""
        assert item not in self._bucket_of, "an item has one deadline"
        tick = int(deadline / self._resolution) + 1
        self._place(item, min(max(tick, self._tick + 1), self._tick + HORIZON))

    def cancel(self, item: Item) -> None:
        """Idempotent; an item that fired, or never was here, is no error."""
        bucket = self._bucket_of.pop(item, None)
        if bucket is not None:
            del bucket[item]

    def advance(self, now: float) -> list[Item]:
        """Move to `now`; returns the items whose deadline passed."""
        target = int(now / self._resolution)
        fired: list[Item] = []
        while self._bucket_of and self._tick < target:
            self._tick += 1
            for level in range(1, LEVELS):
                if self._tick & ((1 << (BITS * level)) - 1):
                    break
                bucket = self._buckets[level][(self._tick >> (BITS * level)) % SIZE]
                nearer = list(bucket.items())
                bucket.clear()
                for item, tick in nearer:  # they move to lower levels
                    self._place(item, tick)
            due = self._buckets[0][self._tick % SIZE]
            for item in due:
                del self._bucket_of[item]
            fired += due
            due.clear()
        self._tick = max(self._tick, target)
        return fired

    def _place(self, item: Item, tick: int) -> None:
        level = min(max((tick - self._tick).bit_length() - 1, 0) // BITS, LEVELS - 1)
        bucket = self._bucket_of[item] = self._buckets[level][(tick >> (BITS * level)) % SIZE]
        bucket[item] = tick
