"""A client's connection to one engine: two sockets, the session on them, and both ends of its two numbered streams.

    state   fields                      what happens
    new     no _session                 HELLO at each connection and each second, until READY: event Ready, state up.
                                        `send` raises EngineDead
    lost    _session is the old one,    likewise; what `send` puts into the old one's outbox is given up at READY, see
            no _present                 `ClientPump.send`
    up      _present is _session, _up   PING each second, after every few messages, at once on a gap: events Step,
                                        Result, Heartbeat, Dead
    down    _present is _session,       no connection, or no word for 5 s: event Disconnected. ZeroMQ connects again;
            not _up                     the next word of the session is event Reconnected, state up

A broken connection ends no session: what was lost is sent again, in both directions (see `delivery`). UNKNOWN (the
engine forgot this client, or is another life), READY of another life, and `move` lead to `lost`: a new client_id, and
new sockets.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import zmq

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, Overloaded, ProtocolError, WavecoreError
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.sockets import Monitor, make_socket
from wavecore.transport.wire.codec import Frames, decode, encode, total_bytes
from wavecore.transport.wire.delivery import PIECE_BYTES, Inbox, Outbox
from wavecore.transport.wire.messages import (
    Abort,
    Add,
    Bye,
    Dead,
    Heartbeat,
    Hello,
    Mark,
    Message,
    Piece,
    Ping,
    Ready,
    Result,
    Step,
    UnknownClient,
    Utility,
)

MAX_UNACKNOWLEDGED = 65_536
MAX_UNACKNOWLEDGED_BYTES = 1 << 30
SILENT_TICKS = 5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The engine is out of reach for now; the session may go on (Reconnected) or be replaced (Ready)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The same session goes on; nothing was lost or doubled."""


@dataclass(frozen=True, slots=True)
class ClientFailed:
    """The client's own IO thread ended, on a bug or for lack of descriptors: no event will come any more."""

    error: WavecoreError


EngineEvent = Ready | Step | Result | Heartbeat | Dead | Disconnected | Reconnected | ClientFailed


@dataclass(frozen=True, slots=True)
class Session:
    """One client in one life of an engine, and what it sends there."""

    client_id: bytes
    epoch: bytes
    outbox: Outbox


class Connection:
    """Connects at once and for ever. All methods but `send` belong to the IO thread; `send` encodes a message and puts
    it into the outbox in its caller's thread, under the lock.

    Args:
        poller: of the IO thread; the sockets are registered with it.
        addresses: of the engine's input and output socket.
        emit: gets the events, in the IO thread.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        version: str,
        addresses: tuple[str, str],
        curve: CurveClient | None,
        emit: Callable[[EngineEvent], None],
    ) -> None:
        self._context = context
        self._poller = poller
        self._hello = encode(Hello(version))
        self._addresses = addresses
        self._curve = curve
        self._emit = emit
        self._lock = threading.Lock()  # around _session and its outbox, which `send` uses from other threads
        self._session: Session | None = None  # a lost one stays until READY
        self._complaints = Complaints(logger)
        self._open()

    def _open(self) -> None:
        """New sockets under a new client_id: nothing of an earlier session can reach this one."""
        self._client_id = secrets.token_bytes(16)
        self._present: Session | None = None  # the one on these sockets; for the IO thread
        self._inbox = Inbox()
        self._up = False
        self._silent_ticks = 0
        self.push: zmq.Socket[bytes] | None = None  # from READY on: who is refused shall cost the engine little
        self.dealer = make_socket(
            self._context, zmq.DEALER, self._addresses[1], identity=self._client_id, curve=self._curve
        )
        self._monitor = Monitor(self.dealer)
        self._poller.register(self.dealer, zmq.POLLIN)
        self._poller.register(self._monitor.channel, zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        """Give the sockets back. With time to linger the engine hears that the client left on purpose."""
        if linger_ms and self._up and self._present is not None:
            _send(self.dealer, encode(Bye(self._present.epoch, self._present.outbox.sent)))
        self._poller.register(self._monitor.channel, 0)
        self._monitor.close()
        for socket in filter(None, (self.push, self.dealer)):
            self._poller.register(socket, 0)
            socket.close(linger_ms)

    # --- any thread ---------------------------------------------------------------------------------------------------

    @property
    def client_id(self) -> bytes | None:
        session = self._session
        return session.client_id if session else None

    def send(self, message: Add | Abort | Utility) -> bytes:
        """Queue a message; see `ClientPump.send`."""
        with self._lock:
            session = self._session
            if session is None:
                raise EngineDead(f"the engine at {self._addresses[0]} has not answered yet: wait for it to be ready")
            outbox = session.outbox
            frames = encode(replace(message, epoch=session.epoch, client_id=session.client_id, number=0))
            if isinstance(message, Abort):  # small, and makes room
                outbox.withdraw(set(message.handles.tolist()))
            elif len(outbox) >= MAX_UNACKNOWLEDGED or outbox.bytes >= MAX_UNACKNOWLEDGED_BYTES:
                raise Overloaded(
                    f"{len(outbox)} messages ({outbox.bytes} bytes) wait for the engine's acknowledgement: "
                    "send again when it has caught up"
                )
            if isinstance(message, Add):
                outbox.append(frames, int(total_bytes(frames) > PIECE_BYTES), message.handle)
            else:
                outbox.append(frames)
            return session.client_id

    # --- the IO thread ------------------------------------------------------------------------------------------------

    @property
    def flushed(self) -> bool:
        with self._lock:
            return self._present is None or not self._present.outbox.has_unsent

    def turn(self, ready: Mapping[Any, int]) -> None:
        """One turn of the thread: `ready` are the sockets that have something."""
        self._transmit()
        if self.dealer in ready and self._receive():
            return
        if self._monitor.channel in ready:
            self._watch()

    def _transmit(self) -> None:
        """Hand what is queued to the PUSH, as far as it takes it."""
        session = self._present
        if session is None or self.push is None:
            return
        with self._lock:
            while (frames := session.outbox.peek()) is not None and _send(self.push, frames):
                session.outbox.advance()
        self._poller.register(self.push, 0 if frames is None else zmq.POLLOUT)  # wait for room only where it is needed

    def _receive(self) -> bool:
        """Handle what the DEALER got. Returns whether the sockets were replaced."""
        for _ in range(1000):  # then give the other connections a turn
            try:
                frames = [frame.buffer for frame in self.dealer.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                break
            try:
                if self._handle(decode(frames), total_bytes(frames)):
                    return True
            except ProtocolError as error:
                self._complaints.add("bad frame from an engine", error)
            if self._inbox.report_due:
                self._ping()
        return False

    def _watch(self) -> None:
        """Handle what the monitor saw."""
        while (event := self._monitor.next()) is not None:
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._greet(new_connection=True)
            elif event == zmq.EVENT_DISCONNECTED:
                if self._receive():  # last words first
                    return
                self._down("the connection was lost")
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._complaints.add("the engine refused our key", self._addresses[1])

    def tick(self) -> None:
        """One second went by."""
        self._silent_ticks += 1
        if self._silent_ticks >= SILENT_TICKS:
            self._down(f"no word from the engine for {self._silent_ticks} s")
        self._greet(new_connection=False)

    def _greet(self, new_connection: bool) -> None:
        session = self._present
        if session is None:
            _send(self.dealer, self._hello)
            return
        if new_connection:  # perhaps the PUSH's is new, too
            with self._lock:
                session.outbox.probe()
            self._transmit()
        self._ping(again=new_connection)

    def _ping(self, again: bool = False) -> None:
        if self._present is not None:
            seen, gap, attempt = self._inbox.report()
            _send(self.dealer, encode(Ping(self._present.epoch, seen, gap or again, attempt)))

    def _handle(self, message: Message, size: int) -> bool:
        if isinstance(message, UnknownClient):
            return self._reopen()
        if isinstance(message, Ready):
            return self._ready(message)
        session = self._present
        if session is None and isinstance(message, Dead):  # refused at the door
            self._emit(message)
            return False
        if session is None or getattr(message, "epoch", None) != session.epoch:
            self._complaints.add("message of another session", self._client_id.hex(), logging.DEBUG)
            return False
        self._silent_ticks = 0
        if not self._up:
            self._up = True
            self._emit(Reconnected())
        if isinstance(message, Step | Result | Piece):
            if self._inbox.accept(message.number, size):
                self._deliver(message)
        elif isinstance(message, Mark):
            self._inbox.mark(message.sent, message.attempt)
        elif isinstance(message, Heartbeat):
            with self._lock:
                session.outbox.acknowledge(message.seen, message.gap, message.attempt)
            self._transmit()
            self._emit(message)
        elif isinstance(message, Dead):
            self._emit(message)
        else:
            raise ProtocolError(f"{type(message).__name__} from an engine")
        return False

    def _ready(self, ready: Ready) -> bool:
        if self._present is not None:
            # A HELLO that was sent twice is answered twice; another epoch means the engine restarted in between.
            return self._present.epoch != ready.epoch and self._reopen()
        with self._lock:
            self._present = self._session = Session(self._client_id, ready.epoch, Outbox(ready.epoch, self._client_id))
        self.push = make_socket(self._context, zmq.PUSH, self._addresses[0], curve=self._curve)
        self._up = True
        self._silent_ticks = 0
        self._emit(ready)
        return False

    def _reopen(self) -> bool:
        self._down("the engine holds no session of this client any more")
        self.close()
        self._open()
        return True

    def move(self, addresses: tuple[str, str], curve: CurveClient | None) -> None:
        """The engine is to be found elsewhere from now on."""
        self._addresses, self._curve = addresses, curve
        self._reopen()

    def _down(self, reason: str) -> None:
        if self._up:
            self._up = False
            self._emit(Disconnected(reason))

    def _deliver(self, message: Step | Result | Piece) -> None:
        if isinstance(message, Piece):
            if (frames := self._inbox.join(message)) is None:
                return
            whole = decode(frames)
            if not isinstance(whole, Step | Result) or whole.epoch != message.epoch:
                raise ProtocolError(f"{type(whole).__name__} in pieces from an engine")
            message = whole
        self._emit(message)


def _send(socket: zmq.Socket[bytes], frames: Frames) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True
