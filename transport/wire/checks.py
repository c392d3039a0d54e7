"""What one value from outside may be: one rule for each kind, for wire fields, requests, settings and config.json.

A `Checker` raises the error of the layer that made it. The functions behind it are the wire's own: they take a value
alone, since the codec says which field of which message it was, and serve both directions.
"""

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ProtocolError, ValidationError

MAX_DEPTH = 16
MAX_TEXT = 1 << 20
MAX_NUMBERS = 1 << 10
MAX_TOKEN_ID = (1 << 31) - 1
LEAST, MOST = -(1 << 63), (1 << 64) - 1  # of the whole numbers that msgpack can carry

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 80


def shown(value: Any) -> str:
    """A value in an error message: short, whatever its `repr` does, and however much it holds."""
    try:
        return _REPR.repr(value)[:80]
    except Exception:  # Python refuses to print whole numbers of more than 4,300 digits
        return f"such {type(value).__name__}"


class Checker:
    """Checks values and makes them plain. numpy's numbers and arrays are welcome where Python's are; a bool is none.

    Args:
        error: makes the exception to raise of the value's name and "must be ..., not ...".
    """

    __slots__ = ("error",)

    def __init__(self, error: Callable[[str, str], Exception]) -> None:
        self.error = error

    def whole(self, name: str, value: Any, low: int, high: int) -> int:
        if type(value) is int and low <= value <= high:
            return value
        if isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high:
            return int(value)
        raise self.error(name, f"must be a whole number from {low} to {high}, not {shown(value)}")

    def real(self, name: str, value: Any, low: float, high: float, above: bool = False) -> float:
        """A number from `low` to `high`, never NaN; with `above`, not `low` itself."""
        number = type(value) is float or (isinstance(value, Real) and not isinstance(value, bool))
        try:
            if number and low <= value <= high and not (above and value == low):
                return float(value)
        except OverflowError:  # a whole number beyond all floats
            pass
        span = f"above {low:g}" if above else f"of at least {low:g}"
        most = "" if high == math.inf else f" and at most {high:g}"
        raise self.error(name, f"must be a number {span}{most}, not {shown(value)}")

    def flag(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {shown(value)}")
        return value

    def text(self, name: str, value: Any, low: int, high: int, what: str = "") -> str:
        """A string of `low` to `high` characters; `what` it is begins the reason."""
        if not isinstance(value, str) or not low <= len(value) <= high:
            span = f"{low} to {high}" if low else f"at most {high}"
            raise self.error(name, f"{what}must be text of {span} characters, not {shown(value)}")
        if not _travels(value):
            raise self.error(name, f"{what}must be text without lone surrogates, not {shown(value)}")
        return value if type(value) is str else str.__str__(value)

    def path(self, name: str, value: Any) -> Path:
        try:
            if b"\0" not in os.fsencode(value) and value and not isinstance(value, bytes):
                return Path(value).expanduser()
        except (TypeError, UnicodeEncodeError, RuntimeError):  # RuntimeError: ~ of nobody known
            pass
        raise self.error(name, f"must be a path, not {shown(value)}")

    def one_of(self, name: str, value: Any, choices: Sequence[str]) -> str:
        if not isinstance(value, str) or value not in choices:
            raise self.error(name, f"must be one of {', '.join(choices)}, not {shown(value)}")
        return value

    def text_map(self, name: str, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(text, str) for pair in value.items() for text in pair):
            raise self.error(name, f"must be a mapping of texts, not {shown(value)}")
        return value

    def entries(self, name: str, values: Any, limit: int) -> list[Any]:
        """The entries of a list; its length is known before any entry is looked at."""
        try:
            count = -1 if isinstance(values, str | bytes | Mapping) else len(values)
            if 0 <= count <= limit:
                return list(values)
        except TypeError:
            count = -1
        found = f"{count} entries" if count >= 0 else shown(values)
        raise self.error(name, f"must be a list of at most {limit} entries, not {found}")

    def numbers(self, name: str, values: Any, low: int, high: int) -> list[int]:
        return [self.whole(name, value, low, high) for value in self.entries(name, values, MAX_NUMBERS)]

    def texts(self, name: str, values: Any, limit: int, longest: int) -> tuple[str, ...]:
        found = self.entries(name, values, limit)
        return tuple([self.text(name, value, 1, longest, "each entry ") for value in found])

    def token_ids(self, name: str, values: Any, limit: int) -> tuple[int, ...]:
        return tuple([self.whole(name, value, 0, MAX_TOKEN_ID) for value in self.entries(name, values, limit)])


ON_WIRE = Checker(lambda _, reason: ProtocolError(reason))
OF_REQUEST = Checker(ValidationError)


def _travels(text: str) -> bool:
    """Lone surrogates, which Python makes of bytes that are no text, have no UTF-8."""
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def bytes16(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 16:
        raise ProtocolError(f"must be 16 bytes, not {shown(value)}")
    return value


def text(value: Any) -> str:
    return ON_WIRE.text("", value, 0, MAX_TEXT)


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
                ON_WIRE.whole("", key, LEAST, MOST)
            plain(item, depth + 1)
    elif kind is list or kind is tuple:
        for item in value:
            plain(item, depth + 1)
    elif kind is int:
        ON_WIRE.whole("", value, LEAST, MOST)
    elif kind is str:
        text(value)
    elif not (kind in (bool, float, bytes) or value is None):
        raise ProtocolError(f"a value of {kind.__module__}.{kind.__qualname__} cannot travel: make it a plain one")
    return value


def table(value: Any) -> dict[str, Any]:
    if type(value) is not dict or set(map(type, value)) - {str}:
        raise ProtocolError(f"must be a map with text keys, not {type(value).__name__}")
    plain(value)
    return value
