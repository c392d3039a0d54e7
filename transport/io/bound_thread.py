"""An IO thread of an engine: one socket, in a context of its own and, where it listens on tcp, with an authenticator.

The authenticator starts before the socket is bound; while nobody answers libzmq's ZAP requests, no client is admitted.
"""

import contextlib
import logging
import os

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.io.authenticator import Authenticator
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.io_thread import IoThread, OnFailure
from wavecore.transport.io.sockets import Curve, endpoint_of, make_context, make_socket

logger = logging.getLogger(__name__)


class BoundThread(IoThread):
    """The socket is bound (or connected) at once, and read when the thread was started.

    Args:
        name: of the thread.
        kind: zmq.PULL or zmq.ROUTER; zmq.DEALER connects.
        address: where to bind; `self.endpoint` is what was bound.
        curve: keys, for tcp.
        on_failure: called when a bug ends the thread, or the authenticator: nobody could connect any more.
        identity: of a DEALER.

    Raises:
        ConfigError: a bad address.
        ResourceError: the port is taken, or the process has no descriptor left.
        StartError: it cannot be bound for another reason.
    """

    tick_seconds = 1.0

    def __init__(
        self,
        name: str,
        kind: int,
        address: str,
        curve: Curve | None,
        on_failure: OnFailure,
        identity: bytes | None = None,
    ) -> None:
        super().__init__(name, on_failure)
        self._complaints = Complaints(logger)
        try:
            context = make_context()
            self._owned.callback(context.term)
            if isinstance(curve, CurveServer):
                self._owned.callback(Authenticator(context, curve, on_failure).close)
            self._socket = make_socket(context, kind, address, identity=identity, curve=curve)
            self._owned.callback(self._socket.close)
        except BaseException:
            self._release()
            raise
        self._poller.register(self._socket, zmq.POLLIN)
        self.endpoint = endpoint_of(self._socket)

    def _tick(self) -> None:
        """Bind again where the file of an ipc socket was removed.

        The lost socket stays open beside the new one: whoever is connected through it goes on undisturbed.
        """
        if self.endpoint.startswith("ipc:") and not os.path.lexists(self.endpoint.removeprefix("ipc://")):
            with contextlib.suppress(zmq.ZMQError):  # the supervisor has yet to make the folder again
                self._socket.bind(self.endpoint)
