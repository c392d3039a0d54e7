"""The engine's input thread: owns one PULL for all clients, and reads on whatever the main loop does.

Decodes, checks, takes each numbered message once, turns an ADD into a request (`admit`, given from above: validation
and hashing happen here, beside the step, not in it) and queues it for the main loop. A bad frame is answered when it
says whose it is, else dropped, counted and logged; nothing that a peer sends can end the thread. So no ABORT is stuck
behind an ADD. The one thing it may wait for is the output thread, when 1,000 calls are queued there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, Protocol

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import Overloaded, ProtocolError, WavecoreError
from wavecore.transport.io.authenticator import BoundSocket
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.io_thread import IoThread
from wavecore.transport.io.sessions import ClientInput, Sessions
from wavecore.transport.wire.codec import Buffer, decode, total_bytes
from wavecore.transport.wire.messages import Abort, Add, FinishReason, Mark, Piece, StepTokens, Utility
from wavecore.transport.wire.step_tokens import finish_rows

MAX_QUEUED = 10_000  # items that wait for the main loop
MAX_CHOICES = 1024  # of a refused ADD that are answered; a larger `n` is nonsense

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """What this thread needs of the output thread; see OutputPump."""

    @property
    def sessions(self) -> Sessions: ...
    def put(self, outputs: Mapping[bytes, StepTokens]) -> None: ...
    def put_result(self, client_id: bytes, call: int, *, error: WavecoreError) -> None: ...
    def report_received(self, client_id: bytes, seen: int, gap: bool, attempt: int) -> None: ...


class InputPump(IoThread):
    """Owns the PULL.

    Args:
        address: where to bind; `endpoint` is what was bound.
        output: where refusals and acknowledgements go.
        admit: turns an ADD into a request or raises WavecoreError, which becomes the request's end.
        input_queue: gets what `admit` returns, Abort and Utility as they came, and IoThreadFailed.

    Raises:
        ConfigError, ResourceError, StartError: the address cannot be bound.
    """

    tick_seconds = 1.0

    def __init__(
        self,
        address: str,
        output: Answers,
        *,
        admit: Callable[[Add], object],
        input_queue: SimpleQueue[Any],
        curve: CurveServer | None = None,
    ) -> None:
        bound = BoundSocket(zmq.PULL, address, curve, input_queue.put)
        super().__init__("input thread", input_queue.put)
        self._bound, self._pull, self.endpoint = bound, bound.socket, bound.address
        self._poller.register(self._pull, zmq.POLLIN)
        self._output = output
        self._admit = admit
        self._input_queue = input_queue
        self._complaints = Complaints(logger)

    def _tick(self) -> None:
        self._bound.repair()

    def _release(self) -> None:
        self._bound.close(0)
        super()._release()

    def _turn(self, ready: Mapping[Any, int]) -> None:
        while self._pull in ready and not self._is_ending:
            try:
                frames = [frame.buffer for frame in self._pull.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            self._receive(frames)

    def _receive(self, frames: Sequence[Buffer], joined: ClientInput | None = None) -> None:
        """Handle a message; `joined` is who sent it in pieces, which count as received."""
        size = total_bytes(frames)
        try:
            message = decode(frames)
            if isinstance(message, Mark) and joined is None:
                if (client := self._find(message.client_id, message.epoch)) is not None:
                    client.inbox.mark(message.sent, message.attempt)
                    self._report(message.client_id, client)
            elif not isinstance(message, Add | Abort | Utility | Piece) or (isinstance(message, Piece) and joined):
                raise ProtocolError(f"{type(message).__name__} on the input socket")
            elif (client := self._take(message.client_id, message.epoch, message.number, size, joined)) is None:
                return
            elif not isinstance(message, Piece):
                self._queue(message, client)
            elif (whole := client.inbox.join(message)) is not None:
                self._receive(whole, client)
        except ProtocolError as error:
            self._complaints.add("bad frame on the input socket", error)
            self._answer(error, size, joined)

    def _find(self, client_id: bytes, epoch: bytes) -> ClientInput | None:
        client = self._output.sessions.find(client_id, epoch)
        if client is None:
            # Normal after a restart: a peer sends what it has in flight before it hears that this is another life.
            self._complaints.add("message of another life or of an unknown client", client_id.hex(), logging.DEBUG)
        return client

    def _take(
        self, client_id: bytes, epoch: bytes, number: int, size: int, joined: ClientInput | None
    ) -> ClientInput | None:
        """The sender, if it is known and this is its next message, which then counts as received."""
        client = self._find(client_id, epoch)
        if client is None or joined is not None:
            return client if client is joined else None
        if self._input_queue.qsize() >= MAX_QUEUED:
            # Not received: the sender keeps it and sends it again. Admission and the bound on calls keep ordinary
            # clients far from here.
            self._complaints.add("the main loop lags behind its input", f"{MAX_QUEUED} items wait")
            return None
        accepted = client.inbox.accept(number, size)
        self._report(client_id, client)
        return client if accepted else None

    def _report(self, client_id: bytes, client: ClientInput) -> None:
        if client.inbox.report_due:
            self._output.report_received(client_id, *client.inbox.report())

    def _queue(self, message: Add | Abort | Utility, client: ClientInput) -> None:
        if isinstance(message, Add):
            try:
                self._input_queue.put(self._admit(message))
            except WavecoreError as error:
                self._refuse(message.client_id, message.handle, message.params, error)
            except Exception as error:
                logger.exception("a request could not be taken in")
                text = f"{type(error).__name__} while the request was taken in; the engine's log has the details"
                self._refuse(message.client_id, message.handle, message.params, WavecoreError(text))
        elif isinstance(message, Utility) and not client.count_call():
            text = f"{client.max_calls} calls wait for their answer: call again when some have come"
            self._output.put_result(message.client_id, message.call, error=Overloaded(text))
        else:
            self._input_queue.put(message)

    def _refuse(self, client_id: bytes, handle: int, params: dict[str, Any], error: WavecoreError) -> None:
        choices = params.get("n", 1)  # not validated: that may be why it is refused
        count = choices if type(choices) is int and 1 <= choices <= MAX_CHOICES else 1
        handles = [(handle + i) & 0xFFFFFFFF for i in range(count)]
        self._output.put({client_id: finish_rows(handles, FinishReason.ERROR, error.code, str(error))})

    def _answer(self, error: ProtocolError, size: int, joined: ClientInput | None) -> None:
        """A frame of a known client that went wrong after its head: it counts as received, and its sender hears."""
        cls, values = error.partial or (None, {})
        if cls not in (Add, Abort, Utility, Piece) or "number" not in values:
            return
        client_id = values["client_id"]
        client = self._take(client_id, values["epoch"], values["number"], size, joined)
        if client is None:
            return
        if cls is Add and "handle" in values:
            self._refuse(client_id, values["handle"], values.get("params", {}), error)
        elif cls is Utility and "call" in values:
            client.count_call()
            self._output.put_result(client_id, values["call"], error=error)
