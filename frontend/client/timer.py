"""One thread that calls functions later: deadlines of the client and the watch over broken connections."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timer:
    """Calls functions in one daemon thread. Nothing is cancelled: a function looks whether it is still wanted."""

    def __init__(self, name: str) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def schedule(self, delay: float, function: Callable[[], None]) -> None:
        with self._wake:
            heapq.heappush(self._due, (time.monotonic() + delay, next(self._order), function))
            self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closed = True
            self._due.clear()
            self._wake.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._closed and (not self._due or self._due[0][0] > time.monotonic()):
                    self._wake.wait(self._due[0][0] - time.monotonic() if self._due else None)
                if self._closed:
                    return
                function = heapq.heappop(self._due)[2]
            try:
                function()
            except Exception:  # one watch must not end the others
                logger.exception("a scheduled check failed")
