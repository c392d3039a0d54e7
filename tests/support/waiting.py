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
    return free_ports(2)


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    while True:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            for behind in range(1, count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port + behind))
            return port
