"""Wakes a thread that waits for descriptors, from any other thread."""

from __future__ import annotations

import os
import threading


class Waker:
    """Makes `fd` (an eventfd) readable. Safe from any thread and from a signal handler; after `close` it does nothing.

    Only the thread that waits calls `clear`.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A late wake must not hit a descriptor that was closed and given to another. Re-entrant, because a signal
        # handler may interrupt the thread that holds it.
        self._lock = threading.RLock()
        self._open = True

    def wake(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)
