"""Who goes first: the order of waiting and running requests, and who may push out whom.

A policy gives each request one number, its *major* key; ties go by arrival number. Smaller is better. The key of a
request never changes, so the waiting queue is a plain heap and 10,000 waiting requests cost a step nothing:
`hybrid` ages linearly, so after both have aged by the same time their order is still the same.
"""

import heapq

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.request import Request


class Policy:
    """The setting `scheduling_policy`.

    Attributes:
        preempts: a more urgent arrival may push out a running request.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._name, self._ageing_seconds = config.scheduling_policy, config.ageing_seconds
        self.preempts = self._name != "fcfs"

    def major(self, priority: int, arrival: float) -> float:
        """First part of the key of a request with this priority (lower = more urgent) that arrived at this second."""
        if self._name == "fcfs":
            return 0.0
        if self._name == "priority":
            return float(priority)
        return priority * self._ageing_seconds + arrival  # waiting makes up for priority, so nobody starves


class WaitingQueue:
    """Heap of waiting requests. Removal marks the entry, so it is O(1); dead entries go when they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._size = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._size

    def push(self, request: Request) -> None:
        assert not request.queued, "a request waits once"
        request.queued = True
        heapq.heappush(self._heap, (request.major, request.minor, request))
        self._size += 1
        self.num_tokens += len(request.tokens)

    def peek(self) -> Request | None:
        while self._heap and not self._heap[0][2].queued:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, request: Request) -> None:
        """Take a queued request out, wherever it stands."""
        assert request.queued, "the request does not wait"
        request.queued = False
        self._size -= 1
        self.num_tokens -= len(request.tokens)
        if self._heap[0][2] is request:
            heapq.heappop(self._heap)  # a preempted request comes back: no dead entry of it may stay
        elif len(self._heap) > 2 * self._size:
            self._heap = [entry for entry in self._heap if entry[2].queued]
            heapq.heapify(self._heap)

    def in_order(self) -> list[Request]:
        """All, best first; for reports and checks."""
        return [entry[2] for entry in sorted(entry for entry in self._heap if entry[2].queued)]
