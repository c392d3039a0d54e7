"""Who may connect to an engine: a bound socket in a context of its own and, for tcp, the authenticator of that context.

The authenticator starts before the socket is bound; while nobody answers libzmq's ZAP requests, no client is admitted.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils import z85

from wavecore.transport.curve import CurveServer
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.io_thread import IoThread, IoThreadFailed
from wavecore.transport.io.sockets import LINGER_MS, ZAP_DOMAIN, ZAP_ENDPOINT, endpoint_of, make_context, make_socket

logger = logging.getLogger(__name__)


class BoundSocket:
    """One bound socket. `socket` belongs to the thread that uses it; that thread calls `close`.

    Args:
        kind: zmq.PULL or zmq.ROUTER.
        address: where to bind; `self.address` is what was bound.
        on_failure: called when a bug ends the authenticator: nobody could connect any more.

    Raises:
        ConfigError: a bad address.
        ResourceError: the port is taken, or the process has no descriptor left.
        StartError: it cannot be bound for another reason.
    """

    def __init__(
        self, kind: int, address: str, curve: CurveServer | None, on_failure: Callable[[IoThreadFailed], object]
    ) -> None:
        self._context = make_context()
        self._authenticator = Authenticator(self._context, curve, on_failure) if curve is not None else None
        try:
            self.socket = make_socket(self._context, kind, address, curve=curve)
        except BaseException:
            self._release()
            raise
        self.address = endpoint_of(self.socket)

    def repair(self) -> None:
        """Bind again where the file of an ipc socket was removed; cheap, to be called now and then.

        The lost socket stays open beside the new one: whoever is connected through it goes on undisturbed.
        """
        if self.address.startswith("ipc:") and not os.path.lexists(self.address.removeprefix("ipc://")):
            with contextlib.suppress(zmq.ZMQError):  # the supervisor has yet to make the folder again
                self.socket.bind(self.address)

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self.socket.close(linger_ms)
        self._release()

    def _release(self) -> None:
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()


class Authenticator(IoThread):
    """The ZAP handler of one context: answers libzmq's question whether a client's key is in the allow-list."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        server: CurveServer,
        on_failure: Callable[[IoThreadFailed], object],
    ) -> None:
        super().__init__("authenticator", on_failure)
        self._server = server
        self._complaints = Complaints(logger)
        self._requests = make_socket(context, zmq.REP, ZAP_ENDPOINT)
        self._poller.register(self._requests, zmq.POLLIN)
        self.start()

    def _turn(self, ready: Mapping[Any, int]) -> None:
        if self._requests in ready:
            frames = self._requests.recv_multipart()
            status, text = self._check(frames)
            self._requests.send_multipart([b"1.0", frames[1], status, text, b"", b""])

    def _check(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        # version, request id, domain, peer address, identity, mechanism, credentials (here one raw public key)
        try:
            version, _, domain, peer, _, mechanism, key = frames
            known = z85.encode(key) in self._server.allowed()
            if (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE") and known:
                return b"200", b"OK"
            self._complaints.add("client refused, its key is not in the allow-list", peer.decode(errors="replace"))
        except Exception:  # a damaged allow-list admits nobody and must not end the thread
            logger.exception("refused a client: the allow-list could not be read")
        return b"400", b"unknown key"

    def _release(self) -> None:
        self._requests.close(0)
        super()._release()
