"""A way to a socket that lets a number of bytes a second through, and may end its connections."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable

CHUNK = 16 << 10


class SlowLink:
    """Forwards connections to an endpoint of this host, each direction of each by itself.

    Args:
        target: where to, "ipc://PATH" or "tcp://HOST:PORT".
        address: where to listen, likewise; port 0 is any that is free.
        rate: bytes a second.
        cut_after: how many bytes of either direction end a new connection.

    Attributes:
        address: what was bound.
        sent: bytes that went to the target.
    """

    def __init__(
        self, target: str, address: str, rate: float, cut_after: Callable[[], float] = lambda: math.inf
    ) -> None:
        self._target, self._rate, self._cut_after = target, rate, cut_after
        self._server, place = _socket(address)
        self._server.bind(place)
        self._server.listen()
        bound = self._server.getsockname()
        self.address = f"tcp://{bound[0]}:{bound[1]}" if isinstance(bound, tuple) else address
        self.sent = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far, place = _socket(self._target)
                try:
                    far.connect(place)
                except OSError:
                    near.close()
                    continue
                most = self._cut_after()
                for source, sink, up in ((near, far, True), (far, near, False)):
                    threading.Thread(target=self._copy, args=(source, sink, up, most), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, up: bool, most: float) -> None:
        free_at = time.monotonic()
        with contextlib.suppress(OSError):
            while most > 0 and (data := source.recv(CHUNK)):
                most -= len(data)
                free_at = max(free_at, time.monotonic()) + len(data) / self._rate
                time.sleep(max(0.0, free_at - time.monotonic()))
                sink.sendall(data)
                self.sent += len(data) if up else 0
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _socket(endpoint: str) -> tuple[socket.socket, str | tuple[str, int]]:
    """An unbound socket of the endpoint's kind, and the endpoint in the form that its calls take."""
    if endpoint.startswith("ipc://"):
        return socket.socket(socket.AF_UNIX), endpoint.removeprefix("ipc://")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.socket(), (host, int(port))
