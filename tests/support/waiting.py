"""Waiting for what nobody announces: a state of another process or thread."""

from __future__ import annotations

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
