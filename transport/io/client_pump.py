"""The client's IO thread: owns a `Connection` to each engine. Leaves the meaning of events to whoever made it.

Every session starts with a `Ready` event: whatever was sent in an earlier session of that engine and has not ended by
then never will. Inside a session events come in order, without a hole and without a duplicate, whatever happens to
the connection.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, as_wavecore_error
from wavecore.transport.io.connection import ClientFailed, Connection, EngineEvent
from wavecore.transport.io.io_thread import IoThread, IoThreadFailed
from wavecore.transport.io.sockets import check_address, make_context
from wavecore.transport.wire.messages import Up

LAST_WORD_MS = 500  # for the goodbye, when the engine can still be reached

logger = logging.getLogger(__name__)


class ClientPump(IoThread):
    """Talks to any number of engines, each under an index that the owner chooses. Starts at once; with its end, which
    tells the engines, all requests end.

    Args:
        on_event: called in the IO thread with (index, event). It must not wait for another party, since pings leave
            from the same thread; it may read a small local file.

    Raises:
        ResourceError: too few descriptors or threads.
    """

    tick_seconds = 1.0

    def __init__(self, on_event: Callable[[int, EngineEvent], None]) -> None:
        self._context = make_context()
        super().__init__("client IO", self._on_own_failure)
        self._owned.callback(self._context.term)
        self._owned.callback(self._close_connections)
        self._on_event = on_event
        self._known: set[int] = set()  # indices of `connect`
        self._connections: dict[int, Connection] = {}
        self.start()

    def connect(self, index: int, input: str, output: str, curve: CurveClient | None = None) -> None:
        """Talk to the engine at these addresses under `index`, now or whenever it appears there.

        A known index moves: the engine there is taken for another life. Returns at once.

        Raises:
            ConfigError: a bad address, or tcp without keys.
        """
        for address in (input, output):
            check_address(address, curve)
        self._known.add(index)
        self._call_soon(lambda: self._connect(index, (input, output), curve))

    def client_id(self, index: int) -> bytes:
        """The name of this client in its present session with an engine."""
        return self._connections[index].client_id

    def call_soon(self, call: Callable[[], object]) -> None:
        """Call a function in the IO thread. From any thread, a signal handler and the collector: it never waits. After
        the thread's end nothing is called."""
        self._call_soon(lambda: self._guard(call))

    # --- the thread; `call_later` and `send` are for functions of the owner that run there ----------------------------

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        """Call a function after some time. Nothing is cancelled: a function looks whether it is still wanted."""
        self._call_later(seconds, lambda: self._guard(call))

    def send(self, index: int, message: Up) -> bytes:
        """Send a message; `epoch`, `client_id` and `number` are filled in. Never waits.

        Buffers of tensors must not be written to afterwards.

        Returns:
            The client_id it was sent under: if a Ready event comes for another one, it may not have been received.

        Raises:
            EngineDead: there is no session with this engine.
            Overloaded: too much is unacknowledged. Never for Abort.
            MessageTooLarge, ProtocolError: the message cannot travel.
        """
        if index not in self._connections:
            raise EngineDead(f"engine {index} is not connected")
        return self._connections[index].send(message)

    def _turn(self, ready: Mapping[Any, int]) -> None:
        for connection in self._connections.values():
            connection.turn(ready)

    def _tick(self) -> None:
        for connection in self._connections.values():
            connection.tick()

    def _close_connections(self) -> None:
        for connection in self._connections.values():
            connection.close(LAST_WORD_MS)

    def _on_own_failure(self, failed: IoThreadFailed) -> None:
        """Nobody may wait for events that cannot come."""
        for index in list(self._known):
            self._emit(index, ClientFailed(as_wavecore_error(failed.error)))

    def _connect(self, index: int, addresses: tuple[str, str], curve: CurveClient | None) -> None:
        if index in self._connections:
            self._connections[index].move(addresses, curve)
        else:
            self._connections[index] = Connection(
                self._context, self._poller, addresses, curve, lambda event: self._emit(index, event)
            )

    def _emit(self, index: int, event: EngineEvent) -> None:
        self._guard(lambda: self._on_event(index, event))

    def _guard(self, call: Callable[[], object]) -> None:
        """What fails in the owner's functions is no reason to end."""
        try:
            call()
        except Exception:
            logger.exception("a function of the client failed")
