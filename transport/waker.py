"""Wakes a thread that waits for descriptors, from any other thread."""

import os


class _EventFd:
    """A descriptor that is closed when nobody uses it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class Waker:
    """Makes `fd` (an eventfd) readable. Safe from any thread, a signal handler and the collector: there is no lock, and
    nothing waits. After `close` it does nothing.

    Only the thread that waits calls `clear`.
    """

    def __init__(self) -> None:
        self._event: _EventFd | None = _EventFd(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.fd = self._event.number

    def wake(self) -> None:
        event = self._event  # open until the write is done, so it never hits a descriptor that was given to another
        if event is not None:
            os.eventfd_write(event.number, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        self._event = None
