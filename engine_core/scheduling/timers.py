"""Deadlines in a binary heap. A cancelled one is forgotten at once, its entry when such entries are the majority."""

import heapq
import math
from collections.abc import Iterator
from itertools import count
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Timers(Generic[Item]):
    """Items with a deadline, in seconds of the caller's monotonic clock, each item once and hashable."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Item]] = []
        self._live: dict[Item, int] = {}  # the number of its entry
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._live)

    def insert(self, deadline: float, item: Item) -> None:
        """An infinite deadline is none."""
        assert item not in self._live, "an item has one deadline"
        if deadline < math.inf:
            number = self._live[item] = next(self._numbers)
            heapq.heappush(self._heap, (deadline, number, item))

    def cancel(self, item: Item) -> None:
        """Idempotent; an item that fired, or never was here, is no error."""
        if self._live.pop(item, None) is not None and len(self._heap) > 2 * len(self._live):
            self._heap = [entry for entry in self._heap if self._live.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def advance(self, now: float) -> list[Item]:
        """The items whose deadline has come, in order; they are forgotten."""
        fired: list[Item] = []
        while self._heap and self._heap[0][0] <= now:
            _, number, item = heapq.heappop(self._heap)
            if self._live.get(item) == number:
                del self._live[item]
                fired.append(item)
        return fired
