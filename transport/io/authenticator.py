"""A bound socket with its own context and, for tcp, its gatekeeper. Used by the pumps of an engine.

Without a ZAP handler libzmq admits any client key, so a tcp endpoint starts one first and then proves, before it says
that it is there, that a wrong key is refused and the right one is not.
"""

from __future__ import annotations

import logging
import threading
import time

import zmq
from zmq.utils import z85

from wavecore.transport.curve import CurveClient, CurveServer, KeyPair
from wavecore.transport.errors import StartError
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.sockets import (
    LINGER_MS,
    ZAP_DOMAIN,
    ZAP_ENDPOINT,
    Monitor,
    endpoint_of,
    make_context,
    make_socket,
)
from wavecore.transport.waker import Waker

SELF_TEST_SECONDS = 20.0

log = logging.getLogger(__name__)


class Endpoint:
    """One bound socket. `socket` belongs to the thread that uses it; that thread calls `close`.

    Args:
        kind: zmq.PULL or zmq.ROUTER.
        address: where to bind; `self.address` is what was bound.

    Raises:
        ConfigError: a bad address.
        ResourceError: the port is taken, or the process has no descriptor left.
        StartError: it cannot be bound for another reason, or the CURVE self-test failed.
    """

    def __init__(self, kind: int, address: str, curve: CurveServer | None) -> None:
        self._context = make_context()
        self._gatekeeper = Gatekeeper(self._context, curve) if curve is not None else None
        try:
            self.socket = make_socket(self._context, kind, address, curve=curve)
        except BaseException:
            self._release()
            raise
        self.address = endpoint_of(self.socket)
        try:
            if self._gatekeeper is not None:
                self._gatekeeper.prove(self.address, zmq.PUSH if kind == zmq.PULL else zmq.DEALER)
        except BaseException:
            self.close(0)
            raise

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self.socket.close(linger_ms)
        self._release()

    def _release(self) -> None:
        if self._gatekeeper is not None:
            self._gatekeeper.close()
        self._context.term()


class Gatekeeper:
    """The ZAP handler of one context: a thread that answers libzmq's question "may this key enter?"."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: CurveServer) -> None:
        self._server = server
        self._stranger = KeyPair.generate()
        self._complaints = Complaints(log)
        self._waker = Waker()
        self._questions = make_socket(context, zmq.REP, ZAP_ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="gatekeeper", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._questions, zmq.POLLIN)
        poller.register(self._waker.fd, zmq.POLLIN)
        while self._waker.fd not in dict(poller.poll()):
            frames = self._questions.recv_multipart()
            status, text = self._judge(frames)
            self._questions.send_multipart([b"1.0", frames[1], status, text, b"", b""])
        self._questions.close(0)

    def _judge(self, frames: list[bytes]) -> tuple[bytes, bytes]:
        # version, request id, domain, peer address, identity, mechanism, credentials (here one raw public key)
        try:
            version, _, domain, peer, _, mechanism, key = frames
            public = z85.encode(key)
            known = public in self._server.allowed()
            if (version, domain, mechanism) == (b"1.0", ZAP_DOMAIN, b"CURVE") and known:
                return b"200", b"OK"
            if public != self._stranger.public:
                self._complaints.add("client refused, its key is not in the allow-list", peer.decode(errors="replace"))
        except Exception:  # a damaged allow-list admits nobody and must not end the thread
            log.exception("refused a client: the allow-list could not be read")
        return b"400", b"unknown key"

    def prove(self, address: str, kind: int) -> None:
        """Raise StartError unless a wrong key is refused there and the deployment's client key is not."""
        good = KeyPair.load(self._server.keys_dir / "client.key")
        for name, pair, expected in (("a wrong", self._stranger, False), ("the client's", good, True)):
            admitted = _knock(address, kind, CurveClient(self._server.pair.public, pair))
            if admitted is not expected:
                said = {True: "was admitted", False: "was refused", None: "got no answer"}[admitted]
                raise StartError(f"CURVE self-test of {address}: {name} key {said}; not serving")

    def close(self) -> None:
        self._waker.wake()
        self._thread.join()
        self._waker.close()


def _knock(address: str, kind: int, client: CurveClient) -> bool | None:
    """Whether a client with these keys is admitted; None without an answer in time."""
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
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:  # a mere disconnect is no verdict: libzmq tries again
                    return False
        return None
    finally:
        monitor.close()
        socket.close(0)
        context.term()
