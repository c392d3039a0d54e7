"""Who may connect to an engine over tcp: those whose key is in the allow-list."""

import logging
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils import z85

from wavecore.transport.curve import CurveServer
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.io_thread import IoThread, OnFailure
from wavecore.transport.io.sockets import ZAP_DOMAIN, ZAP_ENDPOINT, Context, make_socket

logger = logging.getLogger(__name__)


class Authenticator(IoThread):
    """The ZAP handler of one context: answers libzmq's question whether a client's key is in the allow-list."""

    def __init__(self, context: Context, server: CurveServer, on_failure: OnFailure) -> None:
        super().__init__("authenticator", on_failure)
        self._server = server
        self._complaints = Complaints(logger)
        self._requests = make_socket(context, zmq.REP, ZAP_ENDPOINT)
        self._owned.callback(self._requests.close, 0)
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
