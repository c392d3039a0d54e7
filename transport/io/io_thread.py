"""A thread that owns sockets: it sleeps until one of them has something, another thread hands it a call, or time is up.

Whatever ends it, it gives back all that it owns; if that is a failure, whoever made it hears the cause.
"""

import contextlib
import heapq
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import zmq

from wavecore.transport.headroom import start_thread
from wavecore.transport.waker import Waker

END_SECONDS = 10.0  # `close` waits no longer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IoThreadFailed:
    """An IO thread ended on a bug. An engine that is deaf or mute must end."""

    thread: str
    error: BaseException


OnFailure = Callable[[IoThreadFailed], object]


class IoThread:
    """The life of a thread; what it does in each turn is up to the class that extends this one.

    `start`, `stop`, `join` and `close` may be called by any thread. `_turn`, `_tick`, `_is_flushed` and `_release` run
    in the thread itself, and so do the calls that `_call_soon` queues. `_poller` belongs to the thread, too.

    Args:
        name: of the thread.
        on_failure: called in the thread when a bug ends it.

    Attributes:
        tick_seconds: time between two calls of `_tick`; infinite: a thread that nothing happens to never wakes up.
        flush_seconds: how long a thread that is to end may take until `_is_flushed`.
    """

    tick_seconds = math.inf
    flush_seconds = 0.0

    def __init__(self, name: str, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._calls: deque[Callable[[], object]] = deque()
        self._due: list[tuple[float, int, Callable[[], object]]] = []  # a heap: monotonic time, number, call
        self._numbers = itertools.count()
        self._end_by = math.inf  # monotonic time; finite once the thread is to end
        self._owned = contextlib.ExitStack()  # what is given back at the end, the last first
        self._waker = Waker()
        self._owned.callback(self._waker.close)
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def native_id(self) -> int:
        """The operating system's number of the thread; 0 before `start`."""
        return self._thread.native_id or 0

    def start(self) -> None:
        """Start the thread; where the system gives none, a ResourceError, and what this owns is given back."""
        try:
            start_thread(self._thread)
        except BaseException:
            self._release()
            raise

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._end_by = min(self._end_by, time.monotonic() + self.flush_seconds)
        self._waker.wake()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of a thread that was started."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def close(self) -> None:
        """Stop, and wait for the end. A thread that was never started only gives back what it owns; one that cannot
        end, because its log blocks, say, holds no program up."""
        self.stop()
        if self._thread.ident is None:
            self._release()
        self.join(END_SECONDS)

    def forked(self) -> None:
        """The child of a fork has this object and not its thread: nothing of it may reach the parent's."""
        self._waker.close()

    def _call_soon(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._waker.wake()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _call_later(self, seconds: float, call: Callable[[], object]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), call))

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("%s failed", self._thread.name)
            self._on_failure(IoThreadFailed(self._thread.name, error))
        finally:
            self._release()

    def _loop(self) -> None:
        next_tick = time.monotonic() + self.tick_seconds
        while True:
            wait = min(next_tick, self._end_by, self._due[0][0] if self._due else math.inf) - time.monotonic()
            ready = dict(self._poller.poll(None if wait == math.inf else max(0, math.ceil(wait * 1000))))
            if self._waker.fd in ready:
                self._waker.clear()
            for _ in range(len(self._calls)):  # what is queued meanwhile waits for the next turn
                self._calls.popleft()()
            self._turn(ready)
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                heapq.heappop(self._due)[2]()
            if now >= next_tick:
                next_tick = now + self.tick_seconds
                self._tick()
            if self._is_ending and not self._calls and (now >= self._end_by or self._is_flushed()):
                return

    @property
    def _is_ending(self) -> bool:
        return self._end_by < math.inf

    def _turn(self, ready: Mapping[Any, int]) -> None:
        """Read from the sockets that are `ready` (as zmq.Poller tells), and write what is to be written."""

    def _tick(self) -> None:
        """`tick_seconds` went by."""

    def _is_flushed(self) -> bool:
        """Whether a thread that is to end may do so before its time is up."""
        return True

    def _release(self) -> None:
        """Give everything back: by the thread at its end, or by `close` instead."""
        self._owned.close()
