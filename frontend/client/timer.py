"""One thread that calls functions later: deadlines of the client and the watch over broken connections."""

from __future__ import annotations

import logging
import sched
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Timer:
    """Calls functions in one daemon thread. Nothing is cancelled: a function looks whether it is still wanted."""

    def __init__(self, name: str) -> None:
        self._due = sched.scheduler(time.monotonic)
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def schedule(self, delay: float, function: Callable[[], None]) -> None:
        self._due.enter(min(delay, threading.TIMEOUT_MAX), 0, function)  # for longer no thread can sleep
        self._changed.set()

    def close(self) -> None:
        """End the thread; not to be called in it."""
        self._closed = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                pause = self._due.run(blocking=False)  # what is due; gives the seconds to what comes next
            except Exception:  # one watch must not end the others
                logger.exception("a scheduled check failed")
            else:
                self._changed.wait(pause)
                self._changed.clear()
