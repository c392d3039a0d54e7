"""The client's IO thread: owns a `Connection` to each engine. Leaves the meaning of events to whoever made it.

Every session starts with a `Ready` event: whatever was sent in an earlier session of that engine and has not ended by
then never will. Inside a session events come in order, without a hole and without a duplicate, whatever happens to
the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, as_wavecore_error
from wavecore.transport.io.connection import ClientFailed, Connection, EngineEvent
from wavecore.transport.io.io_thread import IoThread, IoThreadFailed
from wavecore.transport.io.sockets import check_address, make_context
from wavecore.transport.wire.messages import Abort, Add, Utility

END_SECONDS = 10.0  # a thread that cannot end, because its log blocks, say, holds no program up
LAST_MESSAGES_MS = 500  # for what was sent last, when the engine can still be reached

logger = logging.getLogger(__name__)


class ClientPump(IoThread):
    """Talks to any number of engines, each under an index that the owner chooses. Starts at once.

    Args:
        on_event: called in the IO thread with (index, event). It must not wait for another party, since pings leave
            from the same thread; it may read a small local file.
        version: told to the engines in HELLO.

    Raises:
        ResourceError: too few descriptors or threads.
    """

    tick_seconds = 1.0

    def __init__(self, on_event: Callable[[int, EngineEvent], None], *, version: str) -> None:
        self._context = make_context()
        super().__init__("client IO", self._on_own_failure)
        self._on_event = on_event
        self._version = version
        self._connections: dict[int, Connection | None] = {}  # None: `connect` was called, the thread has yet to act
        self.start()

    def connect(self, index: int, input: str, output: str, curve: CurveClient | None = None) -> None:
        """Talk to the engine at these addresses under `index`, now or whenever it appears there.

        A known index moves: the engine there is taken for another life. Returns at once.

        Raises:
            ConfigError: a bad address, or tcp without keys.
        """
        for address in (input, output):
            check_address(address, curve)
        self._connections.setdefault(index, None)
        self._call_soon(lambda: self._connect(index, (input, output), curve))

    def client_id(self, index: int) -> bytes | None:
        """The name of this client in its present session with an engine, None before the first READY."""
        connection = self._connections.get(index)
        return connection.client_id if connection else None

    def send(self, index: int, message: Add | Abort | Utility) -> bytes:
        """Send a message; `epoch`, `client_id` and `number` are filled in. Thread-safe, never blocks.

        Buffers of tensors must not be written to afterwards.

        Returns:
            The client_id it was sent under: if a Ready event comes for another one, it may not have been received.

        Raises:
            EngineDead: the engine was never reached.
            Overloaded: too much is unacknowledged. Never for Abort.
            MessageTooLarge, ProtocolError: the message cannot travel.
        """
        connection = self._connections.get(index)
        if connection is None:
            raise EngineDead(f"engine {index} is not connected")
        client_id = connection.send(message)
        self._waker.wake()
        return client_id

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call a function in the IO thread. From any thread, a signal handler and the collector: it never waits. After
        the thread's end nothing is called."""
        self._call_soon(lambda: self._guard(call))

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Likewise after some time. Only in the IO thread. Nothing is cancelled: a function looks whether it is still
        wanted."""
        self._call_later(seconds, lambda: self._guard(call))

    def close(self, timeout: float = 1.0) -> None:
        """Send what is queued, at most for `timeout` seconds, and end the thread. May be called again."""
        self._end_within(timeout)
        self.join(timeout + END_SECONDS)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _open_connections(self) -> list[Connection]:
        # list() first: `connect` may add an entry in another thread meanwhile
        return [connection for connection in list(self._connections.values()) if connection is not None]

    def _turn(self, ready: Mapping[Any, int]) -> None:
        for connection in self._open_connections():
            connection.turn(ready)

    def _tick(self) -> None:
        for connection in self._open_connections():
            connection.tick()

    def _is_flushed(self) -> bool:
        return all(connection.flushed for connection in self._open_connections())

    def _release(self) -> None:
        connections = self._open_connections()
        self._connections = {}
        for connection in connections:
            connection.close(LAST_MESSAGES_MS)
        self._context.term()
        super()._release()

    def _connect(self, index: int, addresses: tuple[str, str], curve: CurveClient | None) -> None:
        connection = self._connections.get(index)
        if connection is not None:
            connection.move(addresses, curve)
        else:
            self._connections[index] = Connection(
                self._context, self._poller, self._version, addresses, curve, lambda event: self._emit(index, event)
            )

    def _on_own_failure(self, failed: IoThreadFailed) -> None:
        """Nobody may wait for events that cannot come."""
        for index in list(self._connections):
            self._emit(index, ClientFailed(as_wavecore_error(failed.error)))

    def _emit(self, index: int, event: EngineEvent) -> None:
        self._guard(lambda: self._on_event(index, event))

    def _guard(self, call: Callable[[], object]) -> None:
        """What fails in the owner's functions is no reason to end."""
        try:
            call()
        except Exception:
            logger.exception("a function of the client failed")
