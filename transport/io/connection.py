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

A broken connection ends no session: what was lost is sent again, in both directions. UNKNOWN (the engine forgot this
client, or is another life), READY of another life, and `move` lead to `lost`: a new client_id, and new sockets.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import zmq

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, MessageTooLarge, Overloaded, ProtocolError
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.sockets import Monitor, make_socket
from wavecore.transport.wire.codec import Frames, decode, encode, total_bytes
from wavecore.transport.wire.delivery import Inbox, Outbox
from wavecore.transport.wire.messages import (
    MAX_RESULT_BYTES,
    Abort,
    Add,
    Bye,
    Dead,
    Heartbeat,
    Hello,
    Message,
    Ping,
    Ready,
    Result,
    Step,
    TensorFrame,
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
    """The client's own IO thread ended on a bug: no event will come any more."""

    reason: str


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
        self._partial: dict[int, list[TensorFrame]] = {}  # chunks of results by call
        self._up = False
        self._silent_ticks = 0
        input_address, output_address = self._addresses
        self.push = make_socket(self._context, zmq.PUSH, input_address, curve=self._curve)
        self.dealer = make_socket(
            self._context, zmq.DEALER, output_address, identity=self._client_id, curve=self._curve
        )
        self._monitor = Monitor(self.dealer)
        self._poller.register(self.dealer, zmq.POLLIN)
        self._poller.register(self._monitor.channel, zmq.POLLIN)

    def close(self, linger_ms: int = 0) -> None:
        """Give the sockets back. With time to linger the engine hears that the client left on purpose."""
        if linger_ms and self._up and self._present is not None:
            _send(self.dealer, encode(Bye(self._present.epoch, self._present.outbox.last_number)))
        for socket in (self.push, self.dealer, self._monitor.channel):
            self._poller.register(socket, 0)
        self._monitor.close()
        self.push.close(linger_ms)
        self.dealer.close(linger_ms)

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
            if outbox.full and not isinstance(message, Abort):  # an abort is small, and makes room
                raise Overloaded(
                    f"{len(outbox)} messages ({outbox.bytes} bytes) wait for the engine's acknowledgement: "
                    "send again when it has caught up"
                )
            frames = encode(
                replace(message, epoch=session.epoch, client_id=session.client_id, number=outbox.last_number + 1)
            )
            outbox.append(frames, time.monotonic())
            return session.client_id

    # --- the IO thread ------------------------------------------------------------------------------------------------

    @property
    def flushed(self) -> bool:
        with self._lock:
            return self._present is None or self._present.outbox.peek() is None

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
        if session is None:
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
        if new_connection:
            with self._lock:
                session.outbox.rewind(time.monotonic())
            self._transmit()
        self._ping(again=new_connection)

    def _ping(self, again: bool = False) -> None:
        if self._present is not None:
            seen, gap = self._inbox.report()
            _send(self.dealer, encode(Ping(self._present.epoch, seen, gap or again)))

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
        if isinstance(message, Step | Result):
            if self._inbox.accept(message.number, size):
                self._deliver(message)
        elif isinstance(message, Heartbeat):
            with self._lock:
                session.outbox.acknowledge(message.seen, message.gap, time.monotonic())
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
            self._present = self._session = Session(
                self._client_id, ready.epoch, Outbox(MAX_UNACKNOWLEDGED, MAX_UNACKNOWLEDGED_BYTES)
            )
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

    def _deliver(self, message: Step | Result) -> None:
        if isinstance(message, Step):
            self._emit(message)
            return
        frames = self._partial.setdefault(message.call, [])
        if _size(frames) <= MAX_RESULT_BYTES:
            frames.extend(message.frames)
        if not message.last:
            return
        del self._partial[message.call]
        if _size(frames) > MAX_RESULT_BYTES:
            text = f"the result of call {message.call} is larger than {MAX_RESULT_BYTES} bytes"
            message = replace(message, value=None, error_code=MessageTooLarge.code, error=text)
            frames = []
        self._emit(replace(message, frames=tuple(frames)))


def _size(frames: list[TensorFrame]) -> int:
    return sum(len(frame.buffer) for frame in frames)


def _send(socket: zmq.Socket[bytes], frames: Frames) -> bool:
    try:
        socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    return True
