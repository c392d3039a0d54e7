"""What one value in a message may be. Each check returns the value or raises ProtocolError; used in both directions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from wavecore.transport.errors import ProtocolError

MAX_DEPTH = 16
MAX_TEXT = 1 << 20


def whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"must be a whole number from {low} to {high}, not {value!r:.40}")
        return value

    return check


def bytes16(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 16:
        raise ProtocolError(f"must be 16 bytes, not {value!r:.40}")
    return value


def text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ProtocolError(f"must be text of at most {MAX_TEXT} characters, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError("must be text without lone surrogates") from None
    return value


def flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"must be true or false, not {value!r:.40}")
    return value


def real(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError(f"must be a finite float, not {value!r:.40}")
    return value


def plain(value: Any, depth: int = 0) -> Any:
    """Any tree of None, bool, int, float, str, bytes, list, tuple (arrives as list) and dict with str or int keys."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise ProtocolError(f"nested deeper than {MAX_DEPTH}")
    if kind is dict:
        for key, item in value.items():
            if type(key) is str:
                text(key)
            else:
                INT64(key)
            plain(item, depth + 1)
    elif kind is list or kind is tuple:
        for item in value:
            plain(item, depth + 1)
    elif kind is int:
        INT64(value)
    elif kind is str:
        text(value)
    elif not (kind in (bool, float, bytes) or value is None):
        raise ProtocolError(f"a value of {kind.__module__}.{kind.__qualname__} cannot travel: make it a plain one")
    return value


def table(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ProtocolError(f"must be a map with text keys, not {type(value).__name__}")
    plain(value)
    return value


INT64 = whole(-(1 << 63), (1 << 64) - 1)  # what msgpack can carry
UINT64 = whole(0, (1 << 64) - 1)
