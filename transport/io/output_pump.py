"""The engine's output thread: owns one ROUTER to all clients, and a `ClientStream` for each of them.

The main loop hands over what it produced and goes on: its "output queue" is a deque of calls that this thread makes.
Here output is numbered, kept until it is acknowledged, and merged while a slow client has no room for it. No client can
slow another or grow without a bound:

    put -> waiting (merged) -> outbox (numbered, bounded window) -> ROUTER -> client
                                  ^--- Ping(seen) ---------------------'

Time is counted in ticks of this thread, not by the clock: after the engine itself was suspended for a while, it does
not take the silence for the clients'.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import Overloaded, ProtocolError, WavecoreError
from wavecore.transport.headroom import descriptors
from wavecore.transport.io.bound_thread import BoundThread
from wavecore.transport.io.client_stream import ClientInput, ClientLimits, ClientStream
from wavecore.transport.wire import messages
from wavecore.transport.wire.codec import Frames, decode, encode

MAX_LAST_WORDS = 65_536  # characters; of a longer text the end counts
MAX_CALLS = 1000  # handed over and not looked at: a thread that outruns this one waits for it
KEPT_DESCRIPTORS = 256  # free ones, for clients that are refused and for files; a quarter of a small limit
BATCH = 1000  # messages received before the outputs get their turn

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientGone:
    """In the input queue: abort every request of this client. May come more than once.

    Attributes:
        reason: why it was dropped; empty where it left by itself.
    """

    client_id: bytes
    reason: str = ""


class OutputPump(BoundThread):
    """Owns the ROUTER. `put*` and `report_received` may be called by any thread.

    Args:
        address: where to bind; `endpoint` is what was bound.
        epoch: 16 random bytes that name this life of the engine.
        resolved: told to every client in READY.
        load: what a client is told of how busy the engine is; asked at every heartbeat and output, in this thread.
        input_queue: gets ClientGone and IoThreadFailed, and an Abort of requests whose output cannot travel.
        curve: keys, for tcp.

    Raises:
        ConfigError, ResourceError, StartError: the address cannot be bound.
    """

    flush_seconds = 2.0

    def __init__(
        self,
        address: str,
        *,
        epoch: bytes,
        resolved: dict[str, Any],
        load: Callable[[bytes], messages.Load],
        input_queue: SimpleQueue[Any],
        curve: CurveServer | None = None,
        limits: ClientLimits | None = None,
    ) -> None:
        super().__init__("output thread", zmq.ROUTER, address, curve, input_queue.put)
        self._epoch = epoch
        self._ready = encode(messages.Ready(epoch, resolved))
        self._load = load
        self._input_queue = input_queue
        self._limits = limits or ClientLimits()
        self._streams: dict[bytes, ClientStream] = {}
        self._dirty: set[bytes] = set()  # clients with something new to send
        self._drained = threading.Event()

    def find(self, client_id: bytes, epoch: bytes) -> ClientInput | None:
        """What this client sends in this life of the engine; None: no session of it, or another life.

        The input thread looks up here, and counts as received, while the output thread alone adds and removes clients:
        it hears their HELLO, their BYE and their silence. No lock is needed: a look-up in a dict is atomic, every
        number has one thread that writes it, and one that is a moment old does no harm. A client may be removed while
        the input thread handles a message of it; what that queues for the main loop is ended there as soon as its
        first output finds no client.
        """
        stream = self._streams.get(client_id)
        return stream.input if stream is not None and epoch == self._epoch else None

    def held_bytes(self, client_id: bytes) -> int:
        """Of output that a client has not acknowledged. A number that is a moment old, for any thread."""
        stream = self._streams.get(client_id)
        return stream.held_bytes if stream is not None else 0

    def put(self, outputs: Mapping[bytes, messages.StepTokens]) -> None:
        """Output of one step, by client_id. The arrays must not be written to afterwards."""
        self._hand_over(lambda: self._put(outputs))

    def put_result(
        self,
        client_id: bytes,
        call: int,
        value: Any = None,
        frames: Sequence[messages.TensorFrame] = (),
        error: WavecoreError | None = None,
    ) -> None:
        """Answer a utility call."""
        code, text = (error.code, _sendable(str(error))) if error else ("", "")
        result = messages.Result(self._epoch, 0, call, code, text, value, tuple(frames))
        self._hand_over(lambda: self._put_result(client_id, result))

    def put_dead(self, code: str, message: str, phase: str) -> None:
        """Last words, to every client."""
        frames = encode(messages.Dead(self._epoch, code, _sendable(message), phase))
        self._call_soon(lambda: self._broadcast(frames))

    def report_received(self, client_id: bytes, seen: int, gap: bool, attempt: int) -> None:
        """Tell a client now, not at the next heartbeat, how far its messages were received."""
        self._hand_over(lambda: self._heartbeat(client_id, seen, gap, attempt))

    def _hand_over(self, call: Callable[[], object]) -> None:
        """Have it called by the thread; wait while that is far behind."""
        while len(self._calls) >= MAX_CALLS and self._thread.is_alive():
            self._drained.clear()
            self._drained.wait(0.1)  # it may have drained between the check and the clear
        self._call_soon(call)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _turn(self, ready: Mapping[Any, int]) -> None:
        self._drained.set()
        if self._socket in ready:
            self._receive()
        self._flush()

    def _tick(self) -> None:
        super()._tick()
        for client_id, stream in list(self._streams.items()):
            self._heartbeat(client_id, stream.input.inbox.seen)
            if reason := stream.tick():
                self._drop(client_id, reason)

    def _is_flushed(self) -> bool:
        return not any(stream.has_output and stream.connected for stream in self._streams.values())

    def _receive(self) -> None:
        """Must be called regularly: a ROUTER that only sends never takes a reconnected client back."""
        for _ in range(BATCH):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                if len(identity.bytes) != 16:
                    raise ProtocolError("a client_id must be 16 bytes")
                self._handle(identity.bytes, decode([frame.buffer for frame in frames]))
            except ProtocolError as error:
                self._complaints.add("bad frame on the output socket", error)

    def _handle(self, client_id: bytes, message: messages.Message) -> None:
        if isinstance(message, messages.Hello):
            self._hello(client_id)
        elif isinstance(message, messages.Ping):
            self._ping(client_id, message)
        elif isinstance(message, messages.Bye):
            if client_id in self._streams and message.epoch == self._epoch:
                self._drop(client_id, "")
        else:
            raise ProtocolError(f"{type(message).__name__} on the output socket")

    def _hello(self, client_id: bytes) -> None:
        if client_id not in self._streams:
            # libzmq ends the process when a connection finds no descriptor. Each takes two, one until it is taken here.
            free, limit = descriptors()
            if len(self._streams) >= self._limits.clients or free < min(KEPT_DESCRIPTORS, limit // 4):
                count, most = len(self._streams), self._limits.clients
                text = (
                    f"{count} clients are attached, no more are taken (at most {most}, and {free} of the engine's "
                    f"{limit} file descriptors are free): close some, start more engines, or "
                    "raise the hard limit (`ulimit -Hn`) where the engine is started"
                )
                self._complaints.add("too many clients", text)
                self._send(client_id, encode(messages.Dead(self._epoch, Overloaded.code, text, "connect")))
                return
            self._streams[client_id] = ClientStream(self._epoch, client_id, self._limits, self._input_queue.put)
        self._streams[client_id].heard()
        self._send(client_id, self._ready)

    def _ping(self, client_id: bytes, ping: messages.Ping) -> None:
        stream = self._streams.get(client_id)
        if stream is None or ping.epoch != self._epoch:
            self._send(client_id, encode(messages.UnknownClient(self._epoch)))
            return
        stream.heard()
        self._dirty.add(client_id)
        stream.acknowledge(ping.seen, ping.gap, ping.attempt)

    def _put(self, outputs: Mapping[bytes, messages.StepTokens]) -> None:
        for client_id, output in outputs.items():
            stream = self._streams.get(client_id)
            if stream is None:  # its requests outlived it: it left while they were queued
                self._input_queue.put(ClientGone(client_id))
                continue
            stream.put(output, self._load(client_id))
            self._mark(client_id, stream)

    def _put_result(self, client_id: bytes, result: messages.Result) -> None:
        stream = self._streams.get(client_id)
        if stream is not None:
            stream.put_result(result)
            stream.input.answered += 1
            self._mark(client_id, stream)

    def _mark(self, client_id: bytes, stream: ClientStream) -> None:
        """There is something new to send."""
        if stream.overflows:
            self._drop(client_id, "more output waits for it than it may have")
        else:
            self._dirty.add(client_id)

    def _drop(self, client_id: bytes, reason: str) -> None:
        """Forget a client. Whoever handles ClientGone knows whether anything is lost by it, and tells."""
        logger.debug("client %s is gone: %s", client_id.hex()[:8], reason or "it left")
        del self._streams[client_id]
        self._dirty.discard(client_id)
        self._input_queue.put(ClientGone(client_id, reason))

    def _broadcast(self, frames: Frames) -> None:
        self._flush()
        for client_id in self._streams:
            self._send(client_id, frames)

    def _heartbeat(self, client_id: bytes, seen: int, gap: bool = False, attempt: int = 0) -> None:
        if client_id in self._streams:
            self._send(client_id, encode(messages.Heartbeat(self._epoch, seen, self._load(client_id), gap, attempt)))

    def _flush(self) -> None:
        for client_id in self._dirty:
            stream = self._streams[client_id]
            while (frames := stream.next_frames()) is not None and self._send(client_id, frames):
                stream.advance()  # where that ends early, the client's next Ping tries again
        self._dirty.clear()

    def _send(self, client_id: bytes, frames: Frames) -> bool:
        """Hand a message to a client's pipe; never blocks, so that no client can stop another.

        Returns:
            Whether it was taken: the pipe may be full, or the client not connected.
        """
        error = 0
        try:
            self._socket.send_multipart([client_id, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as caught:
            if caught.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            error = caught.errno
        if (stream := self._streams.get(client_id)) is not None:
            stream.connected = error != zmq.EHOSTUNREACH
        return not error


def _sendable(text: str) -> str:
    return text.encode(errors="replace").decode()[-MAX_LAST_WORDS:]
