"""How long to wait before a dead child is started again, and when to stop trying."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 600.0
MAX_DEATHS = 5
MAX_DELAY = 60.0


class Backoff:
    """Delays 1, 2, 4 ... 60 s; MAX_DEATHS deaths within WINDOW_SECONDS mean that the child stays down."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()
        self._streak = 0

    def died(self, now: float) -> float | None:
        """Record a death at `now` (monotonic seconds); the delay before the next start, None for never."""
        if not self._deaths or now - self._deaths[-1] > WINDOW_SECONDS:
            self._streak = 0
        self._deaths.append(now)
        while now - self._deaths[0] > WINDOW_SECONDS:
            self._deaths.popleft()
        if len(self._deaths) >= MAX_DEATHS:
            return None
        delay = min(MAX_DELAY, 2.0**self._streak)
        self._streak += 1
        return delay
