"""The engine's input thread: owns one PULL for all clients, and reads on whatever the main loop does.

Decodes, checks, takes each numbered message once, turns an ADD into a request (`admit`, given from above: validation
and hashing happen here, beside the step, not in it) and queues it for the main loop. A bad frame is answered when it
says whose it is, else dropped, counted and logged; nothing that a peer sends can end the thread. So no ABORT is stuck
behind an ADD. The one thing it may wait for is the output thread, when 1,000 calls are queued there.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import Overloaded, ProtocolError, WavecoreError
from wavecore.transport.io.bound_thread import BoundThread
from wavecore.transport.io.client_stream import ClientInput
from wavecore.transport.io.output_pump import OutputPump
from wavecore.transport.wire.codec import Buffer, decode, total_bytes
from wavecore.transport.wire.messages import Add, FinishReason, Mark, Piece, Up, Utility
from wavecore.transport.wire.step_tokens import finish_rows

MAX_QUEUED = 10_000  # items that wait for the main loop
MAX_CHOICES = 1024  # of a refused ADD that are answered; a larger `n` is nonsense
OF_STREAM = Up | Piece | Mark  # making it takes as long as looking a message up in it

logger = logging.getLogger(__name__)


class InputPump(BoundThread):
    """Owns the PULL.

    Args:
        address: where to bind; `endpoint` is what was bound.
        output: where refusals and acknowledgements go.
        admit: turns an ADD into a request or raises WavecoreError, which becomes the request's end.
        input_queue: gets what `admit` returns, Abort and Utility as they came, and IoThreadFailed.

    Attributes:
        busy: it has not seen the end of what came together yet.

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
        super().__init__("input thread", zmq.PULL, address, curve, input_queue.put)
        self._output = output
        self._admit = admit
        self._input_queue = input_queue
        self.busy = False

    def _turn(self, ready: Mapping[Any, int]) -> None:
        self.busy = self._socket in ready
        while self.busy and not self._is_ending:
            try:
                frames = [frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)]
            except zmq.Again:
                self.busy = False
            else:
                self._receive(frames)

    def _receive(self, frames: Sequence[Buffer]) -> None:
        size = total_bytes(frames)
        sender: ClientInput | None = None
        try:
            message = decode(frames)
            if not isinstance(message, OF_STREAM):
                raise ProtocolError(f"{type(message).__name__} on the input socket")
            sender = self._find(message.client_id, message.epoch)
            if sender is None:
                return
            try:
                whole = sender.inbox.take(message, size)
            finally:
                self._report(sender)
            if isinstance(whole, Up):
                self._queue(whole, sender)
        except ProtocolError as error:
            self._complaints.add("bad frame on the input socket", error)
            self._answer(error, size, sender)

    def _find(self, client_id: bytes, epoch: bytes) -> ClientInput | None:
        """The sender of a message, if it is known and its message can be taken now."""
        client = self._output.find(client_id, epoch)
        if client is None:
            # Normal after a restart: a peer sends what it has in flight before it hears that this is another life.
            self._complaints.add("message of another life or of an unknown client", client_id.hex(), logging.DEBUG)
        elif self._input_queue.qsize() >= MAX_QUEUED:
            # Not received: the sender keeps it and sends it again. Admission and the bound on calls keep ordinary
            # clients far from here.
            self._complaints.add("the main loop lags behind its input", f"{MAX_QUEUED} items wait")
            return None
        return client

    def _report(self, client: ClientInput) -> None:
        if client.inbox.report_due:
            self._output.report_received(client.client_id, *client.inbox.report())

    def _queue(self, message: Up, sender: ClientInput) -> None:
        if isinstance(message, Add):
            try:
                self._input_queue.put(self._admit(message))
            except WavecoreError as error:
                self._refuse(sender, message.handle, message.params, error)
            except Exception as error:
                logger.exception("a request could not be taken in")
                text = f"{type(error).__name__} while the request was taken in; the engine's log has the details"
                self._refuse(sender, message.handle, message.params, WavecoreError(text))
        elif isinstance(message, Utility) and not sender.count_call():
            text = f"{sender.max_calls} calls wait for their answer: call again when some have come"
            self._output.put_result(sender.client_id, message.call, error=Overloaded(text))
        else:
            self._input_queue.put(message)

    def _refuse(self, sender: ClientInput, handle: int, params: dict[str, Any], error: WavecoreError) -> None:
        choices = params.get("n", 1)  # not validated: that may be why it is refused
        count = choices if type(choices) is int and 1 <= choices <= MAX_CHOICES else 1
        handles = [(handle + i) & 0xFFFFFFFF for i in range(count)]
        self._output.put({sender.client_id: finish_rows(handles, FinishReason.ERROR, error.code, str(error))})

    def _answer(self, error: ProtocolError, size: int, sender: ClientInput | None) -> None:
        """A message of a known client that went wrong after its head counts as received, and its sender hears."""
        cls, values = error.partial or (None, {})
        if sender is None and {"number", "client_id"} <= values.keys():
            sender = self._find(values["client_id"], values["epoch"])
            if sender is None or not sender.inbox.accept(values["number"], size):
                return
            self._report(sender)
        if sender is None or values.get("client_id") != sender.client_id:
            return
        if cls is Add and "handle" in values:
            self._refuse(sender, values["handle"], values.get("params", {}), error)
        elif cls is Utility and "call" in values:
            sender.count_call()
            self._output.put_result(sender.client_id, values["call"], error=error)
