"""Waiting for what nobody announces, a state of another process or thread; and ports for what has to be announced."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from typing import Any


def until(check: Callable[[], Any], what: str = "it", *, seconds: float = 30.0) -> Any:
    """Poll until `check` returns something true, and return that; the deadline is for a machine under load."""
    deadline = time.monotonic() + seconds
    while not (value := check()):
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.01)
    return value


def two_free_ports() -> int:
    """The first of two in a row. Somebody may take them before they are used, but hardly within a second."""
    while True:
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError, OverflowError):
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            two.bind(("127.0.0.1", port + 1))
            return port
