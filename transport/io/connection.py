"""A client's connection to one engine: two sockets, the session on them, and both ends of its two numbered streams.

    state   fields              what happens
    new     no _outbox         HELLO at each connection and each second, until READY: event Ready, state up. `send`
                                raises EngineDead
    up      _outbox, _up       PING each second, after every few messages, at once on a gap: events Step, Result,
                                Heartbeat, Dead
    down    _outbox, not _up   no connection, or no word for 5 s: event Disconnected. ZeroMQ connects again; the next
                                word of the session is event Reconnected, state up

A broken connection ends no session: what was lost is sent again, in both directions (see `delivery`). UNKNOWN (the
engine forgot this client, or is another life), READY of another life, and `move` lead back to `new`, with another
client_id and other sockets. All of it belongs to the client's IO thread.

libzmq connects again after a connection broke, but never after a peer broke its protocol or refused our key. So sockets
that have long been without a connection are replaced: a stranger may have had the engine's port, or a key come late.
"""

import logging
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import zmq

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, Overloaded, ProtocolError, ResourceError, WavecoreError
from wavecore.transport.headroom import check_headroom
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.sockets import Context, Monitor, Socket, make_context, make_socket
from wavecore.transport.wire import messages
from wavecore.transport.wire.codec import Frames, decode, encode, total_bytes
from wavecore.transport.wire.delivery import PIECE_BYTES, Inbox, Outbox

MAX_UNACKNOWLEDGED = 65_536
MAX_UNACKNOWLEDGED_BYTES = 1 << 30
SILENT_TICKS = 5
_HELLO = encode(messages.Hello())

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The engine is out of reach for now; the session may go on (Reconnected) or be replaced (Ready).

    Attributes:
        silent: ticks that went by since its last word.
    """

    reason: str
    silent: int = 0


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The same session goes on; nothing was lost or doubled."""


@dataclass(frozen=True, slots=True)
class ClientFailed:
    """The client's own IO thread ended, on a bug or for lack of descriptors: no event will come any more."""

    error: WavecoreError


EngineEvent = (
    messages.Ready | messages.Down | messages.Heartbeat | messages.Dead | Disconnected | Reconnected | ClientFailed
)


class Connection:
    """Connects at once and for ever.

    Args:
        poller: of the IO thread; the sockets are registered with it.
        addresses: of the engine's input and output socket.
        emit: gets the events.

    Attributes:
        client_id: the name of the present session, or of the next one.
    """

    def __init__(
        self,
        context: Context,
        poller: zmq.Poller,
        addresses: tuple[str, str],
        curve: CurveClient | None,
        emit: Callable[[EngineEvent], None],
    ) -> None:
        self._context = context
        self._poller = poller
        self._addresses = addresses
        self._curve = curve
        self._emit = emit
        self._complaints = Complaints(logger)
        self._open()

    def _open(self) -> None:
        """New sockets under a new client_id: nothing of an earlier session can reach this one."""
        self.client_id = secrets.token_bytes(16)
        self._outbox: Outbox | None = None  # what goes up in it
        self._inbox = Inbox()
        self._up = False
        self._silent_ticks = 0
        self.push: Socket | None = None  # from READY on: who is refused shall cost the engine little
        self._connect()

    def _connect(self) -> None:
        self._connected = False
        self.dealer = make_socket(
            self._context, zmq.DEALER, self._addresses[1], identity=self.client_id, curve=self._curve
        )
        self._monitor = Monitor(self.dealer)
        self._poller.register(self.dealer, zmq.POLLIN)
        self._poller.register(self._monitor.channel, zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        """Give the sockets back. With time to linger the engine hears that the client left on purpose."""
        if self.dealer.closed:  # the system gave none in their place
            return
        if linger_ms and self._up and self._outbox is not None:
            _send(self.dealer, encode(messages.Bye(self._outbox.epoch)))
        self._poller.register(self._monitor.channel, 0)
        self._monitor.close()
        for socket in filter(None, (self.push, self.dealer)):
            self._poller.register(socket, 0)
            socket.close(linger_ms)

    def send(self, message: messages.Up) -> bytes:
        """Number a message and send it, now or when there is room; see `ClientPump.send`."""
        if self._outbox is None:
            raise EngineDead(f"no session with the engine at {self._addresses[0]}: wait for it to be ready")
        outbox = self._outbox
        frames = encode(replace(message, epoch=self._outbox.epoch, client_id=self.client_id))
        if isinstance(message, messages.Abort):  # small, and makes room
            outbox.withdraw(set(message.handles.tolist()))
        elif len(outbox) >= MAX_UNACKNOWLEDGED or outbox.bytes >= MAX_UNACKNOWLEDGED_BYTES:
            raise Overloaded(
                f"{len(outbox)} messages ({outbox.bytes} bytes) wait for the engine's acknowledgement: "
                "send again when it has caught up"
            )
        if isinstance(message, messages.Add):
            outbox.append(frames, int(total_bytes(frames) > PIECE_BYTES), message.handle)
        else:
            outbox.append(frames)
        self._transmit()
        return self.client_id

    def turn(self, ready: Mapping[Any, int]) -> None:
        """One turn of the thread: `ready` are the sockets that have something."""
        if self.push in ready:
            self._transmit()
        if self.dealer in ready:
            self._receive()
        if self._monitor.channel in ready:
            self._watch()

    def _transmit(self) -> None:
        """Hand what is queued to the PUSH, as far as it takes it."""
        if self._outbox is None or self.push is None:
            return
        outbox = self._outbox
        while (frames := outbox.peek()) is not None and _send(self.push, frames):
            outbox.advance()
        self._poller.register(self.push, 0 if frames is None else zmq.POLLOUT)  # wait for room only where it is needed

    def _receive(self) -> None:
        """Handle what the DEALER got."""
        dealer = self.dealer
        for _ in range(1000):  # then give the other connections a turn
            try:
                frames = [frame.buffer for frame in dealer.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            try:
                self._handle(decode(frames), total_bytes(frames))
            except ProtocolError as error:
                self._complaints.add("bad frame from an engine", error)
            if self.dealer is not dealer:  # that was the end of the session
                return
            if self._inbox.report_due:
                self._speak()

    def _watch(self) -> None:
        """Handle what the monitor saw."""
        while (event := self._monitor.next()) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._connected = True
                self._speak(new_connection=True)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connected = False
                self._receive()  # last words first
                self._down("the connection was lost")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._complaints.add("the engine refused our key", self._addresses[1])

    def tick(self) -> None:
        """One second went by."""
        self._silent_ticks += 1
        if self._silent_ticks >= SILENT_TICKS:
            self._down(f"no word from the engine for {self._silent_ticks} s")
        if not self._connected and self._silent_ticks % SILENT_TICKS == 0:
            self._replace_sockets()
        self._speak()

    def _replace_sockets(self) -> None:
        """Under the same client_id: the session goes on."""
        with suppress(ResourceError):  # else those that are there stay
            check_headroom(f"sockets for {self._addresses[0]}", 8, 0)
            self.close()
            if self.push is not None:
                self.push = make_socket(self._context, zmq.PUSH, self._addresses[0], curve=self._curve)
            self._connect()

    def _speak(self, new_connection: bool = False) -> None:
        """Say hello, or how far the engine's messages were received."""
        if self._outbox is None:
            _send(self.dealer, _HELLO)
            return
        if new_connection:  # perhaps the PUSH's is new, too
            self._outbox.probe()
            self._transmit()
        seen, gap, attempt = self._inbox.report()
        _send(self.dealer, encode(messages.Ping(self._outbox.epoch, seen, gap or new_connection, attempt)))

    def _handle(self, message: messages.Message, size: int) -> None:
        outbox = self._outbox
        if isinstance(message, messages.UnknownClient):
            self._reopen()
        elif isinstance(message, messages.Ready):
            self._ready(message)
        elif outbox is None and isinstance(message, messages.Dead):  # refused at the door
            self._emit(message)
        elif outbox is None or getattr(message, "epoch", None) != outbox.epoch:
            self._complaints.add("message of another session", self.client_id.hex(), logging.DEBUG)
        else:
            self._hear(message, outbox, size)

    def _hear(self, message: messages.Message, outbox: Outbox, size: int) -> None:
        """A message of this session."""
        self._silent_ticks = 0
        if not self._up:
            self._up = True
            self._emit(Reconnected())
        if isinstance(message, messages.Down | messages.Piece | messages.Mark):
            whole = self._inbox.take(message, size)
            if isinstance(whole, messages.Down):
                self._emit(whole)
        elif isinstance(message, messages.Heartbeat | messages.Dead):
            if isinstance(message, messages.Heartbeat):
                outbox.acknowledge(message.seen, message.gap, message.attempt)
                self._transmit()
            self._emit(message)
        else:
            raise ProtocolError(f"{type(message).__name__} from an engine")

    def _ready(self, ready: messages.Ready) -> None:
        if self._outbox is not None:
            # A HELLO that was sent twice is answered twice; another epoch means the engine restarted in between.
            if self._outbox.epoch != ready.epoch:
                self._reopen()
            return
        self.push = make_socket(self._context, zmq.PUSH, self._addresses[0], curve=self._curve)
        self._outbox = Outbox(ready.epoch, self.client_id)
        self._up = True
        self._silent_ticks = 0
        self._emit(ready)

    def _reopen(self) -> None:
        self._down("the engine holds no session of this client any more")
        self.close()
        self._open()

    def move(self, addresses: tuple[str, str], curve: CurveClient | None) -> None:
        """The engine is to be found elsewhere from now on."""
        self._addresses, self._curve = addresses, curve
        self._reopen()

    def _down(self, reason: str) -> None:
        if self._up:
            self._up = False
            self._emit(Disconnected(reason, self._silent_ticks))


def say_bye(address: str, client_id: bytes, epoch: bytes, curve: CurveClient | None = None) -> None:
    """End a dead client's session: its engine ends its requests now, and not when it misses the client.

    Waits up to two seconds for an engine that does not listen.

    Args:
        address: the engine's ROUTER, which gives an identity to whoever connects under it last.
        client_id, epoch: of the session.

    Raises:
        ResourceError, StartError: no socket could be made.
    """
    with (
        make_context() as context,
        make_socket(context, zmq.DEALER, address, identity=client_id, curve=curve) as dealer,
    ):
        dealer.send_multipart(encode(messages.Bye(epoch)))


def _send(socket: Socket, frames: Frames) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True
