"""The engine's input thread: one PULL for all clients. It never stops reading, so no ABORT is stuck behind an ADD.

Decodes, checks, takes each numbered message once, turns an ADD into a request (`admit`, given from above: validation
and hashing happen here, beside the step, not in it) and queues it for the main loop. A bad frame is answered when it
says whose it is, else dropped, counted and logged; nothing that a peer sends can end the thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import Overloaded, ProtocolError, WavecoreError
from wavecore.transport.io.authenticator import Endpoint
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.output_pump import OutputPump, PumpFailed, UpStream
from wavecore.transport.waker import Waker
from wavecore.transport.wire.codec import decode, total_bytes
from wavecore.transport.wire.messages import U32, Abort, Add, FinishReason, Utility
from wavecore.transport.wire.step_tokens import finish_rows

MAX_QUEUED = 10_000  # items that wait for the main loop
MAX_CHOICES = 1024  # of a refused ADD that are answered; a larger `n` is nonsense

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AddIn:
    """In the input queue: a new request, as `admit` made it."""

    client: bytes
    handle: int
    request: object


@dataclass(frozen=True, slots=True)
class AbortIn:
    """In the input queue: end these requests of this client, where they still run."""

    client: bytes
    handles: U32


@dataclass(frozen=True, slots=True)
class UtilityIn:
    """In the input queue: call a named method; answer with `OutputPump.put_result`."""

    client: bytes
    call: int
    method: str
    args: dict[str, Any]


class InputPump:
    """Owns the PULL. `stop` may be called by any thread; `run` is the thread.

    Args:
        address: where to bind; `endpoint` is what was bound.
        output: where refusals and acknowledgements go; holds the sessions.
        admit: turns an ADD into a request or raises WavecoreError, which becomes the request's end.
        input_queue: gets AddIn, AbortIn, UtilityIn, PumpFailed.

    Raises:
        ConfigError, ResourceError, StartError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str,
        output: OutputPump,
        *,
        admit: Callable[[Add], object],
        input_queue: SimpleQueue[Any],
        curve: CurveServer | None = None,
    ) -> None:
        self._output = output
        self._admit = admit
        self._input_queue = input_queue
        self._complaints = Complaints(log)
        self._stopping = False
        self._endpoint = Endpoint(zmq.PULL, address, curve)
        self._pull = self._endpoint.socket
        self.endpoint = self._endpoint.address
        self._waker = Waker()

    def stop(self) -> None:
        self._stopping = True
        self._waker.wake()

    def close(self) -> None:
        """Give everything back, if `run` is never called."""
        self._endpoint.close(0)
        self._waker.close()

    def run(self) -> None:
        try:
            poller = zmq.Poller()
            poller.register(self._pull, zmq.POLLIN)
            poller.register(self._waker.fd, zmq.POLLIN)
            while not self._stopping:
                poller.poll()
                self._receive()
        except BaseException as error:
            log.exception("input thread failed")
            self._input_queue.put(PumpFailed("input thread", error))
        finally:
            self._endpoint.close(0)
            self._waker.close()

    def _receive(self) -> None:
        while not self._stopping:
            try:
                frames = [frame.buffer for frame in self._pull.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                return
            try:
                message = decode(frames)
                if not isinstance(message, Add | Abort | Utility):
                    raise ProtocolError(f"{type(message).__name__} on the input socket")
                session = self._take(message.epoch, message.client, message.number, total_bytes(frames))
                if session is not None:
                    self._queue(message, session)
            except ProtocolError as error:
                self._complaints.add("bad frame on the input socket", error)
                self._answer(error, total_bytes(frames))

    def _take(self, epoch: bytes, client: bytes, number: int, size: int) -> UpStream | None:
        """The session, if it lives and this is its next message, which then counts as received."""
        session = self._output.sessions.get(client)
        if session is None or epoch != self._output.epoch:
            self._complaints.excuse("message of another life or of no session", client)
            return None
        if self._input_queue.qsize() >= MAX_QUEUED:
            # Not received: the sender keeps it and sends it again. Admission and the bound on calls keep ordinary
            # clients far from here.
            self._complaints.add("the main loop lags behind its input", f"{MAX_QUEUED} items wait")
            return None
        inbox = session.inbox
        accepted = inbox.accept(number, size)
        if inbox.report_due:
            self._output.nudge(client, *inbox.report())
        return session if accepted else None

    def _queue(self, message: Add | Abort | Utility, session: UpStream) -> None:
        if isinstance(message, Abort):
            self._input_queue.put(AbortIn(message.client, message.handles))
        elif isinstance(message, Utility):
            full = session.full
            session.asked += 1
            if full:
                error = Overloaded(f"{session.max_calls} calls wait for their answer: call again when some have come")
                self._output.put_result(message.client, message.call, error=error)
            else:
                self._input_queue.put(UtilityIn(message.client, message.call, message.method, message.args))
        else:
            try:
                request = self._admit(message)
            except WavecoreError as error:
                self._refuse(message.client, message.handle, message.params, error)
            except Exception as error:
                log.exception("a request could not be taken in")
                text = f"{type(error).__name__} while the request was taken in; the engine's log has the details"
                self._refuse(message.client, message.handle, message.params, WavecoreError(text))
            else:
                self._input_queue.put(AddIn(message.client, message.handle, request))

    def _refuse(self, client: bytes, handle: int, params: dict[str, Any], error: WavecoreError) -> None:
        choices = params.get("n", 1)  # not validated: that may be why it is refused
        count = choices if type(choices) is int and 1 <= choices <= MAX_CHOICES else 1
        handles = [(handle + i) & 0xFFFFFFFF for i in range(count)]
        self._output.put({client: finish_rows(handles, FinishReason.ERROR, error.code, str(error))})

    def _answer(self, error: ProtocolError, size: int) -> None:
        """A frame of a living session that went wrong after its head: it counts as received, and its sender hears."""
        cls, values = error.partial or (None, {})
        if cls not in (Add, Abort, Utility) or "number" not in values:
            return
        client = values["client"]
        session = self._take(values["epoch"], client, values["number"], size)
        if session is None:
            return
        if cls is Add and "handle" in values:
            self._refuse(client, values["handle"], values.get("params", {}), error)
        elif cls is Utility and "call" in values:
            session.asked += 1
            self._output.put_result(client, values["call"], error=error)
