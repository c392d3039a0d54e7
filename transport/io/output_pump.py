"""The engine's output thread: one ROUTER to all clients. Knows no requests, only output, results and last words.

The engine's main loop hands over what it produced and goes on; this thread numbers it, keeps it until it is
acknowledged, and merges what a slow client has not room for. No client can slow another or grow without a bound:

    put -> pending (merged) -> outbox (numbered, bounded window) -> ROUTER -> client
                                  ^--- Ping(seen) ---------------------'

Time is counted in ticks of this thread, not by the clock: after the engine itself was suspended for a while, it does
not take the silence for the clients'.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import Overloaded, ProtocolError, WavecoreError
from wavecore.transport.io.client_stream import ClientState, Limits
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.router import Router, Sent
from wavecore.transport.waker import Waker
from wavecore.transport.wire.codec import Frames, encode
from wavecore.transport.wire.delivery import Inbox
from wavecore.transport.wire.messages import Bye, Dead, Gone, Heartbeat, Hello, Ping, Ready, StepTokens, TensorFrame

TICK_SECONDS = 1.0
FLUSH_SECONDS = 2.0
MAX_LAST_WORDS = 65_536  # characters; of a longer traceback the end counts
MAX_TASKS = 1000  # outputs handed over and not looked at: a main loop that outruns this thread waits for it

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counters:
    """What a heartbeat says about the main loop: steps so far, requests running and waiting, tokens outstanding."""

    steps: int
    running: int
    waiting: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ClientGone:
    """In the input queue: abort every request of this client. May come more than once.

    Attributes:
        reason: why it was dropped; empty where it left by itself.
    """

    client: bytes
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PumpFailed:
    """In the input queue: an IO thread ended on a bug. An engine that is deaf or mute must end."""

    where: str
    error: BaseException


@dataclass(slots=True)
class UpStream:
    """What a client sends. `asked` is counted by the input thread, `answered` by the output thread."""

    max_calls: int
    inbox: Inbox = field(default_factory=Inbox)
    asked: int = 0
    answered: int = 0

    @property
    def full(self) -> bool:
        """Whether as many utility calls wait for their answer as may."""
        return self.asked - self.answered >= self.max_calls


class OutputPump:
    """Owns the ROUTER. `put*`, `nudge` and `stop` may be called by any thread; `run` is the thread.

    Args:
        address: where to bind; `endpoint` is what was bound.
        epoch: 16 random bytes that name this life of the engine.
        resolved: told to every client in READY.
        counters: read at every heartbeat, in this thread.
        input_queue: gets ClientGone and PumpFailed.
        curve: keys, for tcp.

    Raises:
        ConfigError, ResourceError, StartError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        *,
        epoch: bytes,
        engine: int,
        version: str,
        resolved: dict[str, Any],
        counters: Callable[[], Counters],
        input_queue: SimpleQueue[Any],
        curve: CurveServer | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.epoch = epoch
        self.sessions: dict[bytes, UpStream] = {}  # added and removed here, used by the input thread
        self._ready = encode(Ready(epoch, version, engine, resolved))
        self._counters = counters
        self._input_queue = input_queue
        self._limits = limits or Limits()
        self._clients: dict[bytes, ClientState] = {}
        self._dirty: set[bytes] = set()
        self._tasks: deque[Callable[[], object]] = deque()
        self._drained = threading.Event()
        self._ended = threading.Event()
        self._stopping = False
        self._complaints = Complaints(log)
        self._router = Router(address, curve, self._complaints)
        self.endpoint = self._router.endpoint.address
        self._waker = Waker()

    def put(self, outputs: Mapping[bytes, StepTokens], load: tuple[int, int, int] = (0, 0, 0)) -> None:
        """Output of one step, by client. The arrays must not be written to afterwards."""
        while len(self._tasks) >= MAX_TASKS and not self._ended.is_set():
            self._drained.clear()
            self._drained.wait(0.1)  # it may have drained between the check and the clear
        self._do(lambda: self._put(outputs, load))

    def put_result(
        self,
        client: bytes,
        call: int,
        value: Any = None,
        frames: Sequence[TensorFrame] = (),
        error: WavecoreError | None = None,
    ) -> None:
        """Answer a utility call."""
        self._do(lambda: self._put_result(client, call, value, frames, error))

    def put_dead(self, code: str, message: str, phase: str, rank: int, traceback: str) -> None:
        """Last words, to every client."""
        frames = encode(Dead(self.epoch, code, _sendable(message), phase, rank, _sendable(traceback)))
        self._do(lambda: self._broadcast(frames))

    def nudge(self, client: bytes, seen: int, gap: bool) -> None:
        """Tell a client now how far its up stream got."""
        self._do(lambda: self._heartbeat(client, seen, gap))

    def stop(self) -> None:
        """End `run` once everything left, at latest in 2 s."""
        self._stopping = True
        self._waker.wake()

    def close(self) -> None:
        """Give everything back, if `run` is never called."""
        self._router.endpoint.close(0)
        self._waker.close()

    def _do(self, task: Callable[[], object]) -> None:
        self._tasks.append(task)
        self._waker.wake()

    # --- the thread ---------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            log.exception("output thread failed")
            self._input_queue.put(PumpFailed("output thread", error))
        finally:
            self._ended.set()
            self._router.endpoint.close()
            self._waker.close()

    def _loop(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router.socket, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        next_tick = time.monotonic() + TICK_SECONDS
        give_up = math.inf
        while True:
            wait = min(next_tick, give_up) - time.monotonic()
            ready = dict(poller.poll(max(0, math.ceil(wait * 1000))))
            if self._waker.fd in ready:
                self._waker.clear()
            for _ in range(len(self._tasks)):
                self._tasks.popleft()()
            self._drained.set()
            if self._router.socket in ready:
                for identity, message in self._router.receive():
                    self._handle(identity, message)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_SECONDS
                self._tick()
            self._flush()
            if self._stopping and not self._tasks:
                give_up = min(give_up, now + FLUSH_SECONDS)
                if now >= give_up or not any(c.has_output and c.connected for c in self._clients.values()):
                    return

    def _handle(self, identity: bytes, message: Hello | Ping | Bye) -> None:
        if isinstance(message, Hello):
            self._hello(identity)
        elif isinstance(message, Ping):
            self._ping(identity, message)
        else:
            self._bye(identity, message)

    def _hello(self, identity: bytes) -> None:
        if identity not in self._clients:
            if len(self._clients) >= self._limits.clients:
                text = f"{len(self._clients)} clients are attached, no more are taken: close some or start more engines"
                self._complaints.add("too many clients", text)
                self._router.send(identity, encode(Dead(self.epoch, Overloaded.code, text, "connect", 0, "")))
                return
            self._clients[identity] = ClientState(self.epoch, self._limits)
            self.sessions[identity] = UpStream(self._limits.calls)
        self._clients[identity].heard()
        self._router.send(identity, self._ready)

    def _ping(self, identity: bytes, ping: Ping) -> None:
        client = self._clients.get(identity)
        if client is None or ping.epoch != self.epoch:
            self._router.send(identity, encode(Gone(self.epoch)))
            return
        client.heard()
        try:
            client.acknowledge(ping.seen, ping.gap, time.monotonic())
        except ProtocolError as error:
            self._complaints.add("bad frame on the output socket", error)
        self._dirty.add(identity)

    def _bye(self, identity: bytes, bye: Bye) -> None:
        client = self._clients.get(identity)
        if client is None or bye.epoch != self.epoch:
            return
        if self.sessions[identity].inbox.seen >= bye.sent:
            self._drop(identity, "")
        else:  # until the next tick, for what is on its way
            client.leaving = True

    def _put(self, outputs: Mapping[bytes, StepTokens], load: tuple[int, int, int]) -> None:
        for identity, output in outputs.items():
            client = self._clients.get(identity)
            if client is None:
                self._input_queue.put(ClientGone(identity))  # its requests outlived it: it left while they were queued
                continue
            client.put(output, load)
            self._mark(identity, client)

    def _put_result(
        self, identity: bytes, call: int, value: Any, frames: Sequence[TensorFrame], error: WavecoreError | None
    ) -> None:
        client = self._clients.get(identity)
        if client is not None:
            client.put_result(call, value, frames, error, time.monotonic())
            self.sessions[identity].answered += 1
            self._mark(identity, client)

    def _mark(self, identity: bytes, client: ClientState) -> None:
        """There is something new to send."""
        if client.overflows:
            self._drop(identity, "more output waits for it than it may have")
        else:
            self._dirty.add(identity)

    def _drop(self, identity: bytes, reason: str) -> None:
        """Forget a client. Whoever handles ClientGone knows whether anything is lost by it, and tells."""
        log.debug("client %s is gone: %s", identity.hex()[:8], reason or "it left")
        del self._clients[identity], self.sessions[identity]
        self._dirty.discard(identity)
        self._input_queue.put(ClientGone(identity, reason))

    def _broadcast(self, frames: Frames) -> None:
        self._flush()
        for identity in self._clients:
            self._router.send(identity, frames)

    def _heartbeat(self, identity: bytes, seen: int, gap: bool) -> None:
        client = self._clients.get(identity)
        if client is None:
            return
        c = self._counters()
        beat = Heartbeat(
            self.epoch, client.last_number, seen, c.steps, c.running, c.waiting, c.tokens, time.monotonic(), gap
        )
        client.connected = self._router.send(identity, encode(beat)) is not Sent.NO_PEER

    def _tick(self) -> None:
        for identity, client in list(self._clients.items()):
            self._heartbeat(identity, self.sessions[identity].inbox.seen, gap=False)
            if client.leaving:
                self._drop(identity, "")
            elif reason := client.tick():
                self._drop(identity, reason)

    def _flush(self) -> None:
        for identity in self._dirty:
            client = self._clients[identity]
            while (frames := client.next_frames(time.monotonic())) is not None:
                if (sent := self._router.send(identity, frames)) is not Sent.YES:
                    client.connected = sent is not Sent.NO_PEER
                    break  # its next Ping tries again
                client.advance()
        self._dirty.clear()


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()[-MAX_LAST_WORDS:]
