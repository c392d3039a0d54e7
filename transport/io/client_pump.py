"""The client's IO thread: one for all engines of a process. Knows no requests; the owner gives meaning to the events.

Every session starts with a `Ready` event: whatever was sent in an earlier session of that engine and has not ended by
then never will. Inside a session events come in order, without a hole and without a duplicate, whatever happens to
the connection.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead
from wavecore.transport.io.connection import ClientLink, Disconnected, Event, Failed, Reconnected
from wavecore.transport.io.sockets import check_address, make_context
from wavecore.transport.waker import Waker
from wavecore.transport.wire.messages import Abort, Add, Utility

__all__ = ["ClientPump", "Disconnected", "Event", "Failed", "Reconnected"]

TICK_SECONDS = 1.0
LINGER_MS = 500  # for what was sent last, when the engine can still be reached

log = logging.getLogger(__name__)


class ClientPump:
    """Talks to any number of engines, each under an index that the owner chooses.

    Args:
        on_event: called in the IO thread with (index, event). It must not block: pings leave from the same thread.
        version: told to the engines in HELLO.
    """

    def __init__(self, on_event: Callable[[int, Event], None], *, version: str) -> None:
        self._on_event = on_event
        self._version = version
        self._context = make_context()
        self._waker = Waker()
        self._links: dict[int, ClientLink | None] = {}  # None: connecting
        self._tasks: deque[Callable[[], None]] = deque()
        self._close_by = math.inf
        self._thread = threading.Thread(target=self._run, name="wavecore-io", daemon=True)
        self._thread.start()

    def connect(self, index: int, input: str, output: str, curve: CurveClient | None = None) -> None:
        """Talk to the engine at these addresses under `index`, now or whenever it appears there.

        A known index moves: the engine there is taken for another life. Returns at once.

        Raises:
            ConfigError: a bad address, or tcp without keys.
        """
        for address in (input, output):
            check_address(address, curve)
        self._links.setdefault(index, None)
        self._do(lambda: self._connect(index, (input, output), curve))

    def session(self, index: int) -> bytes | None:
        """Name of the present session, None before the first READY."""
        link = self._links.get(index)
        return link.session_id if link else None

    def send(self, index: int, message: Add | Abort | Utility) -> bytes:
        """Send a message; `epoch`, `client` and `number` are filled in. Thread-safe, never blocks.

        Buffers of tensors must not be written to afterwards.

        Returns:
            The session it went to: if a Ready event comes for another one, the message may not have been received.

        Raises:
            EngineDead: the engine was never reached.
            Overloaded: too much is unacknowledged. Never for Abort.
            MessageTooLarge, ProtocolError: the message cannot travel.
        """
        link = self._links.get(index)
        if link is None:
            raise EngineDead(f"engine {index} is not connected")
        session = link.send(message)
        self._waker.wake()
        return session

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, at most for `timeout` seconds, and end the thread. May be called again."""
        self._close_by = min(self._close_by, time.monotonic() + timeout)
        if self._thread.is_alive():
            self._waker.wake()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        self._waker.wake()

    # --- the IO thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop()
        except Exception as error:  # nobody may wait for events that cannot come
            log.exception("the IO thread failed")
            for index in list(self._links):
                self._emit(index, Failed(f"{type(error).__name__}: {error}"))
        finally:
            links = self._living()
            self._links = {}
            for link in links:
                link.close(LINGER_MS)
            self._context.term()
            self._waker.close()

    def _living(self) -> list[ClientLink]:
        # list() first: `connect` may add an entry in another thread meanwhile
        return [link for link in list(self._links.values()) if link is not None]

    def _loop(self) -> None:
        next_tick = time.monotonic() + TICK_SECONDS
        while True:
            poller = zmq.Poller()
            poller.register(self._waker.fd, zmq.POLLIN)
            for link in self._living():
                poller.register(link.dealer, zmq.POLLIN)
                poller.register(link.monitor.channel, zmq.POLLIN)
                if link.blocked:
                    poller.register(link.push, zmq.POLLOUT)
            wait = min(next_tick, self._close_by) - time.monotonic()
            ready = dict(poller.poll(max(0, math.ceil(wait * 1000))))
            if self._waker.fd in ready:
                self._waker.clear()
            for _ in range(len(self._tasks)):
                self._tasks.popleft()()
            for link in self._living():
                link.transmit()
                if not link.receive():
                    link.watch()
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                for link in self._living():
                    link.tick()
            if self._close_by < math.inf and (now >= self._close_by or all(link.flushed for link in self._living())):
                return

    def _connect(self, index: int, addresses: tuple[str, str], curve: CurveClient | None) -> None:
        link = self._links.get(index)
        if link is not None:
            link.move(addresses, curve)
        else:
            self._links[index] = ClientLink(
                self._context, self._version, addresses, curve, lambda event: self._emit(index, event)
            )

    def _emit(self, index: int, event: Event) -> None:
        try:
            self._on_event(index, event)
        except Exception:
            log.exception("the handler of engine %d's %s failed", index, type(event).__name__)
