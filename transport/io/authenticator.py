"""Who may connect to an engine: a bound socket in a context of its own and, for tcp, the authenticator of that context.

libzmq admits any client key while nobody answers its ZAP requests, so the authenticator starts before the socket is
bound, and before anybody hears of the address a self-test shows that a wrong key is refused and the right one is not.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import zmq
from zmq.utils import z85

from wavecore.transport.curve import CurveClient, CurveServer, KeyPair
from wavecore.transport.errors import StartError
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.io_thread import IoThread, IoThreadFailed
from wavecore.transport.io.sockets import (
    LINGER_MS,
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    Monitor,
    endpoint_of,
    make_context,
    make_socket,
)

SELF_TEST_SECONDS = 20.0

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
        StartError: it cannot be bound for another reason, or the self-test failed.
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
        try:
            if self._authenticator is not None:
                self._authenticator.self_test(self.address, zmq.PUSH if kind == zmq.PULL else zmq.DEALER)
        except BaseException:
            self.close(0)
            raise

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
        self._wrong = KeyPair.generate()  # for the self-test
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
            public = z85.encode(key)
            known = public in self._server.allowed()
            if (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE") and known:
                return b"200", b"OK"
            if public != self._wrong.public:
                self._complaints.add("client refused, its key is not in the allow-list", peer.decode(errors="replace"))
        except Exception:  # a damaged allow-list admits nobody and must not end the thread
            logger.exception("refused a client: the allow-list could not be read")
        return b"400", b"unknown key"

    def _release(self) -> None:
        self._requests.close(0)
        super()._release()

    def self_test(self, address: str, kind: int) -> None:
        """Raise StartError unless a wrong key is refused at `address` and the deployment's client key is not."""
        right = KeyPair.load(self._server.keys_dir / "client.key")
        for name, pair, expected in (("a wrong", self._wrong, False), ("the client's", right, True)):
            admitted = _is_admitted(address, kind, CurveClient(self._server.pair.public, pair))
            if admitted is not expected:
                said = {True: "was admitted", False: "was refused", None: "got no answer"}[admitted]
                raise StartError(f"CURVE self-test of {address}: {name} key {said}; not serving")


def _is_admitted(address: str, kind: int, client: CurveClient) -> bool | None:
    """Whether a client with these keys may connect; None without an answer in time."""
    context = make_context()
    socket = make_socket(context, kind, address, curve=client)
    monitor = Monitor(socket)
    try:
        deadline = time.monotonic() + SELF_TEST_SECONDS
        while (left := deadline - time.monotonic()) > 0:
            if monitor.channel.poll(int(left * 1000)):
                event = monitor.next()
                if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    return True
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # a mere disconnect says nothing: libzmq tries again
                    return False
        return None
    finally:
        monitor.close()
        socket.close(0)
        context.term()
